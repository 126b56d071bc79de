"""The relaxation and its gradient against the same written with autograd in logit space (issue 2, "Oracle")."""

from __future__ import annotations

import pytest
import torch
from quantization_helpers import ALL_GRIDS, candidate_values, generator, random_start, relaxed_weight
from torch import Tensor
from torch.nn.functional import linear, mse_loss

from gsq_module.quantization.grid import GRIDS, Grid
from gsq_module.quantization.noise import noise_key, normal, random_bits
from gsq_module.quantization.relaxation import (
    Draw,
    expected_code,
    gradient_chunk,
    hard_codes,
    initial_logits,
    probabilities,
    sample_chunk,
)

KEY = noise_key(3, "w", 1, "gumbel")
ANNEALED = pytest.mark.parametrize(
    ("temperature", "logit_scale"), [(2.0, 100.0), (1.0, 250.0), (0.3, 400.0), (0.05, 500.0), (1.0, 1.0)]
)


def problem(grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
    """Logits `[K, 6, 40]` that leave several candidates likely, signed scales `[6, 5]`, lowest candidates."""
    start = random_start(grid, 6, 40, 8)
    first = grid.first_candidate(start.codes)
    logits = torch.randn(grid.num_candidates, 6, 40, generator=generator(1), dtype=torch.float64) * 0.01
    return logits, start.scales.double(), first


@ALL_GRIDS
@ANNEALED
def test_gradients_are_those_of_autograd(grid: Grid, temperature: float, logit_scale: float) -> None:
    logits, scales, first = problem(grid)
    draw = Draw(KEY, temperature, logit_scale)
    inputs = torch.randn(11, 40, generator=generator(2), dtype=torch.float64)
    targets = torch.randn(11, 6, generator=generator(3), dtype=torch.float64)

    leaves = (logits.clone().requires_grad_(), scales.clone().requires_grad_())
    oracle = relaxed_weight(*leaves, candidate_values(grid, first), KEY, temperature, logit_scale)
    expected = torch.autograd.grad(mse_loss(linear(inputs, oracle), targets), leaves)

    weight = sample_chunk(logits, scales, first, grid, draw, 0).requires_grad_()
    torch.testing.assert_close(weight, oracle, rtol=1e-12, atol=1e-14)
    (weight_grad,) = torch.autograd.grad(mse_loss(linear(inputs, weight), targets), weight)
    found = gradient_chunk(weight_grad, logits, scales, first, grid, draw, 0)
    for ours, theirs in zip(found, expected, strict=True):
        assert theirs.abs().max() > 0
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12 * float(theirs.abs().max()))


@ALL_GRIDS
@pytest.mark.parametrize("logit_dtype", [torch.float32, torch.bfloat16])
def test_single_precision_follows_double(grid: Grid, logit_dtype: torch.dtype) -> None:
    logits, scales, first = problem(grid)
    logits = logits.to(logit_dtype)
    draw = Draw(KEY, 1.0, 250.0)
    weight_grad = torch.randn(6, 40, generator=generator(2))
    found = gradient_chunk(weight_grad, logits, scales.float(), first, grid, draw, 0)
    expected = gradient_chunk(weight_grad.double(), logits.double(), scales, first, grid, draw, 0)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))


@ALL_GRIDS
@ANNEALED
def test_probabilities_are_a_softmax(grid: Grid, temperature: float, logit_scale: float) -> None:
    logits, _, first = problem(grid)
    p = probabilities(logits, Draw(KEY, temperature, logit_scale), 0)
    torch.testing.assert_close(p.sum(0), torch.ones(6, 40, dtype=torch.float64))
    assert (p >= 0).all()
    q = expected_code(p, grid, first)
    values = candidate_values(grid, first)
    torch.testing.assert_close(q, (values * p).sum(0))
    assert ((q >= values[0]) & (q <= values[-1])).all()


def test_extreme_logits_stay_finite() -> None:
    logits = torch.tensor([-40.0, 0.0, 40.0, -3.0]).view(4, 1, 1).expand(4, 2, 8).contiguous()
    p = probabilities(logits, Draw(KEY, 0.05, 500.0), 0)
    assert torch.equal(p[2], torch.ones(2, 8))
    assert torch.equal(p.sum(0), torch.ones(2, 8))


@ALL_GRIDS
def test_a_chunk_has_the_noise_of_its_place(grid: Grid) -> None:
    logits, scales, first = problem(grid)
    draw = Draw(KEY, 0.7, 150.0)
    weight_grad = torch.randn(6, 40, generator=generator(2), dtype=torch.float64)
    whole = sample_chunk(logits, scales, first, grid, draw, 0)
    grads, scale_grads = gradient_chunk(weight_grad, logits, scales, first, grid, draw, 0)
    rows = slice(2, 5)
    part = (logits[:, rows], scales[rows], first[rows], grid, draw, 2 * 40)
    assert torch.equal(sample_chunk(*part), whole[rows])
    found = gradient_chunk(weight_grad[rows], *part)
    assert torch.equal(found[0], grads[:, rows])
    assert torch.equal(found[1], scale_grads[rows])


@ALL_GRIDS
def test_samples_have_the_gumbel_softmax_distribution(grid: Grid) -> None:
    """The most likely candidate of a sample is drawn with softmax(logit_scale x logits), whatever the temperature."""
    logits = torch.linspace(0, 0.01, grid.num_candidates).view(-1, 1, 1).expand(-1, 50, 4000)
    chosen = probabilities(logits, Draw(KEY, 0.5, 100.0), 0).argmax(0)
    frequency = torch.bincount(chosen.flatten(), minlength=grid.num_candidates) / chosen.numel()
    torch.testing.assert_close(frequency, torch.softmax(100.0 * logits[:, 0, 0], 0), rtol=0, atol=0.005)


@ALL_GRIDS
def test_initial_logits_are_a_parabola_around_the_code_and_noise(grid: Grid) -> None:
    start = random_start(grid, 30, 64, 16)
    first = grid.first_candidate(start.codes)
    distance = (candidate_values(grid, first) - start.codes) / grid.step
    parabola = -0.5 * distance.square()
    parabola -= parabola.mean(0)
    made = initial_logits(start.codes, first, grid, KEY, 64, std=0.01, strength=6.0)
    assert made.dtype == torch.float32
    noise = normal(random_bits(KEY, 64, 30 * 64, grid.num_candidates, "cpu"), torch.float64).view(made.shape)
    torch.testing.assert_close(made.double(), 0.01 * (noise + 6.0 * parabola), rtol=1e-4, atol=1e-6)
    alone = initial_logits(start.codes, first, grid, KEY, 64, std=0.01, strength=1e4)
    assert torch.equal(hard_codes(alone, first, grid), start.codes), "the initial code is the most likely"
    # 0.06 / 2 apart, with noise of 0.01 on each: one neighbour in 60 starts ahead.
    assert (hard_codes(made, first, grid) == start.codes).double().mean() > 0.95


def test_one_bit_flips_as_readily_as_a_step_on_other_grids() -> None:
    gaps = []
    for bits, code in ((1, 1), (2, 1)):
        codes = torch.full((1, 1), code, dtype=torch.int8)
        made = initial_logits(codes, GRIDS[bits].first_candidate(codes), GRIDS[bits], KEY, 0, std=1.0, strength=1e6)
        gaps.append(float(made[-1] - made[-2]))
    assert gaps[0] == pytest.approx(gaps[1], rel=1e-4) == pytest.approx(5e5, rel=1e-4)


@ALL_GRIDS
def test_hard_codes_are_the_most_likely_and_ties_go_down(grid: Grid) -> None:
    logits, _, first = problem(grid)
    codes = hard_codes(logits, first, grid)
    assert codes.dtype == torch.int8
    values = candidate_values(grid, first)
    assert torch.equal(codes.double(), values.gather(0, logits.argmax(0, keepdim=True))[0])
    assert torch.equal(hard_codes(torch.zeros_like(logits), first, grid), first)
