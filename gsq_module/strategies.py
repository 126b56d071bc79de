"""The strategies `ddp` and `sharded` for relaxed weights: what the ranks send each other once an optimizer step.

Each rank accumulates its gradients of a step whole, inside the matrix product. Then, in place:

- `ddp`: gradients are averaged, and every rank updates everything behind every weight.
- `sharded`: each rank gets the mean gradient of its own rows, holds logits, momentum and scales of these alone, and
  draws their sample; the rows are gathered in the weight. Four fifths of what a weight takes at 2 bits is divided so.

Lightning's processes, launchers and groups are DDP's. Neither PyTorch's DDP nor FSDP2 is: both keep buffers of the size
of gradients and weights, on streams of their own, which cost 1.1 and 1.0 GiB a rank (measured: docs/experiments.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from gsq_module import ranks


class RelaxedDDPStrategy(DDPStrategy):
    """Averages the gradients of all trainable parameters, in place, after the last backward of an optimizer step."""

    splits_rows = False
    """Whether a unit's rows are divided, where the module knows how (`split_rows`)."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._accumulating = False

    @property
    def _divides(self) -> bool:
        return self.splits_rows and hasattr(self.lightning_module, "split_rows")

    @override
    def configure_ddp(self) -> None:
        """In the place of wrapping the module."""
        if self._divides:
            self.lightning_module.split_rows()  # type: ignore[union-attr, operator]

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        if not self._accumulating:
            self._reduce()

    @torch.no_grad()
    def _reduce(self) -> None:
        assert self.lightning_module is not None
        reduce = ranks.average_rows_ if self._divides else ranks.average_
        for parameter in self.lightning_module.parameters():
            if parameter.requires_grad:
                if parameter.grad is None:  # not called on this rank: the others wait for it all the same
                    parameter.grad = torch.zeros_like(parameter)
                reduce(parameter.grad)

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        if self._divides:
            self.lightning_module.gather_rows()  # type: ignore[union-attr, operator]
        return result


class ShardedStrategy(RelaxedDDPStrategy):
    """Divides the rows of a unit's weights; what else is trained (the final pass's scales) is averaged."""

    splits_rows = True


def register_strategies() -> None:
    """Let `trainer.strategy: ddp` mean what suits relaxed weights, and add `sharded`."""
    for name, strategy, description in (
        ("ddp", RelaxedDDPStrategy, "data parallel over relaxed weights: their gradients are averaged in place"),
        ("sharded", ShardedStrategy, "the same, and what is behind the relaxed weights is split by rows"),
    ):
        StrategyRegistry.register(name, strategy, description=description, override=True, timeout=ranks.TIMEOUT)
