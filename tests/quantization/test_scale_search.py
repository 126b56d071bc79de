from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from quantization_helpers import ALL_GRIDS, generator, levels_of, random_start
from torch import Tensor

from gsq_module.quantization.grid import GRIDS, Grid
from gsq_module.quantization.scales import round_to_nearest, search_scales

GROUPS, SIZE = 32, 64


def normal(scale: float = 0.02) -> Tensor:
    return torch.randn(GROUPS, SIZE, generator=generator()) * scale


def with_outlier() -> Tensor:
    weight = normal()
    weight[:, 5] = 0.3
    return weight


def heavy_tails() -> Tensor:
    return normal() * torch.rand(GROUPS, SIZE, generator=generator(1)).add(0.02).rsqrt()


def lopsided() -> Tensor:
    return torch.rand(GROUPS, SIZE, generator=generator()) * 0.1 - 0.02


WEIGHTS = pytest.mark.parametrize(
    "make", [normal, with_outlier, heavy_tails, lopsided, lambda: -lopsided(), lambda: normal(1e-3)]
)


def squared_errors(weight: Tensor, scales: Tensor, grid: Grid) -> Tensor:
    """Of each group, with the codes chosen by comparing all levels; float64."""
    exact, wide = weight.double(), scales.double().unsqueeze(-1)
    distances = (exact.unsqueeze(-1) - wide.unsqueeze(-1) * levels_of(grid)).square()
    return distances.amin(-1).sum(-1)


def dense_search(weight: Tensor, grid: Grid, scale_dtype: torch.dtype) -> Tensor:
    """The smallest error over 1000 scales of each sign, from a 200th of the largest weight to more than all of it."""
    best = torch.full(weight.shape[:-1], float("inf"), dtype=torch.float64)
    largest = weight.abs().amax(-1) / min(-grid.low, grid.high)
    for fraction in torch.linspace(0.005, 1.2, 1000):
        for sign in (1, -1):
            scales = (largest * fraction * sign).to(scale_dtype)
            best = torch.minimum(best, squared_errors(weight, scales, grid))
    return best


@ALL_GRIDS
@WEIGHTS
def test_no_dense_search_does_better_by_a_hundredth(grid: Grid, make: Callable[[], Tensor]) -> None:
    weight = make()
    best = dense_search(weight, grid, torch.bfloat16)
    found = squared_errors(weight, search_scales(weight, grid, torch.bfloat16), grid)
    assert found.sum() <= 1.01 * best.sum()
    # The error over the scale has many minima at 4 bits; single groups may settle for another one.
    assert (found / best).max() <= 1.15
    assert (found / best).median() <= 1.005


@ALL_GRIDS
@WEIGHTS
@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_both_signs_are_never_worse_than_one(grid: Grid, make: Callable[[], Tensor], scale_dtype: torch.dtype) -> None:
    weight = make()
    both = search_scales(weight, grid, scale_dtype)
    one = search_scales(weight, grid, scale_dtype, signed=False)
    assert both.dtype == one.dtype == scale_dtype
    assert (one > 0).all()
    assert torch.isfinite(both).all()
    assert (both != 0).all()
    errors, unsigned = squared_errors(weight, both, grid), squared_errors(weight, one, grid)
    assert (errors <= unsigned * (1 + 1e-5)).all()
    if not grid.is_lopsided:
        assert torch.equal(both, one)


@ALL_GRIDS
def test_a_mirrored_weight_has_mirrored_scales(grid: Grid) -> None:
    weight = normal()
    scales, mirrored = (search_scales(side, grid, torch.bfloat16) for side in (weight, -weight))
    # Where a group leaves the longer side unused both signs serve as well.
    assert torch.equal(scales.abs(), mirrored.abs())
    assert (scales == mirrored).double().mean() < 0.2 if grid.is_lopsided else torch.equal(scales, mirrored)


@ALL_GRIDS
def test_the_scale_is_the_best_of_those_the_dtype_holds(grid: Grid) -> None:
    """A dtype of 16 values an octave shows whether errors are taken of the rounded scales."""
    weight = normal(4.0)
    scales = search_scales(weight, grid, torch.float8_e4m3fn)
    every = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    errors = torch.stack(
        [squared_errors(weight, scale.expand(GROUPS), grid) for scale in torch.cat([every, -every]).unbind()]
    )
    found = squared_errors(weight, scales, grid)
    assert torch.equal(found, errors.amin(0))


def test_signed_scales_pay_on_the_two_bit_grid() -> None:
    weight = normal()
    errors = [
        squared_errors(weight, search_scales(weight, GRIDS[2], torch.bfloat16, signed), GRIDS[2]).sum()
        for signed in (True, False)
    ]
    assert errors[0] < 0.97 * errors[1]
    mirrored = search_scales(torch.tensor([[2.0, 1.0, 0.0, -1.0]]), GRIDS[2], torch.bfloat16)
    assert mirrored.item() == -1.0, "{-2,-1,0,1} x -1 holds all four"


@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float16, torch.float32])
@ALL_GRIDS
@pytest.mark.parametrize("value", [0.0, 1e-30, 0.03, -0.03, 250.0])
def test_constant_groups(grid: Grid, scale_dtype: torch.dtype, value: float) -> None:
    weight = torch.full((3, 32), value)
    scales = search_scales(weight, grid, scale_dtype)
    assert scales.dtype == scale_dtype
    assert torch.isfinite(scales).all()
    assert (scales != 0).all()
    restored = round_to_nearest(weight, grid, 32, scale_dtype).dequantize().float()
    # A float16 cannot hold smaller scales well; on the 1-bit grid nothing is zero.
    tiny = 10 * torch.finfo(scale_dtype).tiny
    torch.testing.assert_close(restored, weight, rtol=2 * torch.finfo(scale_dtype).eps, atol=tiny)


def test_one_bit_takes_the_mean_magnitude_however_far_an_outlier_lies() -> None:
    """The optimum on {-1, 1} in closed form; it lies at 0.08 of the largest weight here, below the coarse sweep."""
    weight = with_outlier()
    scales = search_scales(weight, GRIDS[1], torch.float32)
    torch.testing.assert_close(scales, weight.abs().mean(-1), rtol=1e-5, atol=0)


@ALL_GRIDS
def test_scaling_the_weight_scales_the_result(grid: Grid) -> None:
    weight = normal()
    scales = search_scales(weight, grid, torch.bfloat16)
    assert torch.equal(search_scales(weight * 2.0**-20, grid, torch.bfloat16), scales * 2.0**-20)


@ALL_GRIDS
def test_weights_on_a_grid_are_recovered_exactly(grid: Grid) -> None:
    start = random_start(grid, 12, 128, 32)
    # Each group holds every level, so that no other scale explains it.
    start.codes.view(12, 4, 32)[..., : grid.num_levels] = levels_of(grid).to(torch.int8)
    weight = start.codes.float() * start.scales.float().repeat_interleave(32, dim=1)
    found = round_to_nearest(weight, grid, 32, torch.bfloat16)
    assert torch.equal(found.dequantize(), start.dequantize())
    if grid.is_lopsided:
        assert torch.equal(found.codes, start.codes)
        assert torch.equal(found.scales, start.scales)
    else:
        assert torch.equal(found.scales, start.scales.abs())


@ALL_GRIDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_to_nearest_gives_the_nearest_code_of_each_weight(grid: Grid, dtype: torch.dtype) -> None:
    weight = torch.randn(8, 96, generator=generator()).to(dtype)
    before = weight.clone()
    found = round_to_nearest(weight, grid, 24, torch.bfloat16)
    assert torch.equal(weight, before)
    assert found.codes.dtype == torch.int8
    assert found.scales.shape == (8, 4)
    assert torch.equal(found.scales, search_scales(weight.float().view(8, 4, 24), grid, torch.bfloat16))
    best = squared_errors(weight.view(8, 4, 24), found.scales, grid)
    error = (found.codes.double() * found.scales.double().repeat_interleave(24, dim=1) - weight.double()).square()
    torch.testing.assert_close(error.view(8, 4, 24).sum(-1), best)
