from __future__ import annotations

import pytest
import torch
from quantization_helpers import ALL_GRIDS, generator, levels_of, random_start

from gsq_module.quantization.grid import GRIDS, OUTER_GRIDS, Grid, QuantizedWeight

LEVELS = {
    1: [-1, 1],
    "ternary": [-1, 0, 1],
    2: [-2, -1, 0, 1],
    3: [-4, -3, -2, -1, 0, 1, 2, 3],
    4: list(range(-8, 8)),
}


def test_the_grids_hold_the_levels_of_the_design() -> None:
    assert {bits: levels_of(grid).tolist() for bits, grid in GRIDS.items()} == LEVELS
    assert {bits: grid.num_levels for bits, grid in GRIDS.items()} == {bits: len(x) for bits, x in LEVELS.items()}
    assert {bits: grid.num_candidates for bits, grid in GRIDS.items()} == {1: 2, "ternary": 3, 2: 4, 3: 5, 4: 5}
    assert {bits for bits, grid in GRIDS.items() if grid.is_lopsided} == {2, 3, 4}


@ALL_GRIDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_nearest_finds_the_closest_level(grid: Grid, dtype: torch.dtype) -> None:
    values = (torch.randn(2000, generator=generator(), dtype=torch.float64) * 6).to(dtype)
    before = values.clone()
    codes = grid.nearest(values)
    assert codes.dtype == dtype
    assert torch.equal(values, before), "the argument is the caller's"
    distances = (values.double().unsqueeze(-1) - levels_of(grid)).abs()
    assert set(codes.tolist()) <= set(levels_of(grid).tolist())
    # On the 1-bit grid a value within a rounding error of the middle may go either way.
    excess = (values.double() - codes.double()).abs() - distances.amin(-1)
    assert excess.max() <= (torch.finfo(dtype).eps if grid.step > 1 else 0)


@ALL_GRIDS
def test_a_tie_goes_to_one_of_its_two_neighbours(grid: Grid) -> None:
    levels = levels_of(grid).double()
    ties = (levels[1:] + levels[:-1]) / 2
    codes = grid.nearest(ties)
    assert ((codes == levels[1:]) | (codes == levels[:-1])).all()
    assert torch.equal(codes, grid.nearest(ties.float()).double()), "whatever the precision"


def test_the_one_bit_grid_has_no_zero() -> None:
    assert set(GRIDS[1].nearest(torch.tensor([0.0, -0.0, 1e-30, -1e-30, 99.0, -99.0])).tolist()) == {-1.0, 1.0}


@ALL_GRIDS
def test_the_window_holds_the_code_and_stays_inside_the_grid(grid: Grid) -> None:
    codes = levels_of(grid).to(torch.int8)
    first = grid.first_candidate(codes)
    assert first.dtype == torch.int8
    last = first + (grid.num_candidates - 1) * grid.step
    assert (first >= grid.low).all()
    assert (last <= grid.high).all()
    assert ((first <= codes) & (codes <= last)).all()
    assert ((codes - first) % grid.step == 0).all()
    if grid.is_windowed:
        inner = (codes - 2 >= grid.low) & (codes + 2 <= grid.high)
        assert torch.equal(first[inner], codes[inner] - 2), "centred where there is room"
    else:
        assert (first == grid.low).all()


@ALL_GRIDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dequantizing_is_code_times_scale_in_the_dtype_of_the_scales(grid: Grid, dtype: torch.dtype) -> None:
    weight = random_start(grid, 6, 48, 16)
    weight.scales = weight.scales.to(dtype)
    assert weight.group_size == 16
    dense = weight.dequantize()
    assert dense.dtype == dtype
    for row, column in ((0, 0), (3, 15), (3, 16), (5, 47)):
        exact = float(weight.codes[row, column]) * float(weight.scales[row, column // 16])
        assert dense[row, column] == torch.tensor(exact, dtype=torch.float64).to(dtype)


def test_moving_a_weight_moves_codes_and_scales() -> None:
    moved = QuantizedWeight(torch.zeros(2, 4, dtype=torch.int8), torch.ones(2, 1)).to("meta")
    assert (moved.codes.device.type, moved.scales.device.type) == ("meta", "meta")


def test_all_256_codes_of_the_8_bit_grid_fit_int8():
    grid = OUTER_GRIDS[8]
    assert levels_of(grid).tolist() == list(range(-128, 128))
    values = torch.linspace(-300, 300, 6001)
    assert torch.equal(grid.nearest(values).to(torch.int8).float(), values.round().clamp(-128, 127))
