"""Which rows a device sees together: one order of samples, whatever the number of devices and the microbatch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch.utils.data import Sampler

from gsq_module.data.samples import even_share


class MicrobatchSampler(Sampler[list[int]]):
    """Row indices of each microbatch of one rank, counted among the rows that this rank owns (data/samples.py).

    Shuffled (training), an optimizer step takes one row of each place in a batch: of the rows whose number, modulo
    `batch_size`, is that place, in an order that depends on the seed and the epoch alone. Ranks and microbatches divide
    the places. So the same run on other hardware takes the same steps, and a row never leaves its rank. Rows that do
    not fill a batch are left out, other ones each epoch. Every iteration that yields something is the next epoch, from
    0.

    Unshuffled (validation), every row comes exactly once, in order; each rank gets the same number of microbatches, so
    that no rank waits for another in a collective, and their sizes differ by one row at most.

    Args:
        num_samples: Rows of the data set, those of all ranks.
        batch_size: Rows of an optimizer step over all ranks and microbatches (unused where `shuffle` is false).
        microbatch_size: Rows one rank holds at once. Without shuffling it may be exceeded by one row where the last
            rows could not be shared among all ranks otherwise.
        seed: Of the permutations; not negative.
        rank: This process among `world_size` ones that share the data.
        world_size: Number of these processes.
        shuffle: Training order and full batches, or validation order and all rows.

    Raises:
        ValueError: No batch can be filled, or fewer rows than ranks to validate on.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        microbatch_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = True,
    ) -> None:
        assert microbatch_size > 0
        assert 0 <= rank < world_size
        if shuffle:
            assert batch_size % (microbatch_size * world_size) == 0, (
                "CalibrationData.accumulate_grad_batches checks this"
            )
        # An epoch without batches would end training without an error.
        if shuffle and num_samples < batch_size:
            raise ValueError(
                f"data.train_samples: {num_samples} samples do not fill one batch of data.batch_size={batch_size}. "
                "Raise train_samples or lower batch_size"
            )
        if not shuffle and num_samples < world_size:
            raise ValueError(
                f"data.validation_samples: {num_samples} samples cannot be shared by {world_size} devices. "
                f"Set it to {world_size} or more"
            )
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.microbatch_size = microbatch_size
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.shuffle = shuffle
        self._epoch = 0

    def __len__(self) -> int:
        """Microbatches of this rank in an epoch."""
        rows_at_once = self.microbatch_size * self.world_size
        if self.shuffle:
            return self.num_samples // self.batch_size * (self.batch_size // rows_at_once)
        return min(-(-self.num_samples // rows_at_once), self.num_samples // self.world_size)

    def __iter__(self) -> Iterator[list[int]]:
        # A generator on purpose: Lightning makes iterators that it never reads, and those must not count as epochs.
        epoch = self._epoch
        self._epoch += 1
        if not self.shuffle:
            mine = np.arange(len(even_share(self.num_samples, self.rank, self.world_size)))
            for rows in np.array_split(mine, len(self)):
                yield rows.tolist()
            return
        steps, rest = divmod(self.num_samples, self.batch_size)
        # Of each place in a batch: its rows in random order. The last batch is not full; what it lacks comes last.
        keys = np.random.default_rng([self.seed, epoch]).random((steps + 1, self.batch_size))
        keys[steps, rest:] = np.inf
        order = keys.argsort(axis=0)[:steps]
        places = self.batch_size // self.world_size
        mine = order[:, self.rank * places : (self.rank + 1) * places] * places + np.arange(places)
        for rows in mine.reshape(-1, self.microbatch_size):
            yield rows.tolist()
