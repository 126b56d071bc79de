"""Triton kernels of the initial codes: scale search, and GPTQ's column-by-column rounding of a block.

Rows are independent of each other in both. The eager versions (scales.py, gptq.py) are their oracles.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gsq_module.quantization.grid import Grid
from gsq_module.quantization.kernel_functions import interpreted

SEARCH_TILE = 1024
"""Weights a program of the scale search handles."""
ROUND_ROWS = 4
"""Rows a program of the rounding handles, in one warp: no column waits for a barrier."""
LARGEST_GROUP = 4096
"""Longest group whose weights a program of the scale search can hold."""
_HALF_WAY = tl.constexpr(12582912.0)  # 1.5 x 2^23: adding it leaves no bit behind the point


def usable(weight: Tensor) -> bool:
    """Whether the kernels can serve `[rows, columns]` or `[rows, groups, columns]`, groups adjacent, in float32."""
    if weight.dtype != torch.float32 or not (weight.is_cuda or interpreted()) or weight.shape[-1] > LARGEST_GROUP:
        return False
    return (
        weight.stride(-1) == 1 and weight.ndim in (2, 3) and (weight.ndim == 2 or weight.stride(1) == weight.shape[2])
    )


@triton.jit
def _nearest(value, low, high, STEP: tl.constexpr):
    """Grid.nearest: to the nearest code, half-way cases to even."""
    if STEP == 1:
        value = tl.minimum(tl.maximum(value, low), high)
        return (value + _HALF_WAY) - _HALF_WAY
    else:
        level = tl.minimum(tl.maximum((value - low) / STEP, 0.0), (high - low) / STEP)
        return ((level + _HALF_WAY) - _HALF_WAY) * STEP + low


@triton.jit
def _attempt(weight, mask, scale, best_error, best_scale, low, high, STEP: tl.constexpr, DTYPE: tl.constexpr):
    """Take a scale, rounded to the export's dtype, if its squared error is smaller than the best so far."""
    scale = scale.to(DTYPE).to(tl.float32)
    wide = scale[:, None]
    difference = _nearest(tl.div_rn(weight, wide + tl.zeros_like(weight)), low, high, STEP) * wide - weight
    # The 1-bit grid has no 0: what lies behind the group's end must not count.
    difference = tl.where(mask, difference, 0.0)
    error = tl.sum(difference * difference, axis=1)
    better = error < best_error
    return tl.where(better, error, best_error), tl.where(better, scale, best_scale)


@triton.jit
def _search_kernel(
    weight, scales, num_groups, groups_per_row, row_stride, scale_stride, low, high, floor, smallest,
    STEP: tl.constexpr, SIGNS: tl.constexpr, COARSE: tl.constexpr, FINE: tl.constexpr, SHRINK: tl.constexpr,
    GROUP: tl.constexpr, PADDED: tl.constexpr, GROUPS_PER_PROGRAM: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0).to(tl.int64) * GROUPS_PER_PROGRAM + tl.arange(0, GROUPS_PER_PROGRAM)
    in_range = group < num_groups
    row, place = group // groups_per_row, group % groups_per_row
    column = tl.arange(0, PADDED)
    mask = in_range[:, None] & (column[None, :] < GROUP)
    w = tl.load(weight + (row * row_stride + place * GROUP)[:, None] + column[None, :], mask=mask, other=0.0)
    highest, lowest = tl.max(w, axis=1), tl.min(w, axis=1)
    dtype: tl.constexpr = scales.dtype.element_ty
    spacing = (1.0 - SHRINK) / (COARSE - 1)
    best_error = tl.full([GROUPS_PER_PROGRAM], float("inf"), tl.float32)
    best_scale = tl.full([GROUPS_PER_PROGRAM], 1.0, tl.float32)
    for turn in tl.static_range(SIGNS):
        sign = 1.0 - 2.0 * turn
        up, down = high, -low
        if turn == 1:
            up, down = -low, high
        full = tl.maximum(tl.maximum(highest / up, -lowest / down), floor) * sign
        error = tl.full([GROUPS_PER_PROGRAM], float("inf"), tl.float32)
        scale = tl.zeros_like(full) + sign
        for index in range(COARSE):
            error, scale = _attempt(w, mask, full * (1.0 - index * spacing), error, scale, low, high, STEP, dtype)
        center = scale
        for index in range(FINE):
            offset = spacing * (2.0 * (index + 0.5) / FINE - 1.0)
            error, scale = _attempt(w, mask, center + full * offset, error, scale, low, high, STEP, dtype)
        code = _nearest(tl.div_rn(w, scale[:, None] + tl.zeros_like(w)), low, high, STEP)
        code = tl.where(mask, code, 0.0)
        fitted = tl.sum(code * w, axis=1) / tl.sum(code * code, axis=1)
        fitted = tl.where(tl.abs(fitted) > smallest, fitted, scale)
        error, scale = _attempt(w, mask, fitted, error, scale, low, high, STEP, dtype)
        better = error < best_error
        best_error = tl.where(better, error, best_error)
        best_scale = tl.where(better, scale, best_scale)
    tl.store(scales + row * scale_stride + place, best_scale.to(dtype), mask=in_range)


def search_scales(
    weight: Tensor,
    grid: Grid,
    scale_dtype: torch.dtype,
    signs: int,
    steps: tuple[int, int],
    smallest_shrink: float,
    floor: float,
) -> Tensor:
    """scales.search_scales in one pass over memory.

    Args:
        weight: `[rows, group_size]` or `[rows, groups, group_size]`, as `usable` asks.
        signs: 1, or 2 to try negative scales too.
        steps: Coarse and fine steps of a sign's search.
        smallest_shrink: Smallest scale of the coarse search, as a part of the one that covers the whole range.
        floor: Smallest full-range scale.

    Returns:
        Scales `[rows]` or `[rows, groups]` in `scale_dtype`.
    """
    scales = torch.empty(weight.shape[:-1], dtype=scale_dtype, device=weight.device)
    groups_per_row = 1 if weight.ndim == 2 else weight.shape[1]
    padded = triton.next_power_of_2(weight.shape[-1])
    per_program = max(1, SEARCH_TILE // padded)
    _search_kernel[(triton.cdiv(scales.numel(), per_program),)](
        weight, scales, scales.numel(), groups_per_row, weight.stride(0), scales.stride(0), float(grid.low),
        float(grid.high), floor, floor * smallest_shrink, STEP=grid.step, SIGNS=signs, COARSE=steps[0], FINE=steps[1],
        SHRINK=smallest_shrink, GROUP=weight.shape[-1], PADDED=padded, GROUPS_PER_PROGRAM=per_program,
    )  # fmt: skip
    return scales


@triton.jit
def _round_kernel(
    work, codes, scales, factor, errors, rows, width, work_stride, code_stride, scale_stride, factor_stride, low, high,
    STEP: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    in_range = row < rows
    column = tl.arange(0, PADDED)
    in_width = column < width
    mask = in_range[:, None] & in_width[None, :]
    w = tl.load(work + row[:, None] * work_stride + column[None, :], mask=mask, other=0.0)
    scale = tl.load(scales + row * scale_stride, mask=in_range, other=1.0).to(tl.float32)
    code = tl.zeros_like(w)
    error = tl.zeros_like(w)
    for j in range(width):
        here = (column == j)[None, :]
        value = tl.sum(tl.where(here, w, 0.0), axis=1)
        nearest = _nearest(tl.div_rn(value, scale), low, high, STEP)
        factor_row = tl.load(factor + j * factor_stride + column, mask=(column >= j) & in_width, other=0.0)
        pivot = tl.load(factor + j * factor_stride + j)
        missed = tl.div_rn(value - nearest * scale, tl.zeros_like(value) + pivot)
        code = tl.where(here, nearest[:, None], code)
        error = tl.where(here, missed[:, None], error)
        w -= missed[:, None] * factor_row[None, :]
    tl.store(codes + row[:, None] * code_stride + column[None, :], code.to(tl.int8), mask=mask)
    tl.store(errors + row[:, None] * width + column[None, :], error, mask=mask)


def round_block(work: Tensor, codes: Tensor, scale: Tensor, factor: Tensor, grid: Grid) -> Tensor:
    """gptq.round_block in one pass over memory.

    Args:
        work: float32 `[rows, block]`, columns adjacent; not modified: its columns are done with.
        codes: int8 `[rows, block]`, columns adjacent; filled.
        scale: `[rows]`.
        factor: float32 `[block, block]`.

    Returns:
        Errors `[rows, block]`, to be passed on to the columns behind the block.
    """
    errors = torch.empty(work.shape, dtype=torch.float32, device=work.device)
    factor = factor.contiguous()  # every program reads its rows
    _round_kernel[(triton.cdiv(work.shape[0], ROUND_ROWS),)](
        work, codes, scale, factor, errors, *work.shape, work.stride(0), codes.stride(0), scale.stride(0),
        factor.stride(0), float(grid.low), float(grid.high), STEP=grid.step, ROWS=ROUND_ROWS,
        PADDED=triton.next_power_of_2(work.shape[1]), num_warps=1,
    )  # fmt: skip
    return errors
