"""Contract 1: noise is a pure function of key, element and level. `plain_bits` states it again on Python's integers."""

from __future__ import annotations

import hashlib
import math

import pytest
import torch
from torch import Tensor

from gsq_module.quantization.noise import (
    exponential_shares,
    noise_key,
    normal,
    random_bits,
    round_to_bfloat16,
    uniform,
)

WORD = 0xFFFFFFFF


def plain_mix(x: int, second_key: int = 0) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D & WORD
    x ^= x >> 15 ^ second_key
    x = x * 0x846CA68B & WORD
    return x ^ x >> 16


def plain_bits(key: tuple[int, int], index: int, num_streams: int) -> list[int]:
    word = plain_mix((index & WORD) ^ key[0], key[1] + (index >> 32) * 0x9E3779B9 & WORD)
    bits: list[int] = []
    while len(bits) < num_streams:
        bits += [word & 0xFFFF, word >> 16]
        word = plain_mix(word + 0x9E3779B9 & WORD)
    return bits[:num_streams]


KEY = noise_key(17, "model.layers.3.mlp.down_proj", 250, "gumbel")


def test_keys_are_golden() -> None:
    text = b"17\x1fmodel.layers.3.mlp.down_proj\x1f250\x1fgumbel"
    digest = hashlib.blake2b(text, digest_size=8).digest()
    assert (int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")) == KEY
    assert KEY == (2393768262, 3983266784), "a change of keys changes every run"


@pytest.mark.parametrize(
    ("index", "bits"),
    [
        (0, [61193, 48589, 60181, 7908, 61660]),
        (1, [37063, 18365, 3947, 35106, 8912]),
        (89128959, [48799, 45636, 14172, 54769, 32000]),
        (2**31, [62766, 12411, 35301, 19538, 62358]),
        (2**32 - 1, [62762, 40756, 11799, 3262, 22641]),
        (2**32, [4337, 32438, 31644, 13879, 24563]),
        (2**32 + 89128959, [64912, 33352, 38968, 31841, 47716]),
        (3 * 2**32 + 2**31 + 5, [12994, 52149, 25069, 19753, 39283]),
    ],
)
def test_bits_are_golden(index: int, bits: list[int]) -> None:
    """A change of these integers changes every run: resuming across it would not continue the same noise."""
    assert plain_bits(KEY, index, 5) == bits
    assert random_bits(KEY, index, 1, 5, "cpu").flatten().tolist() == bits


@pytest.mark.parametrize("start", [0, 1, 12345, 2**31 - 20, 2**31 + 7, 2**32 - 20, 2**32, 2**33 + 2**31 - 20, 2**40])
@pytest.mark.parametrize("key", [KEY, (0, 0), (WORD, WORD), (1 << 31, 1)])
def test_bits_are_those_of_the_statement_in_integers(start: int, key: tuple[int, int]) -> None:
    bits = random_bits(key, start, 40, 5, "cpu")
    assert bits.dtype == torch.int32
    assert bits.T.tolist() == [plain_bits(key, start + offset, 5) for offset in range(40)]


@pytest.mark.parametrize("num_streams", [1, 2, 3, 4])
def test_fewer_streams_are_the_first_of_more(num_streams: int) -> None:
    assert torch.equal(random_bits(KEY, 9, 100, num_streams, "cpu"), random_bits(KEY, 9, 100, 5, "cpu")[:num_streams])


@pytest.mark.parametrize("start", [0, 2**31 - 500, 2**32 - 500])
@pytest.mark.parametrize("size", [1, 7, 64, 999])
def test_chunks_join_to_the_whole(start: int, size: int) -> None:
    whole = random_bits(KEY, start, 1000, 4, "cpu")
    chunks = [random_bits(KEY, start + at, min(size, 1000 - at), 4, "cpu") for at in range(0, 1000, size)]
    assert torch.equal(torch.cat(chunks, dim=1), whole)


def test_keys_separate_their_parts() -> None:
    keys = [
        noise_key("a", "bc"),
        noise_key("ab", "c"),
        noise_key("abc"),
        noise_key("a", "b", "c"),
        noise_key("a", "bc", ""),
        noise_key(1, 23),
        noise_key(12, 3),
        noise_key(0, "w", 1, "gumbel"),
        noise_key(1, "w", 0, "gumbel"),
        noise_key(0, "w", 1, "round"),
    ]
    assert len(set(keys)) == len(keys)
    assert all(0 <= word <= WORD for key in keys for word in key)


COUNT = 1 << 19


def streams() -> dict[str, Tensor]:
    """Values that a refinement uses side by side, `COUNT` of 16 bits of each kind."""
    now = random_bits(noise_key(0, "w", 7, "gumbel"), 0, COUNT + 4096, 5, "cpu")
    found = {f"stream {stream}": now[stream, :COUNT] for stream in range(5)}
    found |= {f"{lag} elements on": now[0, lag : lag + COUNT] for lag in (1, 2, 64, 4096)}
    for name, key in {
        "next step": noise_key(0, "w", 8, "gumbel"),
        "other seed": noise_key(1, "w", 7, "gumbel"),
        "other weight": noise_key(0, "v", 7, "gumbel"),
        "rounding": noise_key(0, "w", 7, "round"),
    }.items():
        found[name] = random_bits(key, 0, COUNT, 1, "cpu")[0]
    found["beyond 2^32"] = random_bits(noise_key(0, "w", 7, "gumbel"), 1 << 32, COUNT, 1, "cpu")[0]
    return found


def chi_square(counts: Tensor) -> float:
    """Standard deviations by which the statistic exceeds its mean."""
    expected = counts.sum() / counts.numel()
    degrees = counts.numel() - 1
    return float(((counts - expected).square() / expected).sum() - degrees) / math.sqrt(2 * degrees)


def test_each_stream_is_uniform() -> None:
    for name, bits in streams().items():
        assert abs(chi_square(torch.bincount(bits >> 8, minlength=256).double())) < 6, (name, "high bits")
        assert abs(chi_square(torch.bincount(bits & 0xFF, minlength=256).double())) < 6, (name, "low bits")


def test_streams_are_independent_in_pairs() -> None:
    all_streams = streams()
    names = list(all_streams)
    table = torch.stack([all_streams[name] for name in names]).double()
    correlation = torch.corrcoef(table).fill_diagonal_(0)
    worst = int(correlation.abs().argmax())
    assert correlation.abs().max() < 5.5 / math.sqrt(COUNT), (names[worst // len(names)], names[worst % len(names)])
    base = all_streams["stream 0"]
    for name in names[1:]:
        joint = torch.bincount((base >> 12) * 16 + (all_streams[name] >> 12), minlength=256).double()
        assert abs(chi_square(joint)) < 6, name
        ones = float(sum((base ^ all_streams[name]).bitwise_right_shift(bit).bitwise_and(1).sum() for bit in range(16)))
        assert abs(ones / (16 * COUNT) - 0.5) < 5 * 0.5 / math.sqrt(16 * COUNT), name


def test_uniform_variates_are_the_middles_of_the_intervals() -> None:
    values = uniform(torch.tensor([0, 1, 65535], dtype=torch.int32), torch.float64)
    assert values.tolist() == [0.5 / 65536, 1.5 / 65536, 65535.5 / 65536]


@pytest.mark.parametrize("candidates", [2, 3, 4, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shares_are_those_of_exponential_variates(candidates: int, dtype: torch.dtype) -> None:
    """Each share has the distribution Beta(1, K - 1), any two are correlated by -1 / (K - 1), and all add up to 1."""
    shares = exponential_shares(random_bits(KEY, 0, 1 << 18, candidates - 1, "cpu"), dtype)
    assert shares.dtype == dtype
    assert shares.shape == (candidates, 1 << 18)
    assert shares.min() >= 16 * 2.0**-23
    assert torch.equal(shares.double().sum(0), torch.ones(1 << 18, dtype=torch.float64))
    for share in shares.double():
        for at in (0.02, 0.1, 0.3, 0.6):
            assert (share > at).double().mean() == pytest.approx((1 - at) ** (candidates - 1), abs=0.005)
    correlation = torch.corrcoef(shares.double()) - torch.eye(candidates)
    expected = (torch.eye(candidates) - 1).double() / (candidates - 1)
    torch.testing.assert_close(correlation.double(), expected, rtol=0, atol=0.01)


@pytest.mark.parametrize("candidates", [2, 3, 4, 5])
def test_a_candidate_wins_with_its_softmax_probability(candidates: int) -> None:
    """argmax(logit - log share) is softmax(logit), as with Gumbel noise: what the relaxation rests on."""
    logits = torch.linspace(-0.7, 0.9, candidates, dtype=torch.float64)
    noise = -exponential_shares(random_bits(KEY, 0, 1 << 18, candidates - 1, "cpu"), torch.float64).log()
    winners = torch.bincount((logits.unsqueeze(1) + noise).argmax(0), minlength=candidates) / (1 << 18)
    torch.testing.assert_close(winners.double(), logits.softmax(0), rtol=0, atol=0.005)


def test_normal_variates_have_their_moments() -> None:
    noise = normal(random_bits(KEY, 0, 1 << 20, 1, "cpu"), torch.float64)
    assert torch.isfinite(noise).all()
    assert noise.mean() == pytest.approx(0, abs=0.006)
    assert noise.var() == pytest.approx(1, abs=0.01)
    assert noise.pow(4).mean() == pytest.approx(3, abs=0.06)
    assert normal(torch.tensor([0, 65535], dtype=torch.int32), torch.float32).abs().max() < 5


@pytest.mark.parametrize("candidates", [2, 3, 4, 5])
@pytest.mark.parametrize("bits", [0, 65535, 30000])
def test_points_that_coincide_leave_a_gap(candidates: int, bits: int) -> None:
    shares = exponential_shares(torch.full((candidates - 1, 1), bits, dtype=torch.int32), torch.float32)
    assert (shares > 0).all()
    assert shares.sum() == 1


@pytest.mark.parametrize("value", [1.0, 0.0301, -0.0301, 1.9999999, -1.9999999, 3.0e-39, 1e-6, -123.456])
def test_stochastic_rounding_keeps_the_mean_exactly(value: float) -> None:
    bits = torch.arange(1 << 16, dtype=torch.int32)
    exact = torch.full(bits.shape, value)
    rounded = round_to_bfloat16(exact.clone(), bits)
    assert rounded.dtype == torch.bfloat16
    assert len(rounded.unique()) <= 2, "one of the two neighbours"
    assert rounded.double().mean() == exact[0].double()


def test_values_that_bfloat16_holds_are_unchanged() -> None:
    exact = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    exact[:3] = torch.tensor([0.0, -0.0, 1e-39], dtype=torch.bfloat16)
    bits = random_bits(KEY, 0, 1000, 1, "cpu")[0]
    bits[:4] = 65535
    assert torch.equal(round_to_bfloat16(exact.float(), bits).view(torch.int16), exact.view(torch.int16))


@pytest.mark.gpu
def test_a_cuda_device_draws_the_same_integers() -> None:
    for start in (0, 2**31 - 500, 2**32 - 500, 2**40):
        assert torch.equal(random_bits(KEY, start, 1000, 5, "cuda").cpu(), random_bits(KEY, start, 1000, 5, "cpu"))
