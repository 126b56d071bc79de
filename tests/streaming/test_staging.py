"""Staging on a CPU: direct there; and its rotation of buffers on a stand-in for a stream, as late as one may be."""

from __future__ import annotations

import random
from threading import Lock

import pytest
import torch
from torch import Tensor
from toy_models import CPU

from gsq_module.streaming.activations import ActivationStore, UnitSamples
from gsq_module.streaming.staging import READ_BUFFERS, WRITE_BUFFERS, Staging

SHAPE = (23, 3, 4)


class LateEvent:
    def __init__(self, stream: LateStream, number: int) -> None:
        self.stream, self.number = stream, number

    def synchronize(self) -> None:
        self.stream.run_until(self.number)


class LateStream:
    """Copies only when their event is waited for: what is overwritten or read too early shows in the values.

    Args:
        joins: Whether the device, which is the host here, has its copy once it is told to wait for it. If not, it is so
            far behind that batches can be looked at only after the pass.
    """

    def __init__(self, joins: bool) -> None:
        self.joins = joins
        self.buffers: list[Tensor] = []
        self.queue: list[tuple[Tensor, Tensor]] = []
        self.done = 0
        self.lock = Lock()  # the thread that gathers waits for copies too

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        self.buffers.append(torch.empty(shape, dtype=dtype))
        return self.buffers[-1]

    def copy(self, pairs) -> LateEvent:
        self.queue += pairs
        return LateEvent(self, len(self.queue))

    def join(self, event: LateEvent) -> None:
        if self.joins:
            self.run_until(event.number)

    def run_until(self, number: int) -> None:
        with self.lock:
            for destination, source in self.queue[self.done : number]:
                destination.copy_(source)
            self.done = max(self.done, number)


class LateStaging(Staging):
    """Sends everything through buffers, though the device is the CPU."""

    def __init__(self, joins: bool = True) -> None:
        super().__init__(CPU, pin_memory=False)
        self.joins = joins
        self.streams: list[LateStream] = []

    def stages(self, tensor: Tensor) -> bool:
        return True

    def side_stream(self):
        self.streams.append(LateStream(self.joins))
        return self.streams[-1]


class PinnedStaging(Staging):
    """As on CUDA, up to the first buffer."""

    def stages(self, tensor: Tensor) -> bool:
        return True

    def side_stream(self):
        raise RuntimeError("CUDA error: invalid argument")


def values(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(SHAPE[0] * 12).view(SHAPE).to(dtype)


def slices(size: int) -> list[slice]:
    return [slice(first, min(first + size, SHAPE[0])) for first in range(0, SHAPE[0], size)]


def shuffled(size: int) -> list[list[int]]:
    """Rows in random order; the batches differ in size, and the largest is not the first."""
    rows = random.Random(0).sample(range(SHAPE[0]), SHAPE[0])
    return [rows[:1], *(rows[first : first + size] for first in range(1, SHAPE[0], size))]


def test_on_the_cpu_everything_is_direct():
    staging = Staging(CPU)
    source = values()
    views = [hidden.data_ptr() for _, (hidden,) in staging.read([source], slices(5))]
    assert views == [source[rows].data_ptr() for rows in slices(5)], "a slice is copied"
    for rows, (hidden,) in staging.read([source], shuffled(5)):
        assert torch.equal(hidden, source[rows])
    with staging.writer() as writer:
        writer.write(source, slice(0, 2), torch.zeros(2, 3, 4))
        assert not source[:2].any(), "it waits for something"


def test_without_staging_a_batch_is_read_when_it_is_asked_for():
    asked = []

    def order():
        for rows in slices(5):
            asked.append(rows)
            yield rows

    reading = Staging(CPU).read([values()], order())
    next(reading)
    assert asked == slices(5)[:1]


@pytest.mark.parametrize("batches", [slices(5), slices(23), slices(100), shuffled(4), [], [[7]]], ids=len)
def test_batches_are_those_of_a_plain_read(batches):
    staging = LateStaging()
    sources = [values(), values(torch.bfloat16) + 1, values()[:, :, 0]]
    seen = [(rows, [tensor.clone() for tensor in tensors]) for rows, tensors in staging.read(sources, batches)]
    assert [rows for rows, _ in seen] == list(batches)
    for rows, tensors in seen:
        for tensor, source in zip(tensors, sources, strict=True):
            assert tensor.dtype == source.dtype
            assert torch.equal(tensor, source[rows])
    assert len(staging.streams[0].buffers) <= READ_BUFFERS * len(sources)
    assert all(len(buffer) == max(map(len_of, batches)) for buffer in staging.streams[0].buffers)


def len_of(rows: slice | list[int]) -> int:
    return len(values()[rows])


def test_one_batch_is_read_ahead():
    staging = LateStaging()
    reading = staging.read([values()], slices(5))
    for number in range(5):
        next(reading)
        assert len(staging.streams[0].queue) == min(number + 2, 5)


def test_no_buffer_is_filled_again_before_it_was_copied():
    """Also where the device is still far behind; and batches that are kept stay what they were."""
    source, staging = values(), LateStaging(joins=False)
    kept = [hidden for _, (hidden,) in staging.read([source], shuffled(4))]
    for hidden, rows in zip(kept, shuffled(4), strict=True):
        assert torch.equal(hidden, source[rows])


def test_a_pass_that_is_left_early_waits_for_its_copies():
    staging = LateStaging()
    reading = staging.read([values()], slices(5))
    next(reading)
    reading.close()
    assert staging.streams[0].done == len(staging.streams[0].queue) == 2


@pytest.mark.parametrize("size", [1, 3, 5, 23])
def test_in_place_pass_over_one_store(size):
    """Propagation: each batch is read, changed, and written where it was."""
    staging, store = LateStaging(), values()
    with staging.writer() as writer:
        for rows, (hidden,) in staging.read([store], slices(size)):
            writer.write(store, rows, hidden * 2 + 1)
    assert torch.equal(store, values() * 2 + 1)


def test_writes_to_several_stores_of_other_dtypes_and_shapes():
    staging = LateStaging()
    stores = [torch.zeros(SHAPE), torch.zeros(SHAPE, dtype=torch.bfloat16), torch.zeros(SHAPE[:2], dtype=torch.float64)]
    source = values() + 0.123
    with staging.writer() as writer:
        for rows in slices(5):
            writer.write(stores[2], rows, source[rows, :, 0])
            writer.write(stores[0], rows, source[rows].transpose(0, 1).contiguous().transpose(0, 1))
            writer.write(stores[1], rows, source[rows])
    assert torch.equal(stores[0], source)
    assert torch.equal(stores[1], source.bfloat16()), "rounded once, to nearest"
    assert torch.equal(stores[2], source[:, :, 0].double())
    sizes = [buffer.nbytes for buffer in staging.streams[0].buffers]
    assert len(sizes) <= 2 * WRITE_BUFFERS, "small ones are replaced once by large ones"
    assert max(sizes) == 5 * 12 * 4


def test_writes_land_a_few_batches_later_and_in_their_order():
    staging, store = LateStaging(), torch.zeros(SHAPE)
    with staging.writer() as writer:
        for number in range(1, 7):
            writer.write(store, slice(0, 2), torch.full((2, 3, 4), float(number)))
            assert store[0, 0, 0] == max(0, number - WRITE_BUFFERS)
    assert store[0, 0, 0] == 6


def test_writes_before_an_exception_are_not_lost():
    staging, store = LateStaging(), torch.zeros(SHAPE)
    with pytest.raises(KeyError, match="first"):
        write_and_fail(staging, store)
    assert torch.equal(store[:10], values()[:10])


def test_an_error_while_writes_are_flushed_is_raised(monkeypatch):
    staging, store = LateStaging(), torch.zeros(SHAPE)
    monkeypatch.setattr(LateStream, "run_until", broken)
    with pytest.raises(RuntimeError, match="device is gone"), staging.writer() as writer:
        writer.write(store, slice(0, 5), values()[:5])


def test_the_first_error_stays_the_error(monkeypatch, caplog):
    """After an error of the driver every later call fails too, and that says nothing."""
    staging, store = LateStaging(), torch.zeros(SHAPE)
    monkeypatch.setattr(LateStream, "run_until", broken)
    with pytest.raises(KeyError, match="first"):
        write_and_fail(staging, store)
    assert "device is gone" in caplog.text


def write_and_fail(staging: Staging, store: Tensor) -> None:
    with staging.writer() as writer:
        for rows in slices(5)[:2]:
            writer.write(store, rows, values()[rows])
        raise KeyError("first")


def broken(*args) -> None:
    raise RuntimeError("device is gone")


def test_an_error_of_pinning_is_raised_as_it_is():
    """Case 12: the out-of-memory report tells it from its text."""
    staging = PinnedStaging(CPU)
    text = "^CUDA error: invalid argument$"
    with pytest.raises(RuntimeError, match=text):
        next(staging.read([values()], slices(5)))
    with pytest.raises(RuntimeError, match=text), staging.writer() as writer:
        writer.write(torch.zeros(SHAPE), slice(0, 5), values()[:5])


def test_loaders_read_unit_samples_through_buffers(tmp_path):
    staging = LateStaging()
    stores = [ActivationStore(SHAPE, torch.float32, "memory", CPU, tmp_path / "unused") for _ in range(2)]
    for number, store in enumerate(stores):
        store.write(slice(0, 23), values() + number)
    found = list(UnitSamples(stores, range(10, 20), staging).batches(iter([[9, 0], [3, 4], [5, 1]])))
    for (given, wanted), rows in zip(found, ([19, 10], [13, 14], [15, 11]), strict=True):
        assert torch.equal(given, values()[rows])
        assert torch.equal(wanted, values()[rows] + 1)
    assert len(staging.streams) == 1
