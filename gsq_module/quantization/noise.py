"""Noise as a pure function of (seed, unit, tensor, step, element, level): the same integers on every device and rank.

A counter-based hash of 32-bit words. Two rounds of a multiply-xorshift mixer (Wellons' "lowbias32" constants) turn the
element's index and a 64-bit key into one word; each word gives 16 random bits to two neighbouring levels. Integer
arithmetic only, modulo 2^32, so that eager CPU, eager GPU and fused kernels agree bit for bit (design.md, contract 1).

Sixteen bits bound a Gumbel variate to [-2.5, 11.8]; what lies outside has probability 2^-17 a draw.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

MULTIPLIER_1 = 0x7FEB352D
MULTIPLIER_2 = 0x846CA68B
LEVEL_INCREMENT = 0x9E3779B9
BITS_PER_LEVEL = 16


def noise_key(*parts: int | str) -> tuple[int, int]:
    """Two 32-bit words that stand for (seed, unit, tensor, step, stream)."""
    text = "\x1f".join(str(part) for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def as_int32(word: int) -> int:
    """The two's-complement reading of an unsigned 32-bit word (torch has no full uint32 arithmetic)."""
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >= 1 << 31 else word


def _mix_(x: Tensor) -> Tensor:
    """One mixer round in place on int32; the mask makes torch's arithmetic shift a logical one."""
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))
    x.mul_(as_int32(MULTIPLIER_1))
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF))
    x.mul_(as_int32(MULTIPLIER_2))
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def random_bits(key: tuple[int, int], start: int, count: int, num_levels: int, device: torch.device | str) -> Tensor:
    """16 random bits for each element of a range and each level.

    Args:
        key: From `noise_key`.
        start: Global flat index (row x in_features + column) of the first element; may exceed 2^31.
        count: Number of consecutive elements.
        num_levels: Number of levels.

    Returns:
        int32 `[num_levels, count]` with values in [0, 65536).
    """
    index = torch.arange(start, start + count, dtype=torch.int64, device=device)
    word = index.to(torch.int32).bitwise_xor_(as_int32(key[0]))
    _mix_(word).add_(as_int32(key[1]))
    if start + count > 1 << 32:
        word.add_((index >> 32).to(torch.int32).mul_(as_int32(LEVEL_INCREMENT)))
    _mix_(word)
    bits = torch.empty(num_levels, count, dtype=torch.int32, device=device)
    for level in range(0, num_levels, 2):
        if level:
            word = _mix_(word.add_(as_int32(LEVEL_INCREMENT)))
        torch.bitwise_and(word, 0xFFFF, out=bits[level])
        if level + 1 < num_levels:
            torch.bitwise_right_shift(word, BITS_PER_LEVEL, out=bits[level + 1]).bitwise_and_(0xFFFF)
    return bits


def uniform(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Uniform variates inside (0, 1): the middles of 65536 equal intervals."""
    return bits.to(dtype).add_(0.5).mul_(2.0**-BITS_PER_LEVEL)


def gumbel(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Standard Gumbel variates `-log(-log u)`."""
    return uniform(bits, dtype).log_().neg_().log_().neg_()


def normal(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Standard normal variates by the inverse distribution function."""
    return uniform(bits, dtype).mul_(2.0).sub_(1.0).erfinv_().mul_(math.sqrt(2.0))


def round_to_bfloat16(values: Tensor, bits: Tensor) -> Tensor:
    """Stochastic rounding of float32 to bfloat16: up with the probability that keeps the mean.

    Args:
        values: float32, overwritten.
        bits: int32 of the same shape in [0, 65536), from `random_bits`.
    """
    words = values.view(torch.int32)
    words.add_(bits).bitwise_and_(as_int32(0xFFFF0000))
    return values.to(torch.bfloat16)
