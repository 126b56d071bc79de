"""The calibration rows that go through the blocks together, and which of them serve what."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Samples:
    """The token rows that go through the blocks, and which of them serve what.

    Attributes:
        tokens: int64 `[num_samples, seq_len]`: training, validation and GPTQ rows in this order.
        train: Rows a unit is refined on.
        validation: Rows it is measured on.
        gptq: Rows its Hessians are gathered on.
    """

    tokens: Tensor
    train: range
    validation: range
    gptq: range

    @property
    def fitted(self) -> tuple[range, range]:
        """The parts that a unit is fitted to and measured on: those that have targets."""
        return self.train, self.validation

    @classmethod
    def of(cls, train: Tensor, validation: Tensor, gptq: Tensor) -> Samples:
        ends = [len(train), len(train) + len(validation), len(train) + len(validation) + len(gptq)]
        tokens = torch.cat([train, validation, gptq])
        return cls(tokens, range(ends[0]), range(ends[0], ends[1]), range(ends[1], ends[2]))

    def batches(self, *parts: range, size: int) -> Iterator[slice]:
        """Row slices of at most `size` that stay inside one part."""
        for part in parts or (self.train, self.validation, self.gptq):
            for first in range(part.start, part.stop, size):
                yield slice(first, min(first + size, part.stop))

    def batch_sizes(self, size: int) -> set[int]:
        return {rows.stop - rows.start for rows in self.batches(size=size)}
