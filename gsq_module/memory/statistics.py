"""What the device and the process hold right now, read without allocating anything on the device."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass

import torch

GIB = 2**30


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of one CUDA device, in bytes.

    Args:
        allocated: Held by this process's tensors.
        reserved: Held by this process's caching allocator, tensors included.
        peak_allocated: Highest `allocated` since the last `torch.cuda.reset_peak_memory_stats`.
        peak_reserved: Highest `reserved` since then.
        device_used: In use on the whole device: context, NCCL and other processes included.
        device_total: Size of the device.
        retries: Allocations that succeeded only after the allocator had flushed its cache, since the process began.
        ooms: Out-of-memory errors the allocator has thrown since the process began.
    """

    allocated: int
    reserved: int
    peak_allocated: int
    peak_reserved: int
    device_used: int
    device_total: int
    retries: int
    ooms: int

    @property
    def margin(self) -> int:
        """Least that was free on the device since the peaks were reset, if others used then what they use now."""
        return self.device_total - self.device_used - (self.peak_reserved - self.reserved)


def read_device_memory(device: torch.device) -> DeviceMemory | None:
    """Memory of `device` now; `None` where it is not a CUDA device.

    Raises:
        RuntimeError: The driver refuses the query, as it does for every query after a driver error.
    """
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    stats = torch.cuda.memory_stats(device)
    return DeviceMemory(
        allocated=stats.get("allocated_bytes.all.current", 0),
        reserved=stats.get("reserved_bytes.all.current", 0),
        peak_allocated=stats.get("allocated_bytes.all.peak", 0),
        peak_reserved=stats.get("reserved_bytes.all.peak", 0),
        device_used=total - free,
        device_total=total,
        retries=stats.get("num_alloc_retries", 0),
        ooms=stats.get("num_ooms", 0),
    )


def host_peak_bytes() -> int:
    """Highest resident set size of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts in KiB, macOS in bytes.
    return peak if sys.platform == "darwin" else peak * 1024


def format_bytes(n: float) -> str:
    """`n` bytes for people, in binary units: `'512 B'`, `'5.31 GiB'`."""
    if abs(n) < 1024:
        return f"{n:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        n /= 1024
        # 1023.996 would print as 1024.00.
        if abs(n) < 1023.995:
            return f"{n:.2f} {unit}"
    return f"{n / 1024:.2f} TiB"
