"""Fused Triton kernels of the relaxation: one pass over memory a step. The eager path (relaxation.py) is their oracle.

A weight is contiguous and its groups divide its rows, so a kernel sees it as a list of groups: program p takes
`GROUPS_PER_PROGRAM` of them, each padded to a power of two. Noise comes from the same integer hash as in noise.py.

Bytes a weight of an update with 4 candidates and bfloat16 state: gradient 2, logits 8 + 8, momentum 8 + 8, sample 2.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gsq_module.quantization.grid import Grid
from gsq_module.quantization.noise import LEVEL_INCREMENT, MULTIPLIER_1, MULTIPLIER_2, as_int32
from gsq_module.quantization.relaxation import Draw

TILE = 1024
"""Weights a program handles (measured: docs/experiments.md)."""
_MULTIPLIER_1 = tl.constexpr(MULTIPLIER_1)
_MULTIPLIER_2 = tl.constexpr(MULTIPLIER_2)
_LEVEL_INCREMENT = tl.constexpr(LEVEL_INCREMENT)


def interpreted() -> bool:
    """Whether Triton runs its kernels in its interpreter, on CPU tensors (for tests)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@triton.jit
def _mix(x):
    x = x ^ (x >> 16)
    x = x * _MULTIPLIER_1
    x = x ^ (x >> 15)
    x = x * _MULTIPLIER_2
    return x ^ (x >> 16)


@triton.jit
def _first_word(index, key_0, key_1):
    """Random word of levels 0 and 1; `index` is the global flat index, int64."""
    low = index.to(tl.uint32)
    high = (index >> 32).to(tl.uint32)
    word = _mix(low ^ key_0.to(tl.uint32, bitcast=True)) + key_1.to(tl.uint32, bitcast=True)
    return _mix(word + high * _LEVEL_INCREMENT)


@triton.jit
def _next_word(word):
    return _mix(word + _LEVEL_INCREMENT)


@triton.jit
def _bits(word_01, word_23, word_4, LEVEL: tl.constexpr):
    """16 random bits of one level."""
    if LEVEL // 2 == 0:
        word = word_01
    elif LEVEL // 2 == 1:
        word = word_23
    else:
        word = word_4
    if LEVEL % 2 == 0:
        bits = word & 0xFFFF
    else:
        bits = word >> 16
    return bits


@triton.jit
def _score(logit, word_01, word_23, word_4, logit_factor, inverse_temperature, LEVEL: tl.constexpr):
    """(logit_scale * logit + gumbel) / temperature."""
    uniform = (_bits(word_01, word_23, word_4, LEVEL).to(tl.float32) + 0.5) * 1.52587890625e-05  # 2^-16
    return logit * logit_factor - tl.log(-tl.log(uniform)) * inverse_temperature


@triton.jit
def _softmax(l0, l1, l2, l3, l4, index, key_0, key_1, logit_factor, inverse_temperature, K: tl.constexpr):
    """Probabilities of up to five candidates, and their mean position `sum_k k p_k`."""
    word_01 = _first_word(index, key_0, key_1)
    word_23 = word_01
    word_4 = word_01
    if K > 2:
        word_23 = _next_word(word_01)
    if K > 4:
        word_4 = _next_word(word_23)
    z0 = _score(l0, word_01, word_23, word_4, logit_factor, inverse_temperature, 0)
    z1 = _score(l1, word_01, word_23, word_4, logit_factor, inverse_temperature, 1)
    top = tl.maximum(z0, z1)
    z2, z3, z4 = z0, z0, z0
    if K > 2:
        z2 = _score(l2, word_01, word_23, word_4, logit_factor, inverse_temperature, 2)
        top = tl.maximum(top, z2)
    if K > 3:
        z3 = _score(l3, word_01, word_23, word_4, logit_factor, inverse_temperature, 3)
        top = tl.maximum(top, z3)
    if K > 4:
        z4 = _score(l4, word_01, word_23, word_4, logit_factor, inverse_temperature, 4)
        top = tl.maximum(top, z4)
    p0 = tl.exp(z0 - top)
    p1 = tl.exp(z1 - top)
    total = p0 + p1
    p2, p3, p4 = p0, p0, p0
    if K > 2:
        p2 = tl.exp(z2 - top)
        total += p2
    if K > 3:
        p3 = tl.exp(z3 - top)
        total += p3
    if K > 4:
        p4 = tl.exp(z4 - top)
        total += p4
    norm = 1.0 / total
    p0, p1, p2, p3, p4 = p0 * norm, p1 * norm, p2 * norm, p3 * norm, p4 * norm
    position = p1
    if K > 2:
        position += 2.0 * p2
    if K > 3:
        position += 3.0 * p3
    if K > 4:
        position += 4.0 * p4
    return p0, p1, p2, p3, p4, position


@triton.jit
def _load_logits(logits, size, offset, mask, K: tl.constexpr):
    """Up to five levels in float32; those beyond K repeat the first and are never used."""
    l0 = tl.load(logits + offset, mask=mask, other=0.0).to(tl.float32)
    l1 = tl.load(logits + size + offset, mask=mask, other=0.0).to(tl.float32)
    l2, l3, l4 = l0, l0, l0
    if K > 2:
        l2 = tl.load(logits + 2 * size + offset, mask=mask, other=0.0).to(tl.float32)
    if K > 3:
        l3 = tl.load(logits + 3 * size + offset, mask=mask, other=0.0).to(tl.float32)
    if K > 4:
        l4 = tl.load(logits + 4 * size + offset, mask=mask, other=0.0).to(tl.float32)
    return l0, l1, l2, l3, l4


@triton.jit(do_not_specialize=["start", "key_0", "key_1"])
def _sample_kernel(
    logits, scales, first, weight, num_groups, size, start, key_0, key_1, logit_factor, inverse_temperature,
    low, K: tl.constexpr, STEP: tl.constexpr, WINDOWED: tl.constexpr, GROUP: tl.constexpr,
    PADDED: tl.constexpr, GROUPS_PER_PROGRAM: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0).to(tl.int64) * GROUPS_PER_PROGRAM + tl.arange(0, GROUPS_PER_PROGRAM)
    column = tl.arange(0, PADDED)
    mask = (group[:, None] < num_groups) & (column[None, :] < GROUP)
    offset = group[:, None] * GROUP + column[None, :]
    l0, l1, l2, l3, l4 = _load_logits(logits, size, offset, mask, K)
    p0, p1, p2, p3, p4, position = _softmax(
        l0, l1, l2, l3, l4, start + offset, key_0, key_1, logit_factor, inverse_temperature, K
    )
    code = position * STEP
    if WINDOWED:
        code += tl.load(first + offset, mask=mask, other=0).to(tl.float32)
    else:
        code += low
    scale = tl.load(scales + group, mask=group < num_groups, other=0.0)
    tl.store(weight + offset, (code * scale[:, None]).to(weight.dtype.element_ty), mask=mask)


@triton.jit
def _lion(
    logits, momentum, offset, mask, logit, grad, bits, lr, decay, beta_update, beta_momentum, ROUND: tl.constexpr
):
    """Lion on one level: stores logit and momentum, returns the logit as stored."""
    old = tl.load(momentum + offset, mask=mask, other=0.0).to(tl.float32)
    update = grad + beta_update * (old - grad)
    sign = tl.where(update > 0, 1.0, tl.where(update < 0, -1.0, 0.0))
    logit = logit * decay - lr * sign
    tl.store(momentum + offset, (grad + beta_momentum * (old - grad)).to(momentum.dtype.element_ty), mask=mask)
    if ROUND:
        word = (logit.to(tl.uint32, bitcast=True) + bits) & 0xFFFF0000
        logit = word.to(tl.float32, bitcast=True)
    tl.store(logits + offset, logit.to(logits.dtype.element_ty), mask=mask)
    return logit


@triton.jit(do_not_specialize=["start", "key_0", "key_1", "next_key_0", "next_key_1", "round_key_0", "round_key_1"])
def _update_kernel(
    logits, momentum, scales, scale_momentum, first, grad, weight, num_groups, size, start,
    key_0, key_1, logit_factor, inverse_temperature, next_key_0, next_key_1, next_logit_factor,
    next_inverse_temperature, round_key_0, round_key_1, lr, scale_lr, decay, beta_update, beta_momentum,
    low, K: tl.constexpr, STEP: tl.constexpr, WINDOWED: tl.constexpr, ROUND: tl.constexpr, GROUP: tl.constexpr,
    PADDED: tl.constexpr, GROUPS_PER_PROGRAM: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0).to(tl.int64) * GROUPS_PER_PROGRAM + tl.arange(0, GROUPS_PER_PROGRAM)
    in_range = group < num_groups
    column = tl.arange(0, PADDED)
    mask = in_range[:, None] & (column[None, :] < GROUP)
    offset = group[:, None] * GROUP + column[None, :]
    index = start + offset
    l0, l1, l2, l3, l4 = _load_logits(logits, size, offset, mask, K)
    base = tl.zeros_like(l0) + low
    if WINDOWED:
        base = tl.load(first + offset, mask=mask, other=0).to(tl.float32)
    scale = tl.load(scales + group, mask=in_range, other=0.0)
    weight_grad = tl.load(grad + offset, mask=mask, other=0.0).to(tl.float32)

    p0, p1, p2, p3, p4, position = _softmax(
        l0, l1, l2, l3, l4, index, key_0, key_1, logit_factor, inverse_temperature, K
    )
    scale_grad = tl.sum(weight_grad * (base + position * STEP), axis=1)
    factor = weight_grad * scale[:, None] * (logit_factor * STEP)

    word_01 = index.to(tl.uint32)
    word_23 = word_01
    word_4 = word_01
    if ROUND:
        word_01 = _first_word(index, round_key_0, round_key_1)
        if K > 2:
            word_23 = _next_word(word_01)
        if K > 4:
            word_4 = _next_word(word_23)
    b0 = _bits(word_01, word_23, word_4, 0)
    b1 = _bits(word_01, word_23, word_4, 1)
    l0 = _lion(logits, momentum, offset, mask, l0, factor * p0 * (0.0 - position), b0,
               lr, decay, beta_update, beta_momentum, ROUND)  # fmt: skip
    l1 = _lion(logits, momentum, size + offset, mask, l1, factor * p1 * (1.0 - position), b1,
               lr, decay, beta_update, beta_momentum, ROUND)  # fmt: skip
    if K > 2:
        b2 = _bits(word_01, word_23, word_4, 2)
        l2 = _lion(logits, momentum, 2 * size + offset, mask, l2, factor * p2 * (2.0 - position), b2,
                   lr, decay, beta_update, beta_momentum, ROUND)  # fmt: skip
    if K > 3:
        b3 = _bits(word_01, word_23, word_4, 3)
        l3 = _lion(logits, momentum, 3 * size + offset, mask, l3, factor * p3 * (3.0 - position), b3,
                   lr, decay, beta_update, beta_momentum, ROUND)  # fmt: skip
    if K > 4:
        b4 = _bits(word_01, word_23, word_4, 4)
        l4 = _lion(logits, momentum, 4 * size + offset, mask, l4, factor * p4 * (4.0 - position), b4,
                   lr, decay, beta_update, beta_momentum, ROUND)  # fmt: skip

    old = tl.load(scale_momentum + group, mask=in_range, other=0.0)
    update = scale_grad + beta_update * (old - scale_grad)
    scale -= scale_lr * tl.where(update > 0, 1.0, tl.where(update < 0, -1.0, 0.0))
    tl.store(scale_momentum + group, scale_grad + beta_momentum * (old - scale_grad), mask=in_range)
    tl.store(scales + group, scale, mask=in_range)

    p0, p1, p2, p3, p4, position = _softmax(
        l0, l1, l2, l3, l4, index, next_key_0, next_key_1, next_logit_factor, next_inverse_temperature, K
    )
    tl.store(weight + offset, ((base + position * STEP) * scale[:, None]).to(weight.dtype.element_ty), mask=mask)


def usable(param: Tensor, logits: Tensor) -> bool:
    """Whether the kernels can serve a weight: on CUDA (or interpreted), contiguous, logits not in float64."""
    on_device = param.device.type == "cuda" or interpreted()
    return on_device and param.is_contiguous() and logits.dtype != torch.float64


def _shape(scales: Tensor, cols: int) -> dict[str, int]:
    group = cols // scales.shape[1]
    padded = triton.next_power_of_2(group)
    return {"GROUP": group, "PADDED": padded, "GROUPS_PER_PROGRAM": max(1, TILE // padded)}


def _draw_arguments(draw: Draw) -> tuple[int, int, float, float]:
    return as_int32(draw.key[0]), as_int32(draw.key[1]), draw.logit_scale / draw.temperature, 1.0 / draw.temperature


def sample(
    param: Tensor, logits: Tensor, scales: Tensor, first: Tensor, grid: Grid, draw: Draw, start: int = 0
) -> None:
    """Write one relaxed weight into `param` `[rows, cols]`.

    Args:
        param: Contiguous.
        logits: `[K, rows, cols]`, contiguous, bfloat16 or float32.
        scales: float32 `[rows, groups]`, contiguous.
        first: int8 `[rows, cols]`; read only on grids with a window, and then contiguous.
        start: Global flat index of the first element.
    """
    shape = _shape(scales, param.shape[1])
    programs = (triton.cdiv(scales.numel(), shape["GROUPS_PER_PROGRAM"]),)
    _sample_kernel[programs](
        logits, scales, first, param, scales.numel(), param.numel(), start, *_draw_arguments(draw),
        float(grid.low), K=logits.shape[0], STEP=grid.step, WINDOWED=grid.is_windowed, **shape,
    )  # fmt: skip


def update_and_sample(
    param: Tensor,
    state: dict[str, Any],
    grid: Grid,
    next_draw: Draw,
    round_key: tuple[int, int],
    group: dict[str, Any],
    start: int = 0,
) -> None:
    """One Lion step of logits and scales behind `param` from `param.grad`, and the next sample into `param`.

    Args:
        param: Contiguous, with a gradient of its own dtype.
        state: The optimizer's state: `logits`, `momentum`, `scales`, `scale_momentum`, `first`, `draw`.
        next_draw: Of the sample to be written.
        round_key: Noise key of the stochastic rounding.
        group: The optimizer's group: `lr`, `scale_lr`, `weight_decay`, `betas`.
        start: Global flat index of the first element.
    """
    assert param.grad is not None
    logits, scales = state["logits"], state["scales"]
    shape = _shape(scales, param.shape[1])
    programs = (triton.cdiv(scales.numel(), shape["GROUPS_PER_PROGRAM"]),)
    _update_kernel[programs](
        logits, state["momentum"], scales, state["scale_momentum"], state["first"], param.grad.contiguous(), param,
        scales.numel(), param.numel(), start, *_draw_arguments(Draw(*state["draw"])), *_draw_arguments(next_draw),
        as_int32(round_key[0]), as_int32(round_key[1]), group["lr"], group["scale_lr"],
        1.0 - group["lr"] * group["weight_decay"], *group["betas"], float(grid.low), K=logits.shape[0],
        STEP=grid.step, WINDOWED=grid.is_windowed, ROUND=logits.dtype == torch.bfloat16, **shape,
    )  # fmt: skip
