"""Batches on their way between host memory and the device, through a few small buffers, while the device computes.

Hidden states of a calibration set are larger than what a host can pin (WSL2 limits it), and a copy to or from memory
that is not pinned waits for the device. So batches are gathered in a few pinned buffers, which a side stream copies.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

READ_BUFFERS = 2
"""One is filled, by a thread of its own, while the other is copied to the device. Each holds a batch."""
WRITE_BUFFERS = 3
"""For a pass that writes two tensors a batch: both of this batch, and one of the last, on its way into its store."""

Rows = TypeVar("Rows", bound="slice | list[int]")


class SideStream:
    """A CUDA stream that copies beside the one that computes. All of this file's CUDA calls are here.

    Args:
        device: The device.
        pin_memory: Whether buffers are pinned. Copies through others are right too, but they wait for the device.
    """

    def __init__(self, device: torch.device, pin_memory: bool) -> None:
        self._device, self._pin_memory = device, pin_memory
        with torch.cuda.device(device):
            self._compute = torch.cuda.current_stream()
            self._stream = torch.cuda.Stream()

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor in host memory. PyTorch keeps pinned memory that is dropped, and gives it out again."""
        with torch.cuda.device(self._device):  # pinning on the default one would start CUDA there
            return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=self._pin_memory)

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> Any:
        """Copy each (destination, source); return the event of it. Until that is done, neither may be dropped."""
        # A source must have been computed; a destination's memory may have belonged to a tensor still in use.
        self._stream.wait_stream(self._compute)
        with torch.cuda.stream(self._stream):
            for destination, source in pairs:
                destination.copy_(source, non_blocking=True)
            return self._stream.record_event()

    def join(self, event: Any) -> None:
        """What is computed from now on comes after the event."""
        self._compute.wait_event(event)


@contextmanager
def _at_end(action: Callable[[], None]) -> Iterator[None]:
    """Run `action` at the end. Beside an exception that is under way, one of `action` is only logged."""
    try:
        yield
    except BaseException:
        try:
            action()
        except Exception:
            logger.warning("a second error while copies were waited for after the first:", exc_info=True)
        raise
    action()


class Staging:
    """Moves batches between tensors in host memory and the device that computes.

    Tensors that are on the device already are read and written directly, and so is everything where there is no CUDA.
    Nothing is caught here: an error of pinning ("CUDA error: invalid argument") is raised as it is.

    Args:
        device: The device that computes.
        pin_memory: Whether buffers in host memory are pinned.
    """

    def __init__(self, device: torch.device, pin_memory: bool = True) -> None:
        self.device = device
        self.pin_memory = pin_memory

    def stages(self, tensor: Tensor) -> bool:
        """Whether rows of this tensor go through buffers."""
        return self.device.type == "cuda" and tensor.device.type == "cpu"

    def side_stream(self) -> SideStream:
        return SideStream(self.device, self.pin_memory)

    def read(self, sources: Sequence[Tensor], batches: Iterable[Rows]) -> Iterator[tuple[Rows, tuple[Tensor, ...]]]:
        """Batches on the device, in the dtypes of the sources.

        With staging the next batch is copied to the device and the one behind it gathered, by a thread, while the
        caller's work on this one runs: two batches are on the device beside what the caller keeps. Rows of a batch may
        be overwritten while the pass goes on, but only after that batch was yielded.

        Args:
            sources: Tensors in one place, whose first dimension is the samples.
            batches: Rows of each batch: a slice, or indices in any order.

        Yields:
            The rows, and those of each source; without staging, a slice is a view of its source.
        """
        if self.stages(sources[0]):
            yield from self._read_staged(sources, list(batches))
            return
        for rows in batches:
            yield rows, tuple(_gather(source, rows).to(self.device) for source in sources)

    def _read_staged(self, sources: Sequence[Tensor], batches: list[Rows]) -> Iterator[tuple[Rows, tuple[Tensor, ...]]]:
        stream = self.side_stream()
        largest = max((_count(rows, len(sources[0])) for rows in batches), default=0)
        slots = [
            _ReadSlot([stream.buffer((largest, *source.shape[1:]), source.dtype) for source in sources])
            for _ in range(min(READ_BUFFERS, len(batches)))
        ]

        def settle() -> None:
            for slot in slots:
                slot.wait()

        def gather(number: int) -> list[Tensor]:
            slot = slots[number % len(slots)]
            slot.wait()
            parts = [buffer[: _count(batches[number], len(sources[0]))] for buffer in slot.buffers]
            for source, part in zip(sources, parts, strict=True):
                _gather(source, batches[number], out=part)
            return parts

        ahead: tuple[Rows, tuple[Tensor, ...], Any] | None = None
        # A batch that nobody asks for may be dropped only when the copy into it has ended.
        with _at_end(settle), ThreadPoolExecutor(1, "gather") as thread:
            gathering = thread.submit(gather, 0) if batches else None
            for number, rows in enumerate(batches):
                assert gathering is not None
                parts = gathering.result()
                # All of them before the first copy: should memory run out here, none is under way.
                tensors = tuple(torch.empty(part.shape, dtype=part.dtype, device=self.device) for part in parts)
                event = slots[number % len(slots)].event = stream.copy(zip(tensors, parts, strict=True))
                gathering = thread.submit(gather, number + 1) if number + 1 < len(batches) else None
                if ahead is not None:
                    stream.join(ahead[2])
                    yield ahead[:2]
                ahead = rows, tensors, event
            if ahead is not None:
                stream.join(ahead[2])
                yield ahead[:2]

    @contextmanager
    def writer(self) -> Iterator[Writer]:
        """Yields a Writer; what it was given is in its place after the `with` block, also after an exception."""
        writer = Writer(self)
        with _at_end(writer.flush):
            yield writer


@dataclass
class _ReadSlot:
    """One buffer a source, and the event of the last copy out of them."""

    buffers: list[Tensor]
    event: Any = None

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()


@dataclass
class _Landing:
    """Values on their way: device -> buffer -> rows of the destination."""

    destination: Tensor
    rows: slice
    buffer: Tensor
    event: Any
    values: Tensor = field(repr=False)
    """Kept until the copy has ended, so that nothing else is put in their place."""


class Writer:
    """Writes batches from the device to host memory; made by `Staging.writer`.

    With staging a batch leaves the device while the caller goes on; it reaches its place a few writes later, or at
    `flush`. Up to `WRITE_BUFFERS` batches of values stay on the device until then.
    """

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self._stream: SideStream | None = None
        self._under_way: deque[_Landing] = deque()
        self._free: list[Tensor] = []

    def write(self, destination: Tensor, rows: slice, values: Tensor) -> None:
        """Put samples in their place, rounded to the destination's dtype.

        Args:
            destination: Tensor whose first dimension is the samples.
            rows: Samples.
            values: `[len(rows), ...]` on the device; not to be changed by the caller before `flush`.
        """
        if not self._staging.stages(destination):
            destination[rows].copy_(values)
            return
        if self._stream is None:
            self._stream = self._staging.side_stream()
        values = values.to(destination.dtype).contiguous()
        if len(self._under_way) == WRITE_BUFFERS:
            self._land()
        buffer = self._free.pop() if self._free else None
        if buffer is None or buffer.nbytes < values.nbytes:
            buffer = self._stream.buffer((values.nbytes,), torch.uint8)
        event = self._stream.copy([(buffer[: values.nbytes].view(values.dtype).view(values.shape), values)])
        self._under_way.append(_Landing(destination, rows, buffer, event, values))

    def flush(self) -> None:
        """Wait until everything is in its place."""
        while self._under_way:
            self._land()

    def _land(self) -> None:
        landing = self._under_way[0]
        landing.event.synchronize()
        values = landing.values
        landing.destination[landing.rows] = landing.buffer[: values.nbytes].view(values.dtype).view(values.shape)
        self._under_way.popleft()
        self._free.append(landing.buffer)


def _gather(source: Tensor, rows: slice | list[int], out: Tensor | None = None) -> Tensor:
    """Rows of a tensor, straight into `out` where it is given; else a slice is a view."""
    if isinstance(rows, slice):
        part = source[rows]
        return part if out is None else out.copy_(part)
    # The few bytes of the indices go along with the launch: the host need not wait for the device.
    index = torch.tensor(rows).to(source.device, non_blocking=True)
    return torch.index_select(source, 0, index, out=out)


def _count(rows: slice | list[int], num_samples: int) -> int:
    return len(range(*rows.indices(num_samples))) if isinstance(rows, slice) else len(rows)
