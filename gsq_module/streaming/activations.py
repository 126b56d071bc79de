"""Hidden states of the calibration samples: on the device, in host memory, or in a memory-mapped file, by size."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from gsq_module.storage import StorageError
from gsq_module.streaming.staging import Staging

Location = Literal["auto", "device", "memory", "disk"]
DEVICE_FRACTION = 0.4
"""`auto` keeps the stores on the device where all of them together take at most this part of its free memory."""
HOST_FRACTION = 0.5
"""`auto` keeps them in host memory up to this part of what is available, on disk beyond."""


def choose_location(
    location: Location, total_bytes: int, free_bytes: int | None, processes_of_host: int = 1
) -> Location:
    """Resolve `auto` for stores that take `total_bytes` together.

    Args:
        free_bytes: Free memory of the device; None where that is the CPU.
        processes_of_host: Processes that share the host's memory, each with as much to store.
    """
    if location != "auto":
        return location
    if free_bytes is not None and total_bytes <= DEVICE_FRACTION * free_bytes:
        return "device"
    host_bytes = total_bytes * processes_of_host
    return "memory" if host_bytes <= HOST_FRACTION * available_host_bytes() else "disk"


def free_device_bytes(device: torch.device) -> int | None:
    """Free memory of a CUDA device; None for another."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def available_host_bytes() -> int:
    """Host memory that can be taken without swapping, in bytes."""
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class ActivationStore:
    """A tensor, mostly `[num_samples, seq_len, hidden_size]`, that is written and read by samples.

    Args:
        shape: As above; the first dimension is the samples.
        dtype: Of the stored values.
        location: `device`, `memory` or `disk`.
        device: The device of `location="device"`.
        file: Path of the memory-mapped file of `location="disk"`; removed by `close`.

    Attributes:
        data: The whole tensor, as stored.

    Raises:
        StorageError: The disk has no room for the file.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, location: Location, device: torch.device, file: Path
    ) -> None:
        self._file: Path | None = None
        if location == "disk":
            size = math.prod(shape)
            _reserve(file, size * (torch.finfo(dtype).bits // 8))
            self._file = file
            self.data = torch.from_file(str(file), shared=True, size=size, dtype=dtype).view(shape)
        else:
            self.data = torch.empty(shape, dtype=dtype, device=device if location == "device" else "cpu")

    def __len__(self) -> int:
        return self.data.shape[0]

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    @property
    def device(self) -> torch.device:
        return self.data.device

    def write(self, rows: slice, values: Tensor) -> None:
        """Store samples, rounded to the store's dtype."""
        self.data[rows].copy_(values)

    def read(self, rows: slice | list[int], device: torch.device, dtype: torch.dtype) -> Tensor:
        """Samples on a device in a dtype."""
        return self.data[rows].to(device=device, dtype=dtype)

    def close(self) -> None:
        """Free the memory; delete the file."""
        self.data = torch.empty(0, 0, 0)
        if self._file is not None:
            self._file.unlink(missing_ok=True)


def _reserve(file: Path, nbytes: int) -> None:
    """Make a file of a size now: writing to a mapped file on a full disk would kill the process without a word."""
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(file, "wb") as opened:
            os.posix_fallocate(opened.fileno(), 0, nbytes)
    except OSError as error:
        file.unlink(missing_ok=True)
        raise StorageError(
            f"no room for hidden states: {file} needs {nbytes / 2**30:.2f} GiB ({error.strerror}). Free some, start "
            "again with --run_dir on another disk, or lower data.train_samples or data.seq_len"
        ) from error


class Stores:
    """Stores of one shape by name, opened when first asked for.

    Args:
        shape: `(num_samples, seq_len, hidden_size)`.
        dtype: Of the stored values.
        location: Of all of them, `auto` resolved.
        device: The device blocks are computed on.
        folder: Where files go; made when needed.
    """

    def __init__(
        self, shape: tuple[int, int, int], dtype: torch.dtype, location: Location, device: torch.device, folder: Path
    ) -> None:
        self._arguments = (shape, dtype, location, device)
        self._folder = folder
        self._stores: dict[str, ActivationStore] = {}

    def __getitem__(self, name: str) -> ActivationStore:
        if name not in self._stores:
            self._stores[name] = ActivationStore(*self._arguments, self._folder / f"{name}.bin")
        return self._stores[name]

    def close(self) -> None:
        """Free all of them."""
        for store in self._stores.values():
            store.close()
        self._stores.clear()


class UnitSamples:
    """What one unit is refined or measured on, a microbatch at a time.

    Args:
        sources: Stores of this rank's samples of all splits; a microbatch is the same rows of each.
        rows: Samples that belong to this split.
        staging: Brings them to the device.
        total: Samples of the split on all ranks together; None where this is the only one.
    """

    def __init__(
        self, sources: Sequence[ActivationStore], rows: range, staging: Staging, total: int | None = None
    ) -> None:
        self.sources, self.rows, self.staging = sources, rows, staging
        self.total = len(rows) if total is None else total

    def __len__(self) -> int:
        """Samples, those of all ranks together."""
        return self.total

    def batches(self, indices: Iterable[list[int]]) -> Iterator[tuple[Tensor, ...]]:
        """Microbatches on the device, in the dtypes of the sources.

        Args:
            indices: Of each microbatch, counted within this rank's rows of the split.
        """
        rows = ([self.rows[index] for index in microbatch] for microbatch in indices)
        for _, microbatch in self.staging.read([store.data for store in self.sources], rows):
            yield microbatch


def batches(num_samples: int, batch_size: int) -> Iterator[slice]:
    """Consecutive row slices."""
    for first in range(0, num_samples, batch_size):
        yield slice(first, min(first + batch_size, num_samples))
