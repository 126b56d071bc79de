"""GPTQ (arXiv 2210.17323): column by column rounding, the error of each passed on to those that follow.

The weights of a group are complete, all earlier errors passed on, when its scale is searched.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from gsq_module.quantization.grid import Grid, QuantizedWeight
from gsq_module.quantization.hessian import Hessian
from gsq_module.quantization.scales import round_to_nearest, search_scales

log = logging.getLogger(__name__)

MAX_BLOCK = 128
"""Columns whose errors are passed on one at a time; the rest of the row gets them as one matrix product."""
MAX_ATTEMPTS = 4
"""Cholesky attempts; the damping grows tenfold after each."""


@dataclass(frozen=True)
class GPTQResult:
    """Codes and scales, and how they were come by.

    Attributes:
        weight: Codes and scales.
        method: `gptq`, or `rtn` where there was no usable Hessian.
        note: Why round-to-nearest was used, or what was amiss with the Hessian; empty in the ordinary case.
    """

    weight: QuantizedWeight
    method: str
    note: str = ""


@torch.no_grad()
def gptq(
    weight: Tensor,
    hessian: Hessian,
    grid: Grid,
    group_size: int,
    scale_dtype: torch.dtype,
    signed: bool = True,
    damping: float = 0.01,
) -> GPTQResult:
    """Quantize one linear layer.

    Args:
        weight: `[out_features, in_features]`, any floating dtype; not modified.
        hessian: Of its inputs. Not modified.
        grid: Target grid.
        group_size: Input columns that share a scale; divides `in_features`.
        scale_dtype: The export's dtype.
        signed: Search both signs of the scale on lopsided grids.
        damping: Fraction of the mean diagonal added to the diagonal.

    Returns:
        The result. A linear that no token reached, or whose Hessian has no Cholesky factor after four attempts, is
        rounded to nearest, and says so.

    Raises:
        ValueError: The weight is not finite.
    """
    if not bool(torch.isfinite(weight).all()):
        raise ValueError(f"{hessian.name}: the checkpoint's weight is not finite")
    if hessian.num_tokens == 0:
        return _rounded(weight, grid, group_size, scale_dtype, signed, hessian.name, "no calibration token reached it")
    factor, used_damping = inverse_factor(hessian.matrix, damping)
    if factor is None:
        return _rounded(weight, grid, group_size, scale_dtype, signed, hessian.name, "its Hessian is not invertible")
    note = _note(hessian, used_damping if used_damping != damping else None)
    if note:
        log.warning("%s: %s", hessian.name, note)
    work = weight.float().clone()
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(weight.shape[0], weight.shape[1] // group_size, dtype=scale_dtype, device=weight.device)
    for group in range(scales.shape[1]):
        begin, end = group * group_size, (group + 1) * group_size
        scales[:, group] = search_scales(work[:, begin:end], grid, scale_dtype, signed)
        for left in range(begin, end, MAX_BLOCK):
            right = min(left + MAX_BLOCK, end)
            errors = _round_block(work[:, left:right], codes[:, left:right], scales[:, group], factor, left, grid)
            work[:, right:] -= errors @ factor[left:right, right:]
    return GPTQResult(QuantizedWeight(codes, scales), "gptq", note)


def _round_block(work: Tensor, codes: Tensor, scale: Tensor, factor: Tensor, left: int, grid: Grid) -> Tensor:
    """Round the columns of one block in order; fills `codes`, returns the errors `[out_features, block]`."""
    scale = scale.float()
    errors = torch.empty_like(work)
    for j in range(work.shape[1]):
        column = work[:, j]
        code = grid.nearest(column / scale)
        codes[:, j] = code.to(torch.int8)
        row = factor[left + j, left + j : left + work.shape[1]]
        error = (column - code * scale) / row[0]
        errors[:, j] = error
        work[:, j:] -= torch.outer(error, row)
    return errors


def inverse_factor(matrix: Tensor, damping: float) -> tuple[Tensor | None, float]:
    """Upper Cholesky factor of the inverse of the damped Hessian.

    Columns that are always zero (dead) get the mean diagonal: they are rounded to nearest and pass no error on.

    Returns:
        The factor `[in_features, in_features]`, or None, and the damping that was used.
    """
    damped = matrix.clone()
    diagonal = damped.diagonal()
    dead = diagonal == 0
    mean = diagonal[~dead].mean() if bool((~dead).any()) else diagonal.new_tensor(1.0)
    diagonal[dead] = mean
    original = diagonal.clone()
    for attempt in range(MAX_ATTEMPTS):
        current = damping * 10.0**attempt
        diagonal.copy_(original + current * mean)
        lower, info = torch.linalg.cholesky_ex(damped)
        if int(info) == 0:
            torch.cholesky_inverse(lower, out=damped)
            upper, info = torch.linalg.cholesky_ex(damped, upper=True)
            if int(info) == 0 and bool(torch.isfinite(upper).all()):
                return upper, current
            damped.copy_(matrix)
    return None, current


def _note(hessian: Hessian, raised_damping: float | None) -> str:
    """What is unusual about a Hessian that was used all the same."""
    in_features = len(hessian.matrix)
    dead = int((hessian.matrix.diagonal() == 0).sum())
    remarks = []
    if hessian.num_tokens < in_features:
        remarks.append(f"only {hessian.num_tokens} calibration tokens for {in_features} input columns")
    if dead:
        remarks.append(f"{dead} input columns always zero")
    if raised_damping is not None:
        remarks.append(f"damping raised to {raised_damping:g}")
    return ", ".join(remarks)


def _rounded(
    weight: Tensor, grid: Grid, group_size: int, scale_dtype: torch.dtype, signed: bool, name: str, reason: str
) -> GPTQResult:
    log.warning("%s: rounded to nearest, %s", name, reason)
    return GPTQResult(round_to_nearest(weight, grid, group_size, scale_dtype, signed), "rtn", reason)
