"""The strategy `sharded`: a unit's relaxed weights, gradients and optimizer state split by rows over the ranks (FSDP2).

Weights are gathered once an optimizer step, in the first forward, and gradients reduced and scattered once, in the last
backward: between these a rank holds the unit's weights and accumulated gradients whole, and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from typing_extensions import override

if TYPE_CHECKING:
    from gsq_module.module import GSQModule


class RowShards:
    """Stand-ins for a unit's linears, with weights that are split by rows, from `__init__` to `join`.

    The linears themselves keep their place in the caller's hands, without a weight meanwhile: FSDP2 cannot be taken off
    a module again.

    Args:
        student: Holds the linears.
        weights: Their weights `[out_features, in_features]` by any name; the same on all ranks.
        mesh: Of all ranks.

    Attributes:
        weights: The split weights by the same names.
    """

    def __init__(self, student: nn.Module, weights: Mapping[str, nn.Parameter], mesh: DeviceMesh) -> None:
        self._places: dict[str, tuple[nn.Module, str, nn.Linear]] = {}
        self._stand_ins: list[FSDPModule] = []
        self.weights: dict[str, nn.Parameter] = {}
        found = {
            id(linear.weight): (parent, leaf, linear)
            for parent in list(student.modules())
            for leaf, linear in parent.named_children()
            if isinstance(linear, nn.Linear)
        }
        for name, weight in weights.items():
            self._places[name] = parent, leaf, linear = found[id(weight)]
            stand_in = nn.Linear(linear.in_features, linear.out_features, bias=False, device="meta")
            stand_in.train(linear.training)
            stand_in.weight, stand_in.bias = nn.Parameter(weight.detach()), linear.bias
            weight.data = weight.data.new_empty(0)
            parent._modules[leaf] = stand_in
            whole = {linear.bias} if linear.bias is not None else None
            fully_shard(stand_in, mesh=mesh, reshard_after_forward=False, ignored_params=whole)
            self._stand_ins.append(cast(FSDPModule, stand_in))
            self.weights[name] = stand_in.weight

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """What passes forward and backward in the `with` block only accumulates gradients; weights stay gathered."""
        self._set_last(False)
        try:
            yield
        finally:
            self._set_last(True)

    def _set_last(self, last: bool) -> None:
        for stand_in in self._stand_ins:
            stand_in.set_requires_gradient_sync(last)
            stand_in.set_reshard_after_backward(last)

    def scatter(self) -> None:
        """Drop gathered weights: a forward without backward leaves them, and they would outlive a change."""
        for stand_in in self._stand_ins:
            stand_in.reshard()

    def join(self) -> dict[str, nn.Parameter]:
        """Put the linears back, with whole weights of undefined values."""
        self.scatter()
        joined = {}
        for name, (parent, leaf, linear) in self._places.items():
            split = self.weights[name]
            linear.weight = nn.Parameter(torch.empty(split.shape, dtype=split.dtype, device=split.device))
            parent._modules[leaf] = linear
            joined[name] = linear.weight
        self._stand_ins, self._places, self.weights = [], {}, {}
        return joined


class ShardedStrategy(DDPStrategy):
    """Lightning's processes, group and launchers of DDP, with FSDP2 on the linears of each unit in the place of DDP."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._mesh: DeviceMesh | None = None

    @override
    def configure_ddp(self) -> None:
        if not self._splits:
            super().configure_ddp()
            return
        if self._mesh is None:
            # Of the group that is there: another communicator would cost its buffers again.
            everyone = dist.group.WORLD
            assert everyone is not None
            self._mesh = DeviceMesh.from_group(everyone, self.root_device.type)
        self._recipe.split(self._mesh)

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        if not self._splits:
            with super().block_backward_sync():
                yield
            return
        shards = self._recipe.shards
        assert shards is not None
        with shards.accumulating():
            yield

    @property
    def _splits(self) -> bool:
        """Whether the module at hand has weights to split: the final pass has none but scales."""
        return hasattr(self.lightning_module, "split")

    @property
    def _recipe(self) -> GSQModule:
        return cast("GSQModule", self.lightning_module)
