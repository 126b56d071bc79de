"""Device functions of the Triton kernels: random words, Gumbel noise, softmax, masked access.

The hardware's approximate logarithm, exponential and reciprocal serve here (relative error some 2^-22), and integers
are made floats by their bit patterns, because a conversion is as slow as a logarithm.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

from gsq_module.quantization.noise import INCREMENT, MULTIPLIER_1, MULTIPLIER_2


def interpreted() -> bool:
    """Whether Triton runs its kernels in its interpreter, on CPU tensors (for tests)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


_PTX = tl.constexpr(not interpreted() and torch.version.hip is None)
_MULTIPLIER_1 = tl.constexpr(MULTIPLIER_1)
_MULTIPLIER_2 = tl.constexpr(MULTIPLIER_2)
_INCREMENT = tl.constexpr(INCREMENT)
_SIGN_BIT = tl.constexpr(0x80000000)


@triton.jit
def _log2(x):
    if _PTX:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log2(x)


@triton.jit
def _exp2(x):
    if _PTX:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.exp2(x)


@triton.jit
def _reciprocal(x):
    if _PTX:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / x


@triton.jit
def load(pointer, mask, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(pointer, mask=mask, other=0)
    else:
        return tl.load(pointer)


@triton.jit
def store(pointer, value, mask, MASKED: tl.constexpr):
    if MASKED:
        tl.store(pointer, value.to(pointer.dtype.element_ty), mask=mask)
    else:
        tl.store(pointer, value.to(pointer.dtype.element_ty))


@triton.jit
def _first_word(offset, start, key_0, key_1, WIDE: tl.constexpr):
    """Random word of streams 0 and 1; `start` + `offset` is the global flat index, which passes 2^32 if WIDE."""
    index = start + offset
    second = key_1.to(tl.uint32, bitcast=True)
    x = index.to(tl.uint32) ^ key_0.to(tl.uint32, bitcast=True)
    x = x ^ (x >> 16)
    x = x * _MULTIPLIER_1
    if WIDE:
        x = x ^ (x >> 15) ^ (second + (index >> 32).to(tl.uint32) * _INCREMENT)
    else:
        x = x ^ (x >> 15) ^ second
    x = x * _MULTIPLIER_2
    return x ^ (x >> 16)


@triton.jit
def _next_word(x):
    x = x + _INCREMENT
    x = x ^ (x >> 16)
    x = x * _MULTIPLIER_1
    x = x ^ (x >> 15)
    x = x * _MULTIPLIER_2
    return x ^ (x >> 16)


@triton.jit
def words(offset, start, key_0, key_1, STREAMS: tl.constexpr, WIDE: tl.constexpr):
    """Random words of up to five streams; those beyond STREAMS repeat the last and are never used."""
    word_01 = _first_word(offset, start, key_0, key_1, WIDE)
    word_23, word_4 = word_01, word_01
    if STREAMS > 2:
        word_23 = _next_word(word_01)
    if STREAMS > 4:
        word_4 = _next_word(word_23)
    return word_01, word_23, word_4


@triton.jit
def stream(word_01, word_23, word_4, STREAM: tl.constexpr, SHIFT: tl.constexpr):
    """16 random bits of one stream, shifted left."""
    if STREAM // 2 == 0:
        word = word_01
    elif STREAM // 2 == 1:
        word = word_23
    else:
        word = word_4
    if STREAM % 2 == 0:
        bits = (word << SHIFT) & (0xFFFF << SHIFT)
    else:
        bits = (word >> (16 - SHIFT)) & (0xFFFF << SHIFT)
    return bits


@triton.jit
def _point(word_01, word_23, word_4, STREAM: tl.constexpr, OFFSET: tl.constexpr):
    """A uniform point of [1, 2): the stream's bits, then the offset, in the mantissa of 1.0."""
    bits = stream(word_01, word_23, word_4, STREAM, 7) | (0x3F800000 + OFFSET)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _shares(
    word_01, word_23, word_4, K: tl.constexpr, O0: tl.constexpr, O1: tl.constexpr, O2: tl.constexpr, O3: tl.constexpr
):
    """noise.exponential_shares: gaps between K - 1 uniform points; those beyond K repeat the last."""
    a = _point(word_01, word_23, word_4, 0, O0)
    if K == 2:
        e0, e1 = a - 1.0, 2.0 - a
        e2, e3, e4 = e1, e1, e1
    else:
        b = _point(word_01, word_23, word_4, 1, O1)
        a, b = tl.minimum(a, b), tl.maximum(a, b)
        if K == 3:
            e0, e1, e2 = a - 1.0, b - a, 2.0 - b
            e3, e4 = e2, e2
        else:
            c = _point(word_01, word_23, word_4, 2, O2)
            b, c = tl.minimum(b, c), tl.maximum(b, c)
            a, b = tl.minimum(a, b), tl.maximum(a, b)
            if K == 4:
                e0, e1, e2, e3 = a - 1.0, b - a, c - b, 2.0 - c
                e4 = e3
            else:
                d = _point(word_01, word_23, word_4, 3, O3)
                c, d = tl.minimum(c, d), tl.maximum(c, d)
                b, c = tl.minimum(b, c), tl.maximum(b, c)
                a, b = tl.minimum(a, b), tl.maximum(a, b)
                e0, e1, e2, e3, e4 = a - 1.0, b - a, c - b, d - c, 2.0 - d
    return e0, e1, e2, e3, e4


@triton.jit
def softmax(
    l0, l1, l2, l3, l4, word_01, word_23, word_4, factor, power,
    K: tl.constexpr, O0: tl.constexpr, O1: tl.constexpr, O2: tl.constexpr, O3: tl.constexpr,
):  # fmt: skip
    """Weights 2^(factor x logit) x share^-power of up to five candidates, the reciprocal of their sum, and their mean
    position `sum_k k p_k`."""
    e0, e1, e2, e3, e4 = _shares(word_01, word_23, word_4, K, O0, O1, O2, O3)
    z0 = l0 * factor - _log2(e0) * power
    z1 = l1 * factor - _log2(e1) * power
    top = tl.maximum(z0, z1)
    z2, z3, z4 = z0, z0, z0
    if K > 2:
        z2 = l2 * factor - _log2(e2) * power
        top = tl.maximum(top, z2)
    if K > 3:
        z3 = l3 * factor - _log2(e3) * power
        top = tl.maximum(top, z3)
    if K > 4:
        z4 = l4 * factor - _log2(e4) * power
        top = tl.maximum(top, z4)
    p0 = _exp2(z0 - top)
    p1 = _exp2(z1 - top)
    total = p0 + p1
    position = p1
    p2, p3, p4 = p0, p0, p0
    if K > 2:
        p2 = _exp2(z2 - top)
        total += p2
        position += 2.0 * p2
    if K > 3:
        p3 = _exp2(z3 - top)
        total += p3
        position += 3.0 * p3
    if K > 4:
        p4 = _exp2(z4 - top)
        total += p4
        position += 4.0 * p4
    norm = _reciprocal(total)
    return p0, p1, p2, p3, p4, norm, position * norm


@triton.jit
def with_sign(size, value):
    """`size` with the sign of `value`; 0 where that is 0."""
    size = tl.zeros_like(value) + size
    word = size.to(tl.uint32, bitcast=True) | (value.to(tl.uint32, bitcast=True) & _SIGN_BIT)
    return tl.where(value == 0.0, 0.0, word.to(tl.float32, bitcast=True))
