"""What `recipes/run.py doctor` tells of the machine: all that one asks first where memory or an installation fails."""

from __future__ import annotations

import platform
import re
import resource
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import torch
from huggingface_hub.constants import HF_HUB_CACHE

import gsq_module
from gsq_module.memory.allocator import setting_in_force
from gsq_module.memory.doctor_report import find_warnings
from gsq_module.memory.failure import ask
from gsq_module.storage import free_bytes

T = TypeVar("T")

PACKAGES = ("torch", "triton", "lightning", "transformers", "compressed-tensors")

PIN_TRIALS_MIB = (64, 256)


def diagnose(run_dir: str | Path) -> dict[str, Any]:
    """Everything the doctor knows, ready for JSON.

    A query that fails leaves `unavailable (reason)` in its place; sizes are in bytes, under keys that end in `_bytes`.

    Args:
        run_dir: The run directory one means to use; it need not exist.

    Returns:
        `versions`, `system`, `driver`, `gpus` (a list, or why there is none), `allocator`, `pinned_memory`, `disk` and
        `warnings` (what is likely to bite, as sentences).
    """
    # nvidia-smi first: once torch has started CUDA, its own context counts as used.
    driver = _driver()
    seen = driver["memory"]
    report: dict[str, Any] = {
        "versions": _versions(),
        "system": _system(),
        "driver": {"version": driver["version"], "gpus_seen": seen if isinstance(seen, str) else len(seen)},
        "gpus": _gpus(driver),
        "allocator": asdict(setting_in_force()),
        "pinned_memory": _pinned_memory(),
        "disk": _disk(Path(run_dir)),
    }
    report["warnings"] = find_warnings(report)
    return report


def answer(query: Callable[[], T]) -> T | str:
    """What `query` returns; where it raises, `unavailable (reason)`."""
    failures: list[str] = []
    found = ask(query, None, failures)
    return f"unavailable ({failures[0]})" if failures else found  # type: ignore[return-value]


def _versions() -> dict[str, Any]:
    versions: dict[str, Any] = {"gsq-recipes": gsq_module.__version__, "python": platform.python_version()}
    versions |= {package: answer(partial(_version_of, package)) for package in PACKAGES}
    without = None if torch.version.cuda else "unavailable (torch was built without CUDA)"
    versions["CUDA"] = without or torch.version.cuda
    versions["cuDNN"] = without or answer(lambda: str(torch.backends.cudnn.version()))
    versions["NCCL"] = without or answer(lambda: ".".join(map(str, torch.cuda.nccl.version())))
    return versions


def _version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _system() -> dict[str, Any]:
    memory = answer(lambda: dict(re.findall(r"^(\w+):\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)))

    def size(name: str) -> int | str:
        return memory if isinstance(memory, str) else answer(lambda: int(memory[name]) * 1024)

    system = {
        "platform": platform.system(),
        "kernel": platform.release(),
        "wsl2": setting_in_force().wsl,
        "host_memory_bytes": size("MemTotal"),
        "host_memory_available_bytes": size("MemAvailable"),
    }
    # Outside a container, or with cgroups of version 1, there is no such file.
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := answer(lambda: limit.read_text().strip())) != "max":
        system["container_limit_bytes"] = int(text) if text.isdigit() else text
    return system


def _driver() -> dict[str, Any]:
    """`version`; `memory` (used and free bytes by GPU) and `processes` (by GPU), by the GPUs' UUIDs."""
    memory = answer(
        lambda: {line[0]: line[1:] for line in nvidia_smi("gpu=uuid,memory.used,memory.free,driver_version")}
    )
    versions = [] if isinstance(memory, str) else [line[2] for line in memory.values()]
    return {
        "version": versions[0] if versions else answer(_driver_version_of_the_kernel),
        "memory": memory,
        "processes": answer(lambda: nvidia_smi("compute-apps=gpu_uuid,pid,used_memory,process_name")),
    }


def nvidia_smi(query: str) -> list[list[str]]:
    """Rows of `nvidia-smi --query-<query>`; the last column may hold commas."""
    command = ["nvidia-smi", f"--query-{query}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise OSError((done.stderr or done.stdout).strip() or f"nvidia-smi ended with status {done.returncode}")
    rows = [line.split(", ", query.count(",")) for line in done.stdout.splitlines() if line.strip()]
    if any(len(row) <= query.count(",") for row in rows):
        raise ValueError(f"nvidia-smi printed {done.stdout.strip()}")
    return rows


def _driver_version_of_the_kernel() -> str:
    text = Path("/proc/driver/nvidia/version").read_text()
    found = re.search(r"Kernel Module.*?\s(\d+\.\d[\d.]*)", text)
    if found is None:
        raise ValueError(text)
    return found[1]


def _gpus(driver: Mapping[str, Any]) -> list[dict[str, Any]] | str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = answer(lambda: torch.cuda.device_count() if torch.cuda.is_available() else 0)
    if isinstance(count, str):
        return count
    if not count:
        # torch says only in a warning that a driver is missing or too old.
        reason = str(caught[-1].message) if caught else "torch.cuda.is_available() is False"
        return f"unavailable ({reason if torch.version.cuda else 'torch was built without CUDA'})"
    return [_gpu(index, driver) for index in range(count)]


def _gpu(index: int, driver: Mapping[str, Any]) -> dict[str, Any]:
    properties: Any = answer(lambda: torch.cuda.get_device_properties(index))
    if isinstance(properties, str):
        return {"name": properties}
    uuid = f"GPU-{properties.uuid}"
    gpu = {
        "name": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "total_bytes": properties.total_memory,
    }
    mib = 2**20
    known = None if isinstance(driver["memory"], str) else driver["memory"].get(uuid)
    if known is not None:
        gpu["free_bytes"] = answer(lambda: int(known[1]) * mib)
        gpu["used_by_others_bytes"] = answer(lambda: int(known[0]) * mib)
    else:
        gpu["free_bytes"] = answer(lambda: torch.cuda.mem_get_info(index)[0])
        gpu["used_by_others_bytes"] = "unavailable (nvidia-smi does not know this GPU; free is less CUDA's own context)"
    if isinstance(driver["processes"], str):
        gpu["processes"] = driver["processes"]
    else:
        gpu["processes"] = [
            f"{pid} {name}: {used} MiB" for owner, pid, used, name in driver["processes"] if owner == uuid
        ]
    return gpu


def _pinned_memory() -> dict[str, Any]:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    pinned: dict[str, Any] = {"ulimit_l_bytes": "unlimited" if limit == resource.RLIM_INFINITY else limit}
    for mib in PIN_TRIALS_MIB:
        pinned[f"pinning_{mib}_mib"] = answer(partial(_pin, mib))
    if setting_in_force().wsl:
        pinned["wsl2"] = "less can be pinned than the host has: a store of 7 GB failed there; pin small buffers only"
    return pinned


def _pin(mib: int) -> str:
    if not torch.cuda.is_available():
        return "unavailable (no CUDA device)"
    torch.empty(mib * 2**20, dtype=torch.uint8, pin_memory=True)
    return "works"


def _disk(run_dir: Path) -> dict[str, Any]:
    disk: dict[str, Any] = {
        "shm_total_bytes": answer(lambda: shutil.disk_usage("/dev/shm").total),
        "shm_free_bytes": answer(lambda: shutil.disk_usage("/dev/shm").free),
    }

    def add(name: str, find: Callable[[], str | Path]) -> None:
        disk[name] = answer(lambda: str(Path(find()).absolute()))
        disk[f"{name}_free_bytes"] = answer(lambda: free_bytes(Path(find())))

    add("run_dir", lambda: run_dir)
    add("temporary_files", tempfile.gettempdir)
    add("hub_cache", lambda: HF_HUB_CACHE)
    return disk
