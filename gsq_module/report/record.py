"""What a run directory tells of its run: the summary, and the metrics of all its sessions."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gsq_module.metrics_log import METRICS_FILE, read_rows

_NUMBER = (int, float)
NEEDED: dict[str, type | tuple[type, ...]] = {
    "perplexity_by_text": dict,
    "kl_divergence_by_text": dict,
    "top1_agreement_by_text": dict,
    "bits_per_weight": (*_NUMBER, type(None)),
    "coverage.quantized_parameters": int,
    "coverage.quantized_fraction": _NUMBER,
    "coverage.float_parameters": dict,
    "units": list,
    "outer": list,
    "final_pass": (dict, type(None)),
    "seconds.total": _NUMBER,
    "peak_memory.host_bytes": _NUMBER,
    "peak_memory.device_bytes_by_stage": dict,
    "peak_memory.predicted_bytes_by_stage": dict,
    "device": str,
    "export": (dict, type(None)),
    "continuations": list,
}
"""What a report shows of a summary, and of which types it is."""


@dataclass(frozen=True)
class Record:
    """A finished run.

    Attributes:
        summary: summary.json.
        metrics: Rows of the run's one log in the order of logging. Every session of the run goes on in it, and `step`
            counts over all of them (`metrics_log.RunCSVLogger`).
    """

    summary: dict[str, Any]
    metrics: list[dict[str, float]]

    @classmethod
    def of(cls, run_dir: Path) -> Record:
        """Read a run directory.

        Raises:
            FileNotFoundError: No finished run is in it.
            ValueError: Its summary.json is broken, or not the summary of a run.
        """
        file = run_dir / "summary.json"
        if not file.is_file():
            raise FileNotFoundError(f"run_dir={str(run_dir)!r} holds no finished run: {file} is missing. Run fit first")
        return cls(_read_summary(file), read_rows(run_dir / METRICS_FILE))

    def series(self, name: str) -> tuple[list[float], list[float]]:
        """Steps and values of one metric."""
        rows = [row for row in self.metrics if name in row]
        return [row["step"] for row in rows], [row[name] for row in rows]

    def loss_curves(self) -> list[tuple[int, list[float], list[float]]]:
        """Of each unit in order: its block, steps since its start, and `train/error` there.

        A unit that was cut off has no end in the log: what is known of it joins the curve of its second try.
        """
        curves = []
        steps: list[float] = []
        errors: list[float] = []
        for row in self.metrics:
            if "train/error" in row:
                steps.append(row["step"])
                errors.append(row["train/error"])
            if "unit/block" in row:
                if steps:
                    curves.append((int(row["unit/block"]), [step - steps[0] for step in steps], errors))
                steps, errors = [], []
        return curves


def _read_summary(file: Path) -> dict[str, Any]:
    remedy = (
        "Next: the same fit again, recipes/run.py fit --config RECIPE, which keeps what is finished and writes it anew"
    )
    try:
        summary = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # not JSON, or not UTF-8
        raise ValueError(f"{file} is empty, cut off or no JSON ({error}). {remedy}") from error
    wrong = [key for key, types in NEEDED.items() if not isinstance(_value(summary, key), types)]
    if wrong:
        raise ValueError(f"{file} is not the summary of a run: {', '.join(wrong)} missing or of another type. {remedy}")
    return summary


def _value(summary: Any, key: str) -> Any:
    """What stands under a key such as `seconds.total`; the class `object` where there is nothing."""
    for part in key.split("."):
        if not isinstance(summary, dict) or part not in summary:
            return object
        summary = summary[part]
    return summary
