"""Cases 17, 20 and 21 of the field, and the sum itself."""

from __future__ import annotations

import pytest
import torch
from quantization_helpers import correlated_inputs, generator, hessian_of

from gsq_module.quantization.hessian import Hessian

NAME = "model.layers.7.mlp.down_proj"


def test_it_is_the_sum_of_outer_products() -> None:
    inputs = correlated_inputs(60, 24)
    hessian = Hessian(NAME, 24, "cpu")
    for part in inputs.split(25):
        hessian.add(part)
    expected = sum(torch.outer(token, token) for token in inputs.double())
    torch.testing.assert_close(hessian.matrix.double(), expected, rtol=1e-4, atol=1e-3)
    assert hessian.num_tokens == 60


@pytest.mark.parametrize("shape", [(24,), (1, 24), (1, 1, 24), (2, 3, 24), (2, 3, 4, 24)])
def test_leading_dimensions_are_tokens(shape: tuple[int, ...]) -> None:
    inputs = torch.randn(shape, generator=generator())
    hessian = hessian_of(inputs)
    rows = inputs.reshape(-1, 24)
    torch.testing.assert_close(hessian.matrix, rows.T @ rows)
    assert hessian.num_tokens == len(rows)


@pytest.mark.parametrize("padding", [0.0, 1e30, float("nan")])
def test_a_padded_batch_counts_its_tokens_alone(padding: float) -> None:
    tokens = correlated_inputs(7, 24)
    padded = torch.full((2, 5, 24), padding)
    mask = torch.zeros(2, 5, dtype=torch.bool)
    for row, length in ((0, 5), (1, 2)):
        padded[row, :length] = tokens[5 * row : 5 * row + length]
        mask[row, :length] = True
    hessian = Hessian(NAME, 24, "cpu")
    hessian.add(padded, mask)
    assert torch.equal(hessian.matrix, hessian_of(tokens).matrix)
    assert hessian.num_tokens == 7
    hessian.add(padded, torch.zeros_like(mask))
    assert hessian.num_tokens == 7


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_bad_activation_names_linear_and_batch(value: float, dtype: torch.dtype) -> None:
    hessian = Hessian(NAME, 24, "cpu")
    inputs = correlated_inputs(30, 24).to(dtype)
    hessian.add(inputs)
    hessian.add(inputs)
    inputs[17, 3] = value
    hessian.check()
    hessian.add(inputs)
    hessian.add(inputs)
    with pytest.raises(ValueError, match=rf"{NAME}: calibration batch 2 .*not finite.*calibration data") as caught:
        hessian.check()
    assert "bfloat16" not in str(caught.value), "that would not help here"


def test_float16_that_overflowed_is_advised_bfloat16() -> None:
    inputs = (correlated_inputs(30, 24) * 65504).half()
    assert torch.isinf(inputs).any()
    with pytest.raises(ValueError, match=rf"{NAME}: calibration batch 0 .*65504.*--model.dtype bfloat16"):
        hessian_of(inputs, NAME).check()


def test_squares_beyond_float32_are_named_too() -> None:
    inputs = correlated_inputs(30, 24).to(torch.bfloat16)
    inputs[4, 2] = 2.0**80
    with pytest.raises(ValueError, match=rf"{NAME}: calibration batch 0 .*1.21e\+24.*overflow float32"):
        hessian_of(inputs, NAME).check()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_accumulates_in_float32(dtype: torch.dtype) -> None:
    """In float16 one square of these inputs, in bfloat16 the small parts of the sum, would be lost."""
    inputs = (torch.rand(4000, 8, generator=generator()) * 30000 + 10000).to(dtype)
    hessian = hessian_of(inputs)
    assert hessian.matrix.dtype == torch.float32
    exact = inputs.double().T @ inputs.double()
    torch.testing.assert_close(hessian.matrix.double(), exact, rtol=1e-5, atol=0)
