"""How much memory a computation holds at its highest, found by running it on tensors without data."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ALLOCATION = 512
"""Bytes that CUDA's caching allocator rounds a tensor up to."""


class WorkingSet(TorchDispatchMode):
    """Within the block, counts the bytes of storages that operations make, autograd's saved ones included.

    Enter it under `FakeTensorMode`, whose tensors have shapes and storages without memory; kernels that are not torch
    operations are not seen. What existed before does not count.

    Attributes:
        current: Bytes alive now.
        peak: The highest of them since the last `reset`.

    Example::

        with FakeTensorMode(), WorkingSet() as working_set:
            block(torch.empty(1, 4096, 5120))
        working_set.peak
    """

    def __init__(self) -> None:
        super().__init__()
        self.current = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}

    def reset(self) -> None:
        """Forget the peak; what is alive now still counts."""
        self.peak = self.current

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {_address(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and (address := _address(leaf)) not in known and address not in self._sizes:
                storage = leaf.untyped_storage()
                self._sizes[address] = -(-storage.nbytes() // ALLOCATION) * ALLOCATION
                self.current += self._sizes[address]
                weakref.finalize(storage, self._free, address)
        self.peak = max(self.peak, self.current)
        return result

    def _free(self, address: int) -> None:
        self.current -= self._sizes.pop(address)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
