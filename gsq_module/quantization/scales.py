"""Scale search by squared error on each group, and round-to-nearest."""

from __future__ import annotations

import torch
from torch import Tensor

from gsq_module.quantization.grid import Grid, QuantizedWeight

SMALLEST_SHRINK = 0.2
COARSE_STEPS = 17
FINE_STEPS = 8
"""The search tries the scale that covers the whole range times 1.0, ..., 0.2 (GPTQ's code takes 80 even steps): first
in 17 steps of 0.05, then in 8 between the neighbours of the best, which costs a third and ends finer."""


def search_scales(weight: Tensor, grid: Grid, scale_dtype: torch.dtype, signed: bool = True) -> Tensor:
    """The scale of each group with the smallest squared rounding error.

    Args:
        weight: `[..., group_size]`, float32.
        grid: Target grid.
        scale_dtype: The export's dtype: candidates are rounded to it before their error is taken.
        signed: Whether to try both signs on lopsided grids (costs nothing in any format; see docs/experiments.md).

    Returns:
        `[...]` in `scale_dtype`; finite and never zero.
    """
    top = weight.amax(-1)
    bottom = -weight.amin(-1)
    floor = torch.finfo(scale_dtype).tiny / SMALLEST_SHRINK * 2
    best_error = torch.full(weight.shape[:-1], float("inf"), device=weight.device)
    best_scale = torch.ones_like(best_error)
    step_of_best = torch.zeros_like(best_error)

    def attempt(scale: Tensor, step: Tensor) -> None:
        nonlocal best_error, best_scale, step_of_best
        scale = scale.to(scale_dtype).float()
        wide = scale.unsqueeze(-1)
        error = grid.nearest(weight / wide).mul_(wide).sub_(weight).square_().sum(-1)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_scale = torch.where(better, scale, best_scale)
        step_of_best = torch.where(better, step, step_of_best)

    spacing = (1.0 - SMALLEST_SHRINK) / (COARSE_STEPS - 1)
    for sign in (1.0, -1.0) if signed and grid.is_lopsided else (1.0,):
        reach_up, reach_down = (grid.high, -grid.low) if sign > 0 else (-grid.low, grid.high)
        full = torch.maximum(top / reach_up, bottom / reach_down).clamp_(min=floor)
        for index in range(COARSE_STEPS):
            attempt(full * (sign * (1.0 - index * spacing)), full * (sign * spacing))
    center, step = best_scale, step_of_best
    for index in range(FINE_STEPS):
        offset = 2.0 * (index + 0.5) / FINE_STEPS - 1.0
        attempt(center + offset * step, step)
    return best_scale.to(scale_dtype)


def round_to_nearest(
    weight: Tensor, grid: Grid, group_size: int, scale_dtype: torch.dtype, signed: bool = True
) -> QuantizedWeight:
    """Codes by rounding alone, with searched scales.

    Args:
        weight: `[out_features, in_features]`.
    """
    grouped = weight.float().view(weight.shape[0], -1, group_size)
    scales = search_scales(grouped, grid, scale_dtype, signed)
    codes = grid.nearest(grouped / scales.float().unsqueeze(-1)).to(torch.int8)
    return QuantizedWeight(codes.view(weight.shape), scales)
