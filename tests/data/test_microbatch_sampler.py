from __future__ import annotations

import pytest

from gsq_module.data.sampler import MicrobatchSampler
from gsq_module.data.samples import even_share, training_share


def owned_rows(sampler: MicrobatchSampler) -> list[int]:
    """What the indices of a sampler count among."""
    if sampler.shuffle:
        return training_share(sampler.num_samples, sampler.batch_size, sampler.rank, sampler.world_size)
    return list(even_share(sampler.num_samples, sampler.rank, sampler.world_size))


def global_rows(sampler: MicrobatchSampler) -> list[list[int]]:
    """Microbatches of an epoch, in rows of the whole data set."""
    owned = owned_rows(sampler)
    return [[owned[index] for index in microbatch] for microbatch in sampler]


def steps_of_an_epoch(samplers: list[MicrobatchSampler]) -> list[list[int]]:
    """Rows of each optimizer step, put together from all ranks in the order of (rank, microbatch)."""
    batch_size, micro = samplers[0].batch_size, samplers[0].microbatch_size
    a_step = batch_size // (micro * len(samplers))
    ranks = [global_rows(sampler) for sampler in samplers]
    assert all(len(microbatches) == len(sampler) for microbatches, sampler in zip(ranks, samplers, strict=True))
    assert all(len(rows) == micro for microbatches in ranks for rows in microbatches)
    return [
        [row for microbatches in ranks for j in range(first, first + a_step) for row in microbatches[j]]
        for first in range(0, len(ranks[0]), a_step)
    ]


@pytest.mark.parametrize(("samples", "batch", "world"), [(43, 8, 1), (43, 8, 2), (46, 8, 4), (16, 8, 8), (31, 12, 3)])
def test_each_row_has_one_owner(samples, batch, world):
    shares = [training_share(samples, batch, rank, world) for rank in range(world)]
    assert sorted(row for share in shares for row in share) == list(range(samples))
    assert max(map(len, shares)) - min(map(len, shares)) <= batch // world
    shares = [list(even_share(samples, rank, world)) for rank in range(world)]
    assert [row for share in shares for row in share] == list(range(samples))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize("samples", [40, 43, 46])
@pytest.mark.parametrize(("micro", "world"), [(1, 1), (4, 1), (1, 2), (2, 2), (4, 2), (2, 4), (1, 8)])
def test_steps_do_not_depend_on_microbatch_or_world_size(micro, world, samples):
    reference = MicrobatchSampler(samples, 8, 8, seed=5)
    ranks = [MicrobatchSampler(samples, 8, micro, 5, rank, world) for rank in range(world)]
    for _ in range(3):
        assert steps_of_an_epoch(ranks) == list(reference)


def test_every_epoch_is_full_steps_of_a_new_permutation():
    sampler = MicrobatchSampler(43, 8, 2, seed=0)
    epochs = [[row for rows in sampler for row in rows] for _ in range(3)]
    for epoch in epochs:
        assert len(epoch) == 40
        assert len(set(epoch)) == 40
        assert set(epoch) <= set(range(43))
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert set(epochs[0]) != set(epochs[1])  # the rows left out change


def test_rows_meet_others_in_each_epoch():
    sampler = MicrobatchSampler(64, 4, 4, seed=0)
    steps = [frozenset(rows) for _ in range(4) for rows in sampler]
    assert len(set(steps)) == len(steps)


def test_deterministic_by_seed():
    def two_epochs(seed: int) -> list[list[int]]:
        sampler = MicrobatchSampler(16, 4, 4, seed)
        return [*sampler, *sampler]

    assert two_epochs(1) == two_epochs(1)
    assert two_epochs(1) != two_epochs(2)
    # Neither sum nor product of seed and epoch: seed 1 at epoch 0 is not seed 0 at epoch 1.
    assert two_epochs(1)[:4] != two_epochs(0)[4:]


def test_an_iterator_that_is_never_read_is_no_epoch():
    sampler, other = MicrobatchSampler(16, 4, 4, 0), MicrobatchSampler(16, 4, 4, 0)
    iter(sampler)
    assert list(sampler) == list(other)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("micro", [1, 2, 4])
@pytest.mark.parametrize("samples", [4, 5, 7, 8, 10, 33])
def test_validation_takes_every_row_once_in_even_shares(samples, micro, world):
    samplers = [MicrobatchSampler(samples, 24, micro, 0, rank, world, shuffle=False) for rank in range(world)]
    ranks = [global_rows(sampler) for sampler in samplers]
    assert [row for microbatches in ranks for rows in microbatches for row in rows] == list(range(samples))
    assert {len(microbatches) for microbatches in ranks} == {len(samplers[0])}
    sizes = [len(rows) for microbatches in ranks for rows in microbatches]
    assert min(sizes) >= 1
    assert max(sizes) <= micro + (samples % world > 0)
    assert ranks == [global_rows(sampler) for sampler in samplers]  # the same in the next epoch


def test_nothing_to_train_or_validate_on_is_refused():
    with pytest.raises(ValueError, match=r"7 samples do not fill one batch of data\.batch_size=8"):
        MicrobatchSampler(7, 8, 8, 0)
    with pytest.raises(ValueError, match=r"data\.validation_samples: 1 samples cannot be shared by 2 devices"):
        MicrobatchSampler(1, 8, 4, 0, world_size=2, shuffle=False)
