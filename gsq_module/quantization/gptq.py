"""GPTQ (arXiv 2210.17323): column by column rounding, the error of each passed on to those that follow.

The weights of a group are complete, all earlier errors passed on, when its scale is searched. Rows do not depend on
each other, given the factor of the inverse Hessian: on CUDA a kernel takes each of them through a block of columns.

Peak memory: two float32 matrices of in_features squared, and the Hessian itself where it is kept.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from gsq_module.problems import NumericalError
from gsq_module.quantization.grid import Grid, QuantizedWeight
from gsq_module.quantization.hessian import Hessian
from gsq_module.quantization.scales import round_to_nearest, search_scales

try:
    from gsq_module.quantization import rounding_kernels
except ImportError:  # as in optimizer.py
    rounding_kernels = None  # type: ignore[assignment]

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
    fused: bool = True,
    keep: bool = True,
) -> GPTQResult:
    """Quantize one linear layer.

    Args:
        weight: `[out_features, in_features]`, any floating dtype; not modified.
        hessian: Of its inputs.
        grid: Target grid.
        group_size: Input columns that share a scale; divides `in_features`.
        scale_dtype: The export's dtype.
        signed: Search both signs of the scale on lopsided grids.
        damping: Fraction of the mean diagonal added to the diagonal.
        fused: Use the Triton kernels where they can serve (CUDA).
        keep: Whether the Hessian is needed again; otherwise its matrix is given up once it has been read.

    Returns:
        The result. A linear that no token reached, or whose Hessian has no Cholesky factor after four attempts, is
        rounded to nearest, and says so.

    Raises:
        NumericalError: The weight is not finite.
    """
    check_weight(hessian.name, weight)
    factor, note = factorize(hessian, damping, keep)
    if factor is None:
        return GPTQResult(round_to_nearest(weight, grid, group_size, scale_dtype, signed, fused), "rtn", note)
    return GPTQResult(solve(weight, factor, grid, group_size, scale_dtype, signed, fused), "gptq", note)


def check_weight(name: str, weight: Tensor) -> None:
    """Look for numbers in a linear's weight `[rows, in_features]` that are none.

    Raises:
        NumericalError: There are some; tells how many, and the first.
    """
    finite = torch.isfinite(weight)
    if bool(finite.all()):
        return
    bad = weight[~finite]
    raise NumericalError(
        f"{name}: the checkpoint's weight is not finite ({len(bad)} of {weight.numel()} numbers; the first is "
        f"{float(bad[0])}): get the checkpoint again. Next: the same command with it and another --run_dir"
    )


def factorize(hessian: Hessian, damping: float, keep: bool = True) -> tuple[Tensor | None, str]:
    """The factor of a Hessian's inverse, and what is unusual about it; `keep` as in `gptq`.

    Returns:
        The factor `[in_features, in_features]` with a remark, empty in the ordinary case; or None with the reason why
        there is none.
    """
    hessian.check()
    if hessian.num_tokens == 0:
        factor, note = None, "no calibration token reached it"
    else:
        in_features, dead = len(hessian.matrix), int((hessian.matrix.diagonal() == 0).sum())
        factor, used_damping = inverse_factor(hessian, damping, keep)
        note = "its Hessian is not invertible"
        if factor is not None:
            note = _note(hessian.num_tokens, in_features, dead, used_damping if used_damping != damping else None)
    if note:
        log.warning("%s: %s%s", hessian.name, "" if factor is not None else "rounded to nearest, ", note)
    return factor, note


@torch.no_grad()
def solve(
    weight: Tensor,
    factor: Tensor,
    grid: Grid,
    group_size: int,
    scale_dtype: torch.dtype,
    signed: bool = True,
    fused: bool = True,
) -> QuantizedWeight:
    """GPTQ proper, of any rows of a layer.

    Args:
        weight: `[rows, in_features]`, any floating dtype; not modified.
        factor: `[in_features, in_features]`, of `factorize`.
        grid: Target grid; the others as in `gptq`.
    """
    work = weight.to(torch.float32, copy=True)
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(weight.shape[0], weight.shape[1] // group_size, dtype=scale_dtype, device=weight.device)
    for group in range(scales.shape[1]):
        begin, end = group * group_size, (group + 1) * group_size
        scales[:, group] = search_scales(work[:, begin:end], grid, scale_dtype, signed, fused)
        for left in range(begin, end, MAX_BLOCK):
            right = min(left + MAX_BLOCK, end)
            errors = round_block(
                work[:, left:right], codes[:, left:right], scales[:, group], factor[left:right, left:right], grid, fused
            )
            work[:, right:].addmm_(errors, factor[left:right, right:], alpha=-1.0)
    return QuantizedWeight(codes, scales)


def round_block(work: Tensor, codes: Tensor, scale: Tensor, factor: Tensor, grid: Grid, fused: bool = True) -> Tensor:
    """Round the columns of one block in order.

    Args:
        work: float32 `[out_features, block]`; used up.
        codes: int8 `[out_features, block]`; filled.
        scale: `[out_features]`.
        factor: `[block, block]`, the block's part of the inverse Hessian's factor.
        fused: Use the Triton kernel where it can serve.

    Returns:
        The errors `[out_features, block]`, to be passed on to the columns behind the block.
    """
    if fused and rounding_kernels is not None and rounding_kernels.usable(work):
        return rounding_kernels.round_block(work, codes, scale, factor, grid)
    scale = scale.float()
    errors = torch.empty_like(work)
    for j in range(work.shape[1]):
        column = work[:, j]
        code = grid.nearest(column / scale)
        codes[:, j] = code.to(torch.int8)
        row = factor[j, j:]
        error = (column - code * scale) / row[0]
        errors[:, j] = error
        work[:, j:] -= torch.outer(error, row)
    return errors


def inverse_factor(hessian: Hessian, damping: float, keep: bool = True) -> tuple[Tensor | None, float]:
    """Upper Cholesky factor of the inverse of the damped Hessian.

    Columns that are always zero (dead) get the mean diagonal: they are rounded to nearest and pass no error on.

    With J the reversal of the order of columns and J H J = L L^T, the factor U of H^-1 = U^T U is J L^-1 J: one
    Cholesky factorization and one triangular inverse, where inverting H and factorizing that takes three such passes
    and loses more digits. At most two matrices are held at a time, and the Hessian's where it is kept.

    Returns:
        The factor, float32 `[in_features, in_features]`, or None, and the damping that was used.
    """
    reversed_ = hessian.matrix.float().flip(0, 1)
    if not keep:
        hessian.give_up()
    diagonal = reversed_.diagonal().clone()
    dead = diagonal == 0
    mean = diagonal[~dead].mean() if bool((~dead).any()) else diagonal.new_tensor(1.0)
    diagonal[dead] = mean
    for attempt in range(MAX_ATTEMPTS):
        current = damping * 10.0**attempt
        reversed_.diagonal().copy_(diagonal + current * mean)
        lower = _cholesky(reversed_)
        if lower is not None:
            break
    else:
        return None, current
    del reversed_
    # In place: LAPACK's order is by columns.
    inverse = torch.eye(len(lower), device=lower.device).mT
    torch.linalg.solve_triangular(lower, inverse, upper=False, out=inverse)
    del lower
    return inverse.flip(0, 1), current


def _cholesky(matrix: Tensor) -> Tensor | None:
    """The lower Cholesky factor, or None where there is none that can be inverted."""
    lower, info = torch.linalg.cholesky_ex(matrix)
    usable = int(info) == 0 and bool(torch.isfinite(lower.diagonal().reciprocal()).all())
    return lower if usable else None


def _note(tokens: int, in_features: int, dead: int, raised_damping: float | None) -> str:
    """What is unusual about a Hessian that was used all the same."""
    remarks = []
    if tokens < in_features:
        remarks.append(f"only {tokens} calibration tokens for {in_features} input columns")
    if dead:
        remarks.append(f"{dead} input columns always zero")
    if raised_damping is not None:
        remarks.append(f"damping raised to {raised_damping:g}")
    return ", ".join(remarks)
