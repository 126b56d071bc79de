"""Noise as a pure function of (seed, unit, tensor, step, element, level): the same integers on every device and rank.

A counter-based hash of 32-bit words. A multiply-xorshift mixer (Wellons' "lowbias32" constants) turns the element's
index into a word; a 64-bit key enters it at two places, before the first and before the second multiplication. Each
word gives 16 random bits to two neighbouring streams; the next word is the mixer's of the last. Integer arithmetic
only, modulo 2^32, so that eager CPU, eager GPU and fused kernels agree bit for bit (design.md, contract 1).

A softmax over K logits with Gumbel noise needs -log E_k of K exponential variates E_k, but only up to what they have in
common. E_k / (E_1 + ... + E_K) is distributed as the K gaps that K - 1 uniform points leave on [0, 1] (Devroye,
"Non-Uniform Random Variate Generation", 1986, chapter V). So the noise is -log of such a gap: K - 1 random numbers
instead of K, and one logarithm a level instead of two, without approximation.

Sixteen bits bound the difference of two levels' noise to +-13; what lies outside has probability below 2^-15 a draw.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

MULTIPLIER_1 = 0x7FEB352D
MULTIPLIER_2 = 0x846CA68B
INCREMENT = 0x9E3779B9
BITS = 16


def noise_key(*parts: int | str) -> tuple[int, int]:
    """Two 32-bit words that stand for (seed, unit, tensor, step, stream)."""
    text = "\x1f".join(str(part) for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def as_int32(word: int) -> int:
    """The two's-complement reading of an unsigned 32-bit word (torch has no full uint32 arithmetic)."""
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >= 1 << 31 else word


def _mix_(x: Tensor, second_key: Tensor | int = 0) -> Tensor:
    """The mixer in place on int32; the mask makes torch's arithmetic shift a logical one."""
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))
    x.mul_(as_int32(MULTIPLIER_1))
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).bitwise_xor_(second_key)
    x.mul_(as_int32(MULTIPLIER_2))
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def random_bits(key: tuple[int, int], start: int, count: int, num_streams: int, device: torch.device | str) -> Tensor:
    """16 random bits for each element of a range and each stream.

    Args:
        key: From `noise_key`.
        start: Global flat index (row x in_features + column) of the first element; may exceed 2^31.
        count: Number of consecutive elements.
        num_streams: Number of independent values an element gets; the first of them do not depend on it.

    Returns:
        int32 `[num_streams, count]` with values in [0, 65536).
    """
    index = torch.arange(start, start + count, dtype=torch.int64, device=device)
    word = index.to(torch.int32).bitwise_xor_(as_int32(key[0]))
    second: Tensor | int = as_int32(key[1])
    if start + count > 1 << 32:
        second = (index >> 32).to(torch.int32).mul_(as_int32(INCREMENT)).add_(second)
    _mix_(word, second)
    bits = torch.empty(num_streams, count, dtype=torch.int32, device=device)
    for stream in range(0, num_streams, 2):
        if stream:
            word = _mix_(word.add_(as_int32(INCREMENT)))
        torch.bitwise_and(word, 0xFFFF, out=bits[stream])
        if stream + 1 < num_streams:
            torch.bitwise_right_shift(word, BITS, out=bits[stream + 1]).bitwise_and_(0xFFFF)
    return bits


def uniform(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Uniform variates inside (0, 1): the middles of 65536 equal intervals."""
    return bits.to(dtype).add_(0.5).mul_(2.0**-BITS)


def gap_offsets(num_points: int) -> list[int]:
    """What is added to each point of `exponential_shares`, in units of 2^-23: no two points ever coincide."""
    return [round(128 * (2 * point + 1) / (2 * num_points)) for point in range(num_points)]


def exponential_shares(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """K standard exponential variates divided by their sum: the gaps between K - 1 uniform points on [0, 1].

    Args:
        bits: int32 `[K - 1, ...]` in [0, 65536), from `random_bits`.

    Returns:
        `[K, ...]`, multiples of 2^-23, at least 16 of them, that add up to 1 exactly.
    """
    points = [(stream << 7).add_(offset) for stream, offset in zip(bits, gap_offsets(len(bits)), strict=True)]
    for end in range(len(points) - 1, 0, -1):
        for i in range(end):
            points[i], points[i + 1] = torch.minimum(points[i], points[i + 1]), torch.maximum(points[i], points[i + 1])
    shares = torch.empty(len(points) + 1, *bits.shape[1:], dtype=dtype, device=bits.device)
    shares[0] = points[0]
    for i in range(1, len(points)):
        shares[i] = points[i] - points[i - 1]
    shares[-1] = (1 << 23) - points[-1]
    return shares.mul_(2.0**-23)


def normal(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Standard normal variates by the inverse distribution function."""
    return uniform(bits, dtype).mul_(2.0).sub_(1.0).erfinv_().mul_(math.sqrt(2.0))


def round_to_bfloat16(values: Tensor, bits: Tensor) -> Tensor:
    """Stochastic rounding of float32 to bfloat16: up with the probability that keeps the mean.

    Args:
        values: float32, overwritten.
        bits: int32 in [0, 65536), from `random_bits`; of the same shape or broadcast to it.
    """
    words = values.view(torch.int32)
    words.add_(bits).bitwise_and_(as_int32(0xFFFF0000))
    return values.to(torch.bfloat16)
