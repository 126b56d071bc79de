"""The limits of issue 3, for one H200 and the MLP of Qwen3.6-27B."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from measure import Figure, Row

SOURCE = "issue 3"
SHAPE = "qwen3.6-27b"
LIMITS: dict[tuple[str, str, str], Figure] = {
    ("step", "fused, 4 x 1024 tokens, microbatch 1", "time"): Figure(18, "ms"),
    ("step", "fused, 8 x 4096 tokens, microbatch 2", "time"): Figure(75, "ms"),
    ("step", "fused, 64 x 4096 tokens, microbatch 2", "ratio_to_floor"): Figure(1.12, "x"),
    ("step", "fused, 4 x 1024 tokens, microbatch 1", "peak"): Figure(5.3, "GiB"),
    ("optimizer", "fused", "time"): Figure(4, "ms"),
    ("gptq", "gate_proj 17408 x 5120", "time"): Figure(300, "ms"),
    ("gptq", "down_proj 5120 x 17408", "time"): Figure(1000, "ms"),
    ("hessian", "4096 tokens, 5120 inputs", "time"): Figure(5, "ms"),
    ("hessian", "4096 tokens, 17408 inputs", "time"): Figure(14, "ms"),
}
"""At most; by part, row and figure."""


@dataclass
class Verdict:
    """One limit beside what was measured; `passed` is None where it was not."""

    part: str
    name: str
    figure: str
    limit: Figure
    measured: Figure | None
    passed: bool | None


def not_applicable(shape: str, device: torch.device) -> str | None:
    """Why the limits say nothing about this run, if so."""
    if shape != SHAPE or device.type != "cuda":
        return f"the limits of {SOURCE} are for --shape {SHAPE} on one H200, not for {shape} on {device.type}"
    name = torch.cuda.get_device_name(device)
    return None if "H200" in name else f"the limits of {SOURCE} are for one H200, this is {name}"


def compare(rows: Iterable[Row]) -> list[Verdict]:
    """Every limit beside its measurement."""
    measured = {(row.part, row.name, name): figure for row in rows for name, figure in row.figures.items()}
    verdicts = []
    for key, limit in LIMITS.items():
        figure = measured.get(key)
        assert figure is None or figure.unit == limit.unit, (key, figure)
        passed = None if figure is None else figure.value <= limit.value
        verdicts.append(Verdict(*key, limit, figure, passed))
    return verdicts
