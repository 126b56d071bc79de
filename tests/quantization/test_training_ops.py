"""The lean autograd functions give what torch's own give."""

from __future__ import annotations

import pytest
import torch
from quantization_helpers import generator
from torch import nn

from gsq_module.quantization.training_ops import accumulating_in_place, squared_error


class OddLinear(nn.Linear):
    """A class with a forward of its own."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs) * 2


def make_net(bias: bool) -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 10, bias=bias), nn.SiLU(), OddLinear(10, 8), nn.Linear(8, 4, bias=bias)).double()
    net[3].weight.requires_grad_(True)
    return net


def accumulate(net: nn.Sequential, microbatches: int) -> None:
    random = generator(3)
    for _ in range(microbatches):
        inputs = torch.randn(2, 5, 6, generator=random, dtype=torch.float64)
        net(inputs).square().mean().backward()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_gradients_accumulate_as_autograds(bias: bool, microbatches: int) -> None:
    expected, net = make_net(bias), make_net(bias)
    accumulate(expected, microbatches)
    with accumulating_in_place(net.modules()):
        accumulate(net, microbatches)
    for ours, theirs in zip(net.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-14)


def test_the_second_microbatch_makes_no_new_gradient() -> None:
    net = make_net(True)
    with accumulating_in_place(net.modules()):
        accumulate(net, 1)
        before = [net[0].weight.grad, net[3].weight.grad]
        accumulate(net, 2)
        assert net[0].weight.grad is before[0]
        assert net[3].weight.grad is before[1]


def test_frozen_layers_and_inputs_with_gradients() -> None:
    net, inputs = make_net(True), torch.randn(3, 6, generator=generator(), dtype=torch.float64, requires_grad=True)
    net[0].weight.requires_grad_(False)
    (expected,) = torch.autograd.grad(net(inputs).sum(), inputs)
    with accumulating_in_place(net.modules()):
        net(inputs).sum().backward()
        with torch.no_grad():
            assert torch.equal(net(inputs), make_net(True)(inputs))
    torch.testing.assert_close(inputs.grad, expected)
    assert net[0].weight.grad is None
    assert net[3].weight.grad is not None


def test_layers_are_themselves_again_afterwards() -> None:
    net = make_net(True)
    with accumulating_in_place(net.modules()):
        assert "forward" in vars(net[0])
        assert "forward" not in vars(net[2])
    with pytest.raises(RuntimeError), accumulating_in_place(net.modules()):
        net(torch.zeros(3, 5, dtype=torch.float64))
    assert "forward" not in vars(net[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weighted", [False, True])
def test_squared_error_is_the_mean_square(dtype: torch.dtype, weighted: bool) -> None:
    random = generator(1)
    output = torch.randn(3, 7, 16, generator=random).to(dtype).requires_grad_()
    target = torch.randn(3, 7, 16, generator=random).to(dtype)
    weights = torch.rand(3, 7, generator=random) if weighted else None
    loss = squared_error(output, target, weights)
    (found,) = torch.autograd.grad(loss / 3, output)
    exact = output.detach().double().requires_grad_()
    errors = (exact - target.double()).square().mean(-1)
    reference = (errors if weights is None else errors * weights.double()).mean()
    (expected,) = torch.autograd.grad(reference / 3, exact)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(loss.double(), reference, rtol=1e-6, atol=0)
    precision = {torch.float64: 1e-12 if not weighted else 1e-6, torch.float32: 1e-5, torch.bfloat16: 2.0**-6}[dtype]
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=precision, atol=0)


def test_squared_error_leaves_its_arguments_alone() -> None:
    output, target = torch.ones(2, 4, requires_grad=True), torch.zeros(2, 4)
    squared_error(output, target).backward()
    assert torch.equal(output, torch.ones(2, 4))
    assert torch.equal(target, torch.zeros(2, 4))
