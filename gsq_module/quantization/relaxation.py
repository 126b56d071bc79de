"""The Gumbel-softmax relaxation of a quantized weight and its gradient, in plain torch (arXiv 2604.18556, section 3).

    p = softmax((logit_scale * logits + gumbel) / temperature)      over the K candidates of each weight
    q = sum_k v_k p_k,   weight = scale * q
    dL/dlogits_k = (logit_scale / temperature) * scale * dL/dweight * p_k * (v_k - q)
    dL/dscale    = sum over the group of dL/dweight * q

Functions here work on a chunk of rows; `row_chunks` makes the chunks. This path is the reference of every faster one.
Shapes: K candidates, R rows of the chunk, C = in_features, G = groups a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from gsq_module.quantization.grid import Grid
from gsq_module.quantization.noise import exponential_shares, normal, random_bits

MAX_TEMPORARY_BYTES = 64 << 20
"""No temporary of this module is larger."""
CPU_CHUNK_ELEMENTS = 1 << 17
"""Weights of a chunk on a CPU: its temporaries stay in the cache (measured: docs/experiments.md)."""


class Draw(NamedTuple):
    """What one Gumbel-softmax sample was drawn with; regenerates it exactly.

    Of the key's streams of random bits the first K - 1 make the sample of K candidates. Stream K - 1 rounds the logits
    of the step before, so that a step needs one hash less.
    """

    key: tuple[int, int]
    temperature: float
    logit_scale: float


def row_chunks(rows: int, cols: int, candidates: int, device: torch.device, itemsize: int = 4) -> Iterator[slice]:
    """Row slices of a `[rows, cols]` weight such that a `[candidates, chunk, cols]` temporary stays in bounds."""
    elements = MAX_TEMPORARY_BYTES // (candidates * itemsize)
    if device.type == "cpu":
        elements = min(elements, CPU_CHUNK_ELEMENTS)
    step = max(1, elements // cols)
    for first in range(0, rows, step):
        yield slice(first, min(first + step, rows))


def initial_logits(
    codes: Tensor, first: Tensor, grid: Grid, key: tuple[int, int], start: int, std: float, strength: float
) -> Tensor:
    """Logits that prefer the initial code, with noise: `std * (normal + strength * (-d^2 / 2 centred over k))`.

    `d` counts grid steps between candidate k and the code, so that the 1-bit grid (steps of 2) flips as readily.

    Args:
        codes: int8 `[R, C]`.
        first: int8 `[R, C]`, lowest candidate of each weight.
        start: Global flat index of the chunk's first element.

    Returns:
        float32 `[K, R, C]`.
    """
    k = torch.arange(grid.num_candidates, device=codes.device, dtype=torch.float32).view(-1, 1, 1)
    position = (codes.float() - first.float()).div_(grid.step)
    preference = (k - position).square_().mul_(-0.5)
    preference -= preference.mean(0)
    bits = random_bits(key, start, codes.numel(), grid.num_candidates, codes.device)
    noise = normal(bits, torch.float32).view_as(preference)
    return noise.add_(preference, alpha=strength).mul_(std)


def probabilities(logits: Tensor, draw: Draw, start: int) -> Tensor:
    """Gumbel-softmax probabilities of a chunk.

    Args:
        logits: `[K, R, C]`, any floating dtype; computed in float32 (float64 stays float64).
        start: Global flat index of the chunk's first element.

    Returns:
        `[K, R, C]`.
    """
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    bits = random_bits(draw.key, start, logits[0].numel(), logits.shape[0] - 1, logits.device)
    # Gumbel noise but for a summand that all candidates share
    z = exponential_shares(bits, dtype).log_().view(logits.shape).mul_(-1.0 / draw.temperature)
    z.add_(logits.to(dtype), alpha=draw.logit_scale / draw.temperature)
    # Spelt out: torch.softmax rounds differently where a chunk or a thread's share of it ends, and the result would
    # depend on the chunk size and on the number of CPU threads.
    z.sub_(z.amax(0)).exp_()
    total = z[0].clone()
    for k in range(1, z.shape[0]):
        total.add_(z[k])
    return z.div_(total)


def expected_code(p: Tensor, grid: Grid, first: Tensor) -> Tensor:
    """`q = sum_k v_k p_k`, `[R, C]`, with `v_k = first + k * step`."""
    q = first.to(p.dtype)
    for k in range(1, p.shape[0]):
        q.add_(p[k], alpha=float(k * grid.step))
    return q


def sample_chunk(logits: Tensor, scales: Tensor, first: Tensor, grid: Grid, draw: Draw, start: int) -> Tensor:
    """One relaxed weight `[R, C]` in the computation's dtype.

    Args:
        logits: `[K, R, C]`.
        scales: `[R, G]`.
        first: int8 `[R, C]`.
        start: Global flat index of the chunk's first element.
    """
    q = expected_code(probabilities(logits, draw, start), grid, first)
    grouped = q.view(q.shape[0], scales.shape[1], -1)
    return grouped.mul_(scales.to(q.dtype).unsqueeze(-1)).view_as(q)


def gradient_chunk(
    weight_grad: Tensor, logits: Tensor, scales: Tensor, first: Tensor, grid: Grid, draw: Draw, start: int
) -> tuple[Tensor, Tensor]:
    """Gradients of logits and scales from the gradient of the relaxed weight.

    Args:
        weight_grad: `[R, C]`, dL/dweight of the sample that `draw` made.

    Returns:
        dL/dlogits `[K, R, C]` and dL/dscales `[R, G]`.
    """
    p = probabilities(logits, draw, start)
    q = expected_code(p, grid, first)
    groups = scales.shape[1]
    grad = weight_grad.to(p.dtype)
    scale_grad = (grad * q).view(q.shape[0], groups, -1).sum(-1)
    factor = grad.view(q.shape[0], groups, -1) * scales.to(p.dtype).unsqueeze(-1)
    factor = factor.mul_(draw.logit_scale / draw.temperature).view_as(q)
    q.sub_(first.to(q.dtype))
    for k in range(p.shape[0]):
        # v_k - q, with both counted from the first candidate
        p[k].mul_((k * grid.step - q).mul_(factor))
    return p, scale_grad


def hard_codes(logits: Tensor, first: Tensor, grid: Grid) -> Tensor:
    """The most likely code of each weight, int8 `[R, C]`; ties go to the lower code."""
    return logits.argmax(0).to(torch.int8).mul_(grid.step).add_(first)
