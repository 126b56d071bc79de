"""Parts `gptq` and `hessian`: what comes before the refinement."""

from __future__ import annotations

from functools import partial

import torch
from context import GRID, Bench
from measure import Figure, Measurements, PeakMemory, Row, milliseconds

from gsq_module.quantization.gptq import gptq
from gsq_module.quantization.hessian import Hessian

DIRECTIONS = 64
"""Strong common directions of the synthetic activations."""


def correlated_tokens(bench: Bench, tokens: int, features: int) -> torch.Tensor:
    """Activations `[tokens, features]` with some strong directions, as a transformer's have."""
    random = bench.generator()

    def normal(rows: int, cols: int) -> torch.Tensor:
        return torch.randn(rows, cols, generator=random, device=bench.device, dtype=bench.dtype)

    mixed = normal(tokens, DIRECTIONS) @ normal(DIRECTIONS, features)
    return mixed.mul_(0.5).add_(normal(tokens, features))


def solve(bench: Bench) -> Measurements:
    """GPTQ of gate and down."""
    for name in ("gate_proj", "down_proj"):
        rows, cols = bench.shape.linears[name]
        yield f"{name} {rows} x {cols}", partial(_solve_row, bench, rows, cols)


def _solve_row(bench: Bench, rows: int, cols: int, row: Row) -> None:
    bench.refuse_interpreter()
    hessian = Hessian("benchmark", cols, bench.device)
    hessian.add(correlated_tokens(bench, bench.shape.gptq_tokens, cols))
    weight = torch.randn(rows, cols, generator=bench.generator(), device=bench.device, dtype=bench.dtype).mul_(0.02)

    def call(keep: bool = True) -> None:
        result = gptq(weight, hessian, GRID, bench.shape.group_size, torch.bfloat16, damping=0.01, keep=keep)
        if result.method != "gptq":
            raise RuntimeError(f"GPTQ gave up: {result.note}")

    row.figures["time"] = milliseconds(bench.seconds_of(call))
    matrix = hessian.matrix.nbytes
    peak = PeakMemory(bench.device)
    call(keep=False)  # as a run does for the last linear that a Hessian is for
    peak.note(row)
    if peak.bytes is not None:
        beyond = peak.bytes - peak.before + matrix
        row.figures["peak_matrices"] = Figure(beyond / (4 * cols**2), "float32 in_features^2")
        row.notes.append("peak_matrices: Hessian and all the solve allocates, also what has the weight's size")


def hessian(bench: Bench) -> Measurements:
    """Adding tokens to a Hessian of each width."""
    for features in (bench.shape.hidden, bench.shape.intermediate):
        yield f"{bench.shape.hessian_tokens} tokens, {features} inputs", partial(_hessian_row, bench, features)


def _hessian_row(bench: Bench, features: int, row: Row) -> None:
    tokens = correlated_tokens(bench, bench.shape.hessian_tokens, features)
    target = Hessian("benchmark", features, bench.device)
    peak = PeakMemory(bench.device)
    row.figures["time"] = milliseconds(bench.seconds_of(partial(target.add, tokens)))
    peak.note(row)
