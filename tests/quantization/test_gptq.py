"""GPTQ against its textbook, against round-to-nearest, and on the field's cases 18 and 19."""

from __future__ import annotations

import logging

import pytest
import torch
from quantization_helpers import ALL_GRIDS, correlated_inputs, generator, hessian_of, output_error
from torch import Tensor

from gsq_module.quantization.gptq import gptq, inverse_factor
from gsq_module.quantization.grid import GRIDS, OUTER_GRIDS, Grid
from gsq_module.quantization.hessian import Hessian
from gsq_module.quantization.scales import round_to_nearest, search_scales

ROWS, COLS = 24, 96


def problem(cols: int = COLS, tokens: int = 400) -> tuple[Tensor, Tensor]:
    """A weight and the inputs it is given."""
    return torch.randn(ROWS, cols, generator=generator(9)) * 0.05, correlated_inputs(tokens, cols)


def textbook(weight: Tensor, matrix: Tensor, grid: Grid, group_size: int, damping: float) -> tuple[Tensor, Tensor]:
    """Codes and scales by the paper's formulas, a column at a time, the inverse Hessian itself updated; float64."""
    work, hessian = weight.double().clone(), matrix.double()
    inverse = torch.linalg.inv(hessian + damping * hessian.diagonal().mean() * torch.eye(len(hessian)))
    codes, scales = torch.empty_like(work), []
    for column in range(work.shape[1]):
        if column % group_size == 0:
            scales.append(search_scales(work[:, column : column + group_size].float(), grid, torch.bfloat16))
        scale = scales[-1].double()
        codes[:, column] = grid.nearest(work[:, column] / scale)
        error = (work[:, column] - codes[:, column] * scale) / inverse[column, column]
        work[:, column + 1 :] -= error.unsqueeze(1) * inverse[column, column + 1 :]
        inverse = inverse - torch.outer(inverse[:, column], inverse[column]) / inverse[column, column]
    return codes.to(torch.int8), torch.stack(scales, dim=1)


@ALL_GRIDS
@pytest.mark.parametrize(("cols", "group_size"), [(96, 16), (96, 96), (288, 144), (260, 260)])
def test_codes_are_the_textbooks(grid: Grid, cols: int, group_size: int) -> None:
    """Groups below, at and above the 128 columns of a block."""
    weight, inputs = problem(cols, 2 * cols)
    hessian = hessian_of(inputs)
    found = gptq(weight, hessian, grid, group_size, torch.bfloat16)
    assert (found.method, found.note) == ("gptq", "")
    codes, scales = textbook(weight, hessian.matrix, grid, group_size, damping=0.01)
    assert found.weight.scales.shape == (ROWS, cols // group_size)
    # Float32 against float64: a value half-way between two codes may go either way, and carries its row along.
    rows = ((found.weight.codes == codes).all(1)) & (found.weight.scales == scales).all(1)
    assert rows.double().mean() >= 0.9


@pytest.mark.parametrize("grid", [*GRIDS.values(), OUTER_GRIDS[8]], ids=lambda grid: grid.name)
@pytest.mark.parametrize("group_size", [16, 96])
def test_it_beats_round_to_nearest_on_correlated_inputs(grid: Grid, group_size: int) -> None:
    weight, inputs = problem()
    found = gptq(weight, hessian_of(inputs), grid, group_size, torch.bfloat16)
    rounded = round_to_nearest(weight, grid, group_size, torch.bfloat16)
    assert output_error(weight, found.weight, inputs) < 0.7 * output_error(weight, rounded, inputs)
    fresh = correlated_inputs(400, COLS)[torch.randperm(400, generator=generator(4))[:200]]
    assert output_error(weight, found.weight, fresh) < 0.7 * output_error(weight, rounded, fresh)


@ALL_GRIDS
@pytest.mark.parametrize("signed", [True, False])
def test_uncorrelated_inputs_give_round_to_nearest(grid: Grid, signed: bool) -> None:
    weight, _ = problem(256)
    hessian = hessian_of(torch.eye(256) * 3)
    found = gptq(weight, hessian, grid, 64, torch.bfloat16, signed)
    rounded = round_to_nearest(weight, grid, 64, torch.bfloat16, signed)
    assert found.method == "gptq"
    assert torch.equal(found.weight.codes, rounded.codes)
    assert torch.equal(found.weight.scales, rounded.scales)
    assert signed or (found.weight.scales > 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weight_and_hessian_are_left_alone(dtype: torch.dtype, scale_dtype: torch.dtype) -> None:
    weight, inputs = problem()
    weight = weight.to(dtype)
    hessian = hessian_of(inputs)
    before = weight.clone(), hessian.matrix.clone()
    found = gptq(weight, hessian, GRIDS[2], 32, scale_dtype).weight
    assert torch.equal(weight, before[0])
    assert torch.equal(hessian.matrix, before[1])
    assert (found.codes.dtype, found.scales.dtype) == (torch.int8, scale_dtype)
    assert set(found.codes.unique().tolist()) == {-2, -1, 0, 1}


def test_the_hessians_size_does_not_matter() -> None:
    """A sum or a mean over tokens: damping is relative."""
    weight, inputs = problem()
    results = [gptq(weight, hessian_of(inputs * factor), GRIDS[2], 32, torch.bfloat16).weight for factor in (1, 1024)]
    assert torch.equal(results[0].codes, results[1].codes)


def test_one_short_sample_is_enough_to_go_on_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    weight, inputs = problem(tokens=5)
    with caplog.at_level(logging.WARNING):
        found = gptq(weight, hessian_of(inputs, "model.layers.0.mlp.up_proj"), GRIDS[2], 32, torch.bfloat16)
    assert found.method == "gptq"
    assert "only 5 calibration tokens for 96 input columns" in found.note
    assert "model.layers.0.mlp.up_proj" in caplog.text
    assert found.note in caplog.text
    assert torch.isfinite(found.weight.dequantize()).all()
    rounded = round_to_nearest(weight, GRIDS[2], 32, torch.bfloat16)
    assert output_error(weight, found.weight, inputs) < output_error(weight, rounded, inputs)


@ALL_GRIDS
def test_dead_columns_are_rounded_to_nearest_and_noted(grid: Grid, caplog: pytest.LogCaptureFixture) -> None:
    weight, inputs = problem()
    inputs[:, [0, 40, 95]] = 0
    with caplog.at_level(logging.WARNING):
        found = gptq(weight, hessian_of(inputs, "up_proj"), grid, 32, torch.bfloat16)
    assert found.method == "gptq"
    assert found.note == "3 input columns always zero"
    assert found.note in caplog.text
    dense = found.weight.dequantize()
    assert torch.isfinite(dense).all()
    for column, group in ((0, 0), (40, 1), (95, 2)):
        nearest = grid.nearest(weight[:, column] / found.weight.scales[:, group].float())
        assert torch.equal(found.weight.codes[:, column].float(), nearest)


def test_inputs_that_are_all_zero_give_round_to_nearest() -> None:
    weight, _ = problem()
    found = gptq(weight, hessian_of(torch.zeros(200, COLS)), GRIDS[2], 32, torch.bfloat16)
    assert "96 input columns always zero" in found.note
    assert torch.equal(found.weight.codes, round_to_nearest(weight, GRIDS[2], 32, torch.bfloat16).codes)


def test_a_linear_that_no_token_reached_is_rounded_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    weight, _ = problem()
    with caplog.at_level(logging.WARNING):
        found = gptq(weight, Hessian("experts.5.up_proj", COLS, "cpu"), GRIDS[2], 32, torch.bfloat16)
    assert (found.method, found.note) == ("rtn", "no calibration token reached it")
    assert "experts.5.up_proj" in caplog.text
    rounded = round_to_nearest(weight, GRIDS[2], 32, torch.bfloat16)
    assert torch.equal(found.weight.codes, rounded.codes)
    assert torch.equal(found.weight.scales, rounded.scales)


def matrix_with_smallest_eigenvalue(smallest: float) -> Tensor:
    """Mean diagonal 1; indefinite where `smallest` is negative."""
    basis, _ = torch.linalg.qr(torch.randn(COLS, COLS, generator=generator(), dtype=torch.float64))
    values = torch.linspace(0.5, 1.5, COLS, dtype=torch.float64)
    values[0], values[-1] = smallest, 2.0 - smallest
    return (basis @ torch.diag(values) @ basis.T).float()


@pytest.mark.parametrize(("smallest", "needed"), [(0.1, 0.01), (-0.05, 0.1), (-0.5, 1.0), (-5.0, 10.0)])
def test_damping_rises_until_the_hessian_can_be_inverted(smallest: float, needed: float) -> None:
    matrix = matrix_with_smallest_eigenvalue(smallest)
    hessian = Hessian("up_proj", COLS, "cpu")
    hessian.matrix = matrix.clone()
    upper, used = inverse_factor(hessian, 0.01)
    assert torch.equal(hessian.matrix, matrix)
    given_up, again = inverse_factor(hessian, 0.01, keep=False)
    assert given_up is not None
    assert again == used
    assert torch.equal(given_up, upper)
    assert hessian.matrix.numel() == 0
    assert used == pytest.approx(needed)
    assert upper is not None
    assert torch.equal(upper, upper.triu())
    damped = matrix.double() + used * matrix.diagonal().double().mean() * torch.eye(COLS)
    torch.testing.assert_close(upper.double().T @ upper.double() @ damped, torch.eye(COLS).double(), rtol=0, atol=1e-3)


def test_damping_that_had_to_rise_is_noted(caplog: pytest.LogCaptureFixture) -> None:
    weight, _ = problem()
    hessian = Hessian("up_proj", COLS, "cpu")
    hessian.matrix, hessian.num_tokens = matrix_with_smallest_eigenvalue(-0.05), 1000
    with caplog.at_level(logging.WARNING):
        found = gptq(weight, hessian, GRIDS[2], 32, torch.bfloat16)
    assert (found.method, found.note) == ("gptq", "damping raised to 0.1")
    assert "up_proj: damping raised to 0.1" in caplog.text


@pytest.mark.parametrize("matrix", [matrix_with_smallest_eigenvalue(-50.0), torch.full((COLS, COLS), float("nan"))])
def test_a_hopeless_hessian_ends_in_rounding_after_four_attempts(
    matrix: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = []
    cholesky = torch.linalg.cholesky_ex

    def counted(*args, **kwargs):
        attempts.append(1)
        return cholesky(*args, **kwargs)

    monkeypatch.setattr(torch.linalg, "cholesky_ex", counted)
    weight, _ = problem()
    hessian = Hessian("up_proj", COLS, "cpu")
    hessian.matrix, hessian.num_tokens = matrix, 1000
    found = gptq(weight, hessian, GRIDS[2], 32, torch.bfloat16)
    assert (found.method, found.note) == ("rtn", "its Hessian is not invertible")
    assert torch.isfinite(found.weight.dequantize()).all()
    assert 4 <= len(attempts) <= 8


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_refused(value: float) -> None:
    weight, inputs = problem()
    weight[3, 4] = value
    with pytest.raises(ValueError, match=r"up_proj: the checkpoint's weight is not finite"):
        gptq(weight, hessian_of(inputs, "up_proj"), GRIDS[2], 32, torch.bfloat16)
