"""Fused Triton kernels of the relaxation: one pass over memory a step. The eager path (relaxation.py) is their oracle.

A weight is contiguous and its groups divide its rows, so a kernel sees it as a list of groups: program p takes
`GROUPS_PER_PROGRAM` of them, each padded to a power of two. Noise comes from the same integer hash as in noise.py.

Bytes a weight of an update with 4 candidates and bfloat16 state: gradient 2, logits 8 + 8, momentum 8 + 8, sample 2.
The arithmetic takes about as long as that traffic.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gsq_module.quantization.grid import Grid
from gsq_module.quantization.kernel_functions import interpreted, load, softmax, store, stream, with_sign, words
from gsq_module.quantization.noise import as_int32, gap_offsets
from gsq_module.quantization.relaxation import Draw

TILE = 512
"""Weights a program handles (measured: docs/experiments.md)."""
NUM_WARPS = 4
LOG2_E = 1.4426950408889634


@triton.jit
def _tile(num_groups, GROUP: tl.constexpr, PADDED: tl.constexpr, GROUPS_PER_PROGRAM: tl.constexpr):
    """This program's groups, the offsets of their weights, and which of both exist."""
    group = tl.program_id(0).to(tl.int64) * GROUPS_PER_PROGRAM + tl.arange(0, GROUPS_PER_PROGRAM)
    column = tl.arange(0, PADDED)
    in_range = group < num_groups
    mask = in_range[:, None] & (column[None, :] < GROUP)
    return group, in_range, group[:, None] * GROUP + column[None, :], mask


@triton.jit
def _load_logits(logits, size, offset, mask, K: tl.constexpr, MASKED: tl.constexpr):
    """Up to five levels in float32; those beyond K repeat the first and are never used."""
    l0 = load(logits + offset, mask, MASKED).to(tl.float32)
    # Added to one by one: offsets are int64, a multiple of the size alone would be int32 and pass 2^31.
    offset += size
    l1 = load(logits + offset, mask, MASKED).to(tl.float32)
    l2, l3, l4 = l0, l0, l0
    if K > 2:
        offset += size
        l2 = load(logits + offset, mask, MASKED).to(tl.float32)
    if K > 3:
        offset += size
        l3 = load(logits + offset, mask, MASKED).to(tl.float32)
    if K > 4:
        offset += size
        l4 = load(logits + offset, mask, MASKED).to(tl.float32)
    return l0, l1, l2, l3, l4


@triton.jit(do_not_specialize=["start", "key_0", "key_1"])
def _sample_kernel(
    logits, scales, first, weight, num_groups, size, start, key_0, key_1, factor, power, low,
    K: tl.constexpr, O0: tl.constexpr, O1: tl.constexpr, O2: tl.constexpr, O3: tl.constexpr,
    STEP: tl.constexpr, WINDOWED: tl.constexpr, WIDE: tl.constexpr, MASKED: tl.constexpr,
    GROUP: tl.constexpr, PADDED: tl.constexpr, GROUPS_PER_PROGRAM: tl.constexpr,
):  # fmt: skip
    group, in_range, offset, mask = _tile(num_groups, GROUP, PADDED, GROUPS_PER_PROGRAM)
    l0, l1, l2, l3, l4 = _load_logits(logits, size, offset, mask, K, MASKED)
    word_01, word_23, word_4 = words(offset, start, key_0, key_1, K - 1, WIDE)
    p0, p1, p2, p3, p4, norm, position = softmax(
        l0, l1, l2, l3, l4, word_01, word_23, word_4, factor, power, K, O0, O1, O2, O3
    )
    code = position * STEP
    if WINDOWED:
        code += load(first + offset, mask, MASKED).to(tl.float32)
    else:
        code += low
    scale = load(scales + group, in_range, MASKED)
    store(weight + offset, code * scale[:, None], mask, MASKED)


@triton.jit
def _lion(
    logits, momentum, offset, mask, logit, grad, bits, lr, decay, beta_update, beta_momentum,
    ROUND: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Lion on one level: stores logit and momentum, returns the logit as stored."""
    old = load(momentum + offset, mask, MASKED).to(tl.float32)
    change = old - grad
    store(momentum + offset, grad + beta_momentum * change, mask, MASKED)
    logit = logit * decay - with_sign(lr, grad + beta_update * change)
    if ROUND:
        word = (logit.to(tl.uint32, bitcast=True) + bits) & 0xFFFF0000
        logit = word.to(tl.float32, bitcast=True)
    store(logits + offset, logit, mask, MASKED)
    return logit


@triton.jit(do_not_specialize=["start", "key_0", "key_1", "next_key_0", "next_key_1"])
def _update_kernel(
    logits, momentum, scales, scale_momentum, first, grad, weight, num_groups, size, start,
    key_0, key_1, factor, power, next_key_0, next_key_1, next_factor, next_power,
    gain, lr, scale_lr, decay, beta_update, beta_momentum, low,
    K: tl.constexpr, O0: tl.constexpr, O1: tl.constexpr, O2: tl.constexpr, O3: tl.constexpr,
    STEP: tl.constexpr, WINDOWED: tl.constexpr, WIDE: tl.constexpr, MASKED: tl.constexpr, ROUND: tl.constexpr,
    GROUP: tl.constexpr, PADDED: tl.constexpr, GROUPS_PER_PROGRAM: tl.constexpr,
):  # fmt: skip
    group, in_range, offset, mask = _tile(num_groups, GROUP, PADDED, GROUPS_PER_PROGRAM)
    l0, l1, l2, l3, l4 = _load_logits(logits, size, offset, mask, K, MASKED)
    weight_grad = load(grad + offset, mask, MASKED).to(tl.float32)
    scale = load(scales + group, in_range, MASKED)
    base = low
    if WINDOWED:
        base = load(first + offset, mask, MASKED).to(tl.float32)

    word_01, word_23, word_4 = words(offset, start, key_0, key_1, K - 1, WIDE)
    p0, p1, p2, p3, p4, norm, position = softmax(
        l0, l1, l2, l3, l4, word_01, word_23, word_4, factor, power, K, O0, O1, O2, O3
    )
    scale_grad = tl.sum(weight_grad * (base + position * STEP), axis=1)
    common = weight_grad * (scale * gain)[:, None] * norm

    word_01, word_23, word_4 = words(offset, start, next_key_0, next_key_1, K, WIDE)
    bits = stream(word_01, word_23, word_4, K - 1, 0)
    offset_1 = offset + size
    offset_2 = offset_1 + size
    offset_3 = offset_2 + size
    offset_4 = offset_3 + size
    l0 = _lion(logits, momentum, offset, mask, l0, common * p0 * (0.0 - position), bits,
               lr, decay, beta_update, beta_momentum, ROUND, MASKED)  # fmt: skip
    l1 = _lion(logits, momentum, offset_1, mask, l1, common * p1 * (1.0 - position), bits,
               lr, decay, beta_update, beta_momentum, ROUND, MASKED)  # fmt: skip
    if K > 2:
        l2 = _lion(logits, momentum, offset_2, mask, l2, common * p2 * (2.0 - position), bits,
                   lr, decay, beta_update, beta_momentum, ROUND, MASKED)  # fmt: skip
    if K > 3:
        l3 = _lion(logits, momentum, offset_3, mask, l3, common * p3 * (3.0 - position), bits,
                   lr, decay, beta_update, beta_momentum, ROUND, MASKED)  # fmt: skip
    if K > 4:
        l4 = _lion(logits, momentum, offset_4, mask, l4, common * p4 * (4.0 - position), bits,
                   lr, decay, beta_update, beta_momentum, ROUND, MASKED)  # fmt: skip

    change = load(scale_momentum + group, in_range, MASKED) - scale_grad
    scale -= with_sign(scale_lr, scale_grad + beta_update * change)
    store(scale_momentum + group, scale_grad + beta_momentum * change, in_range, MASKED)
    store(scales + group, scale, in_range, MASKED)

    p0, p1, p2, p3, p4, norm, position = softmax(
        l0, l1, l2, l3, l4, word_01, word_23, word_4, next_factor, next_power, K, O0, O1, O2, O3
    )
    store(weight + offset, (base + position * STEP) * scale[:, None], mask, MASKED)


def usable(param: Tensor, logits: Tensor) -> bool:
    """Whether the kernels can serve a weight: on CUDA (or interpreted), contiguous, logits not in float64."""
    on_device = param.device.type == "cuda" or interpreted()
    return on_device and param.is_contiguous() and logits.dtype != torch.float64


def _settings(param: Tensor, scales: Tensor, candidates: int, grid: Grid, start: int) -> dict[str, Any]:
    """Compile-time arguments of both kernels."""
    group = param.shape[1] // scales.shape[1]
    padded = triton.next_power_of_2(group)
    per_program = max(1, TILE // padded)
    offsets = gap_offsets(candidates - 1)
    return {
        "K": candidates,
        **{f"O{i}": offsets[i] if i < len(offsets) else 0 for i in range(4)},
        "STEP": grid.step,
        "WINDOWED": grid.is_windowed,
        "WIDE": start + param.numel() > 1 << 32,
        "MASKED": group != padded or scales.numel() % per_program != 0,
        "GROUP": group,
        "PADDED": padded,
        "GROUPS_PER_PROGRAM": per_program,
        "num_warps": NUM_WARPS,
    }


def _draw_arguments(draw: Draw) -> tuple[int, int, float, float]:
    factor = draw.logit_scale / draw.temperature * LOG2_E
    return as_int32(draw.key[0]), as_int32(draw.key[1]), factor, 1.0 / draw.temperature


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
    settings = _settings(param, scales, logits.shape[0], grid, start)
    programs = (triton.cdiv(scales.numel(), settings["GROUPS_PER_PROGRAM"]),)
    _sample_kernel[programs](
        logits, scales, first, param, scales.numel(), param.numel(), start, *_draw_arguments(draw), float(grid.low),
        **settings,
    )  # fmt: skip


def update_and_sample(
    param: Tensor, state: dict[str, Any], grid: Grid, next_draw: Draw, group: dict[str, Any], start: int = 0
) -> None:
    """One Lion step of logits and scales behind `param` from `param.grad`, and the next sample into `param`.

    Args:
        param: Contiguous, with a gradient of its own dtype.
        state: The optimizer's state: `logits`, `momentum`, `scales`, `scale_momentum`, `first`, `draw`.
        next_draw: Of the sample to be written.
        group: The optimizer's group: `lr`, `scale_lr`, `weight_decay`, `betas`.
        start: Global flat index of the first element.
    """
    assert param.grad is not None
    logits, scales = state["logits"], state["scales"]
    settings = _settings(param, scales, logits.shape[0], grid, start)
    programs = (triton.cdiv(scales.numel(), settings["GROUPS_PER_PROGRAM"]),)
    draw = Draw(*state["draw"])
    _update_kernel[programs](
        logits, state["momentum"], scales, state["scale_momentum"], state["first"], param.grad.contiguous(), param,
        scales.numel(), param.numel(), start, *_draw_arguments(draw), *_draw_arguments(next_draw),
        draw.logit_scale / draw.temperature * grid.step, group["lr"], group["scale_lr"],
        1.0 - group["lr"] * group["weight_decay"], *group["betas"], float(grid.low),
        ROUND=logits.dtype == torch.bfloat16, **settings,
    )  # fmt: skip
