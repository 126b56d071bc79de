"""Autograd functions of the refinement that hold and move less memory than the ones they stand for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class _AccumulatingLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: nn.Parameter, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs)
        ctx.weight, ctx.bias = weight, bias
        return nn.functional.linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        (inputs,) = ctx.saved_tensors
        weight = ctx.weight
        grad = grads[0].flatten(0, -2)
        if weight.grad is None:
            weight.grad = grad.T @ inputs.flatten(0, -2)
        else:
            weight.grad.addmm_(grad.T, inputs.flatten(0, -2))
        input_grad = grads[0] @ weight if ctx.needs_input_grad[0] else None
        bias_grad = grad.sum(0) if ctx.needs_input_grad[2] else None
        return input_grad, None, bias_grad


@contextmanager
def accumulating_in_place(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let linear layers add a microbatch's weight gradient to the accumulated one inside the matrix product.

    Autograd makes each microbatch a gradient of its own and adds it then: one more buffer of the largest weight's size,
    and 6 bytes a weight of memory traffic. Hooks on a weight's gradient, which PyTorch's DDP relies on, do not run.

    Args:
        modules: Of these, the plain linear layers whose weights are trained; classes with a forward of their own are
            left alone.
    """
    linears = [module for module in modules if type(module) is nn.Linear and module.weight.requires_grad]

    def forward_of(linear: nn.Linear):
        def forward(inputs: Tensor) -> Tensor:
            if not torch.is_grad_enabled():
                return nn.functional.linear(inputs, linear.weight, linear.bias)
            return _AccumulatingLinear.apply(inputs, linear.weight, linear.bias)

        return forward

    for linear in linears:
        linear.forward = forward_of(linear)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for linear in linears:
            del linear.forward


class _SquaredError(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, target: Tensor, weights: Tensor | None) -> Tensor:
        difference = output.to(torch.promote_types(output.dtype, torch.float32), copy=True).sub_(target)
        ctx.weights = weights
        if output.requires_grad:
            # The gradient is rounded to this dtype in the end anyway.
            ctx.save_for_backward(difference.to(output.dtype))
        errors = torch.linalg.vector_norm(difference, dim=-1).square_()
        return (errors if weights is None else errors * weights).mean() / output.shape[-1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (difference,) = ctx.saved_tensors
        factor = grads[0] * (2.0 / difference.numel())
        if ctx.weights is not None:
            factor = (factor * ctx.weights).to(difference.dtype).unsqueeze(-1)
        return difference * factor, None, None


def squared_error(output: Tensor, target: Tensor, weights: Tensor | None = None) -> Tensor:
    """Mean squared error, computed in float32, that keeps one tensor of the output's dtype for its gradient.

    `torch.nn.functional.mse_loss` on float32 copies keeps two of them and makes a third.

    Args:
        output: `[..., hidden_size]`, any floating dtype.
        target: The same shape, any floating dtype; no gradient flows to it.
        weights: Optional `[...]`, a factor on each token's error.

    Returns:
        A scalar in float32 (float64 stays float64).
    """
    return _SquaredError.apply(output, target, weights)
