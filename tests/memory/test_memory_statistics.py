from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from gsq_module.memory.statistics import DeviceMemory, format_bytes, host_peak_bytes, read_device_memory


def test_cpu_has_no_device_memory():
    assert read_device_memory(torch.device("cpu")) is None


def test_device_memory_from_the_queries(monkeypatch):
    device = torch.device("cuda", 1)
    stats = {
        "allocated_bytes.all.current": 10,
        "reserved_bytes.all.current": 20,
        "allocated_bytes.all.peak": 30,
        "reserved_bytes.all.peak": 40,
        "num_alloc_retries": 2,
        "num_ooms": 1,
    }
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda asked: stats if asked == device else {})
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda asked: (300, 1000) if asked == device else (0, 0))
    assert read_device_memory(device) == DeviceMemory(
        allocated=10,
        reserved=20,
        peak_allocated=30,
        peak_reserved=40,
        device_used=700,
        device_total=1000,
        retries=2,
        ooms=1,
    )


@pytest.mark.gpu
def test_device_memory_of_a_device():
    device = torch.device("cuda", 0)
    torch.empty(1, device=device)
    before = read_device_memory(device)
    held = torch.empty(64 * 2**20, dtype=torch.uint8, device=device)
    after = read_device_memory(device)
    assert before is not None
    assert after is not None
    assert after.allocated - before.allocated == held.numel()
    assert after.allocated <= after.reserved <= after.device_used <= after.device_total
    assert after.peak_allocated >= after.allocated
    assert read_device_memory(device).allocated == after.allocated


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="compares with Linux's own figure")
def test_host_peak_is_the_peak_resident_size_in_bytes():
    status = Path("/proc/self/status").read_text()
    peak = int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024
    # At exec the kernel keeps the parent's peak where that was higher: only far above is it a mistake of units.
    assert peak * 0.99 <= host_peak_bytes() < peak * 100


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (5_701_570_560, "5.31 GiB"),
        (2**20 - 1, "1.00 MiB"),
        (3 * 2**40, "3.00 TiB"),
        (5000 * 2**40, "5000.00 TiB"),
        (-(2**30), "-1.00 GiB"),
    ],
)
def test_format_bytes(n, text):
    assert format_bytes(n) == text
