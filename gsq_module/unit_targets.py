"""Where inputs and targets of a unit's microbatches come from: stores, its residual stream, or a frozen copy of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from gsq_module.streaming.calls import BlockCall, first_output
from gsq_module.streaming.units import Branch, Unit

Prepare = Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]
"""A loader's microbatch -> inputs and targets `[batch, seq_len, hidden_size]` and, where they differ, token weights."""


def cached_targets(microbatch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Where inputs and targets lie in stores, a microbatch is what is wanted of it."""
    return microbatch


class StreamTargets:
    """Inputs and targets of a unit, made again of the residual stream before it and of where it should lead.

    Args:
        unit: Traced unit.
        dtype: What the block is computed in.
    """

    def __init__(self, unit: Unit, dtype: torch.dtype) -> None:
        self._pre_norm, self._dtype = unit.pre_norm, dtype

    @torch.no_grad()
    def __call__(self, microbatch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Residual and goal `[batch, seq_len, hidden_size]`, and others -> inputs, targets, and the others as given."""
        residual, goal, *others = microbatch
        inputs = residual.to(self._dtype)
        if self._pre_norm is not None:
            inputs = first_output(self._pre_norm(inputs))
        return inputs, stream_target(residual, goal), *others


def stream_target(residual: Tensor, goal: Tensor) -> Tensor:
    """What a unit should add to `residual` to reach `goal`; in float32, for it is much smaller than either."""
    return goal.float() - residual.float()


class OriginalTargets:
    """Targets of a unit by a frozen copy of it, made before its weights are replaced.

    Args:
        unit: The unit; its module is copied.
        calls: How the block calls it, by batch size.
        dtype: What the block is computed in.
    """

    def __init__(self, unit: Unit, calls: dict[int, BlockCall], dtype: torch.dtype) -> None:
        self._original = Branch(replace(unit, module=copy.deepcopy(unit.module)), calls).requires_grad_(False)
        self._dtype = dtype

    @torch.no_grad()
    def __call__(self, microbatch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Inputs `[batch, seq_len, hidden_size]` -> inputs, targets."""
        (inputs,) = microbatch
        return inputs, self._original(inputs.to(self._dtype))
