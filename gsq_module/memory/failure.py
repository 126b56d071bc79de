"""Where an error was met, and what the device held then. Every query may fail, as all do after a driver error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

T = TypeVar("T")
Otherwise = TypeVar("Otherwise")


@dataclass(frozen=True)
class Place:
    """Where in a run an error was met.

    Args:
        rank: Of this process.
        world_size: Processes of the run.
        device: That this rank computes on.
        stage: Name of the stage, `None` between stages.
        block: Index of the block, from 0.
        unit: Name of the unit.
        step: Optimizer steps done, within a fit.
        batch: Dtype and shape of the tensors of the last microbatch, within a fit.
        after: Name of the stage before, between stages.
    """

    rank: int
    world_size: int
    device: torch.device
    stage: str | None = None
    block: int | None = None
    unit: str | None = None
    step: int | None = None
    batch: tuple[str, ...] = ()
    after: str | None = None


@dataclass(frozen=True)
class DeviceState:
    """Memory of a device in bytes, each figure `None` where its query failed.

    Args:
        allocated: Held by this process's tensors.
        reserved: Held by this process's caching allocator, tensors included.
        peak_allocated: Highest `allocated` of the stage.
        retries: Allocations that needed the allocator to flush its cache first.
        free: Free on the whole device.
        total: Size of the device.
        note: Why figures are missing; empty where none is.
    """

    allocated: int | None = None
    reserved: int | None = None
    peak_allocated: int | None = None
    retries: int | None = None
    free: int | None = None
    total: int | None = None
    note: str = ""

    @property
    def others(self) -> int | None:
        """In use outside this process's allocator: CUDA's context, NCCL and other processes."""
        if self.free is None or self.total is None or self.reserved is None:
            return None
        return self.total - self.free - self.reserved


def read_device_state(device: torch.device) -> DeviceState:
    """Memory of `device` now, each figure on its own: after a driver error some queries still answer."""
    if device.type != "cuda":
        return DeviceState(note=f"none ({device.type.upper()})")
    if not torch.cuda.is_initialized():
        # Asking would start CUDA, which allocates its context.
        return DeviceState(note="unavailable (CUDA has not started)")
    failures: list[str] = []
    free, total = ask(lambda: torch.cuda.mem_get_info(device), (None, None), failures)
    no_stats: dict[str, int] = {}
    stats = ask(lambda: torch.cuda.memory_stats(device), no_stats, failures)
    return DeviceState(
        allocated=stats.get("allocated_bytes.all.current"),
        reserved=stats.get("reserved_bytes.all.current"),
        peak_allocated=stats.get("allocated_bytes.all.peak"),
        retries=stats.get("num_alloc_retries"),
        free=free,
        total=total,
        note=f"unavailable ({failures[0]})" if failures else "",
    )


def ask(query: Callable[[], T], otherwise: Otherwise, failures: list[str] | None = None) -> T | Otherwise:
    """The answer of a query, `otherwise` where it raises; the first line of its error is added to `failures`."""
    try:
        return query()
    except Exception as error:
        if failures is not None:
            failures.append(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
        return otherwise
