"""The calibration rows that go through the blocks together, which of them serve what, and which of them a rank owns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


def even_share(count: int, rank: int, world_size: int) -> range:
    """Consecutive numbers below `count` that one rank takes: all ranks as many, the first ones one more."""
    least, more = divmod(count, world_size)
    begin = rank * least + min(rank, more)
    return range(begin, begin + least + (rank < more))


def training_share(count: int, batch_size: int, rank: int, world_size: int) -> list[int]:
    """Training rows that one rank owns for the whole run: of every `batch_size` rows the same stretch.

    `MicrobatchSampler` makes up each optimizer step of one row of each place in such a batch, so that every rank finds
    its part of each step among its own rows.

    Args:
        count: Training rows of all ranks.
        batch_size: Rows of an optimizer step over all ranks; a multiple of `world_size`.
    """
    places = batch_size // world_size
    return [row for row in range(count) if row % batch_size // places == rank]


@dataclass
class Samples:
    """The token rows that go through the blocks of one rank, and which of them serve what.

    Attributes:
        tokens: int64 `[num_samples, seq_len]`: training, validation and GPTQ rows in this order.
        train: Rows a unit is refined on.
        validation: Rows it is measured on.
        gptq: Rows its Hessians are gathered on.
        totals: Training and validation rows of all ranks together.
    """

    tokens: Tensor
    train: range
    validation: range
    gptq: range
    totals: tuple[int, int]

    @property
    def fitted(self) -> tuple[range, range]:
        """The parts that a unit is fitted to and measured on: those that have targets."""
        return self.train, self.validation

    @classmethod
    def of(
        cls, train: Tensor, validation: Tensor, gptq: Tensor, batch_size: int = 1, rank: int = 0, world_size: int = 1
    ) -> Samples:
        """The rows of one rank of all rows `[num_samples, seq_len]`; each row goes to exactly one rank.

        Args:
            batch_size: Rows of an optimizer step over all ranks; one rank alone has all of them, whatever it is.
        """
        totals = (len(train), len(validation))
        if world_size > 1:
            train = train[training_share(len(train), batch_size, rank, world_size)]
            validation, gptq = (
                part[range_slice(even_share(len(part), rank, world_size))] for part in (validation, gptq)
            )
        ends = [len(train), len(train) + len(validation), len(train) + len(validation) + len(gptq)]
        tokens = torch.cat([train, validation, gptq])
        return cls(tokens, range(ends[0]), range(ends[0], ends[1]), range(ends[1], ends[2]), totals)

    def batches(self, *parts: range, size: int) -> Iterator[slice]:
        """Row slices of at most `size` that stay inside one part."""
        for part in parts or (self.train, self.validation, self.gptq):
            for first in range(part.start, part.stop, size):
                yield slice(first, min(first + size, part.stop))

    def batch_sizes(self, size: int) -> set[int]:
        return {rows.stop - rows.start for rows in self.batches(size=size)}


def range_slice(rows: range) -> slice:
    """The slice that takes the same consecutive rows."""
    return slice(rows.start, rows.stop)
