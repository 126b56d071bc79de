"""What yields the microbatches of a fit, in the place of a DataLoader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from torch import Tensor

from gsq_module.data.sampler import MicrobatchSampler


class UnitData(Protocol):
    """What the loaders of one fit read. It brings microbatches to the device itself (streaming/staging.py)."""

    def __len__(self) -> int:
        """Samples, those of all ranks together."""

    def batches(self, indices: Iterable[list[int]]) -> Iterator[tuple[Tensor, ...]]:
        """A microbatch for each list of indices among this rank's samples: tensors whose first dimension these are."""


class MicrobatchLoader:
    """What Lightning iterates over in the place of a DataLoader.

    Args:
        data: The samples.
        order: Their order, and which of them are taken together.
    """

    def __init__(self, data: UnitData, order: MicrobatchSampler) -> None:
        # Not named `sampler`: what has one is taken for a DataLoader by Lightning.
        self.data, self.order = data, order

    def __len__(self) -> int:
        """Microbatches."""
        return len(self.order)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        # A generator, as the sampler is: an iterator that nobody reads does not count as an epoch.
        yield from self.data.batches(self.order)
