"""Seconds and peak memory of a call, and the record they end up in."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

import torch

from gsq_module.memory.statistics import GIB

FEWEST, MOST = 3, 1000
"""Repetitions of a measured call."""


@dataclass(frozen=True)
class Figure:
    """One measured or computed number."""

    value: float
    unit: str

    def __str__(self) -> str:
        # Three digits and no exponents: 16,234 and 1,234 and 123 and 12.3 and 1.23 and 0.0123
        decimals = 0 if self.value >= 100 else 1 if self.value >= 10 else 2
        text = f"{self.value:,.{decimals}f}" if self.value >= 1 else f"{self.value:.3g}"
        return f"{text} {self.unit}"


@dataclass
class Row:
    """One line of the table.

    Attributes:
        part: What `--only` calls it.
        name: Of the measurement, unique in its part.
        figures: By name: `time`, `peak`, `ratio_to_floor` have columns of their own.
        notes: What a figure cannot say.
        skipped: Why it was not measured.
        failed: The error that stopped it.
    """

    part: str
    name: str
    figures: dict[str, Figure] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    skipped: str | None = None
    failed: str | None = None


class SkippedError(Exception):
    """A measurement that makes no sense here; the text says why."""


Measurements = Iterator[tuple[str, Callable[[Row], None]]]
"""Names of a part's rows, and what fills them."""


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(call: Callable[[], object], device: torch.device, budget: float) -> float:
    """Median seconds of a call on the device.

    Args:
        call: Called once unmeasured (kernels are compiled, the allocator's cache fills), then measured.
        device: On CUDA the time between events on its stream counts, otherwise the clock's.
        budget: Seconds the repetitions may take together; there are at least three.
    """
    call()
    if device.type != "cuda":
        marks = [time.perf_counter()]
        while len(marks) <= FEWEST or (marks[-1] - marks[0] < budget and len(marks) <= MOST):
            call()
            marks.append(time.perf_counter())
        return median(end - start for start, end in pairwise(marks))
    synchronize(device)
    began = time.perf_counter()
    call()
    synchronize(device)
    repeats = min(max(round(budget / (time.perf_counter() - began)), FEWEST), MOST)
    # Nothing waits between the calls: the device is as busy as in a fit.
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    synchronize(device)
    return median(start.elapsed_time(end) for start, end in pairwise(events)) / 1000


class PeakMemory:
    """Highest bytes that tensors held on a CUDA device since it was made; `None` elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.before = 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.before = torch.cuda.memory_allocated(device)

    @property
    def bytes(self) -> int | None:
        return torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else None

    def note(self, row: Row) -> None:
        if self.bytes is not None:
            row.figures["peak"] = Figure(self.bytes / GIB, "GiB")


def free_memory(device: torch.device) -> None:
    """Give a CUDA device's memory back where nothing refers to it any more."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def milliseconds(seconds: float) -> Figure:
    return Figure(seconds * 1e3, "ms")
