"""Scale search by squared error on each group, and round-to-nearest."""

from __future__ import annotations

import torch
from torch import Tensor

from gsq_module.quantization.grid import Grid, QuantizedWeight

try:
    from gsq_module.quantization import rounding_kernels
except ImportError:  # as in optimizer.py
    rounding_kernels = None  # type: ignore[assignment]

SMALLEST_SHRINK = 0.2
COARSE_STEPS = 17
FINE_STEPS = 6
"""For each sign the search tries the scale that covers the whole range times 1.0, ..., 0.2 in 17 even steps (GPTQ's
code takes 80), then 6 between the neighbours of the best, then the least-squares scale of the best one's codes. The
last matters most where the best scale lies below 0.2: on the 1-bit grid with an outlier in the group."""


def search_scales(
    weight: Tensor, grid: Grid, scale_dtype: torch.dtype, signed: bool = True, fused: bool = True
) -> Tensor:
    """The scale of each group with the smallest squared rounding error.

    Args:
        weight: `[..., group_size]`, float32.
        grid: Target grid.
        scale_dtype: The export's dtype: candidates are rounded to it before their error is taken.
        signed: Whether to try both signs on lopsided grids (costs nothing in any format; see docs/experiments.md).
        fused: Use the Triton kernel where it can serve (CUDA).

    Returns:
        `[...]` in `scale_dtype`; finite and never zero.
    """
    signs = (1.0, -1.0) if signed and grid.is_lopsided else (1.0,)
    if fused and rounding_kernels is not None and rounding_kernels.usable(weight):
        steps = COARSE_STEPS, FINE_STEPS
        return rounding_kernels.search_scales(
            weight, grid, scale_dtype, len(signs), steps, SMALLEST_SHRINK, _smallest_full_range(scale_dtype)
        )
    best_error = torch.full(weight.shape[:-1], float("inf"), device=weight.device)
    best_scale = torch.ones_like(best_error)
    for sign in signs:
        error, scale = _search_one_sign(weight, grid, scale_dtype, sign)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_scale = torch.where(better, scale, best_scale)
    return best_scale.to(scale_dtype)


def _search_one_sign(weight: Tensor, grid: Grid, scale_dtype: torch.dtype, sign: float) -> tuple[Tensor, Tensor]:
    """Squared error and scale `[...]` (float32) of the best scale of one sign."""
    best_error = torch.full(weight.shape[:-1], float("inf"), device=weight.device)
    best_scale = torch.full_like(best_error, sign)

    def attempt(scale: Tensor) -> None:
        nonlocal best_error, best_scale
        scale = scale.to(scale_dtype).float()
        wide = scale.unsqueeze(-1)
        error = grid.nearest(weight / wide).mul_(wide).sub_(weight).square_().sum(-1)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_scale = torch.where(better, scale, best_scale)

    floor = _smallest_full_range(scale_dtype)
    reach_up, reach_down = (grid.high, -grid.low) if sign > 0 else (-grid.low, grid.high)
    full = torch.maximum(weight.amax(-1) / reach_up, -weight.amin(-1) / reach_down).clamp_(min=floor).mul_(sign)
    spacing = (1.0 - SMALLEST_SHRINK) / (COARSE_STEPS - 1)
    for index in range(COARSE_STEPS):
        attempt(full * (1.0 - index * spacing))
    center = best_scale
    for index in range(FINE_STEPS):
        attempt(center + full * (spacing * (2.0 * (index + 0.5) / FINE_STEPS - 1.0)))
    codes = grid.nearest(weight / best_scale.unsqueeze(-1))
    fitted = (codes * weight).sum(-1) / codes.square().sum(-1)
    # Not a number where all codes are zero, tiny where all weights are.
    attempt(torch.where(fitted.abs() > floor * SMALLEST_SHRINK, fitted, best_scale))
    return best_error, best_scale


def _smallest_full_range(scale_dtype: torch.dtype) -> float:
    """What the scale that covers the whole range is at least, so that no shrunk one is denormal."""
    return torch.finfo(scale_dtype).tiny / SMALLEST_SHRINK * 2


def round_to_nearest(
    weight: Tensor, grid: Grid, group_size: int, scale_dtype: torch.dtype, signed: bool = True, fused: bool = True
) -> QuantizedWeight:
    """Codes by rounding alone, with searched scales.

    Args:
        weight: `[out_features, in_features]`.
    """
    grouped = weight.float().view(weight.shape[0], -1, group_size)
    scales = search_scales(grouped, grid, scale_dtype, signed, fused)
    codes = grid.nearest(grouped / scales.float().unsqueeze(-1)).to(torch.int8)
    return QuantizedWeight(codes.view(weight.shape), scales)
