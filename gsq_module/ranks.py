"""This process among those that share a run: all that is said between ranks outside a fit goes through here.

Where there is one process, every function does the obvious and nothing is set up. None of them is called while an
exception is under way: a rank that fails just ends, and the others end because of it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor

T = TypeVar("T")

TIMEOUT = timedelta(hours=4)
"""How long a rank waits for the others: rank 0 exports a large model alone. A rank that fails is noticed at once."""
EXIT_SECONDS = 10
"""What a failed process may take to end by itself; a communicator whose peers are gone may wait for them for long."""
LAUNCHER = "GSQ_LAUNCHER_PID"
"""Environment variable by which a process that rank 0 has started knows it."""


# --- begin and end --------------------------------------------------------------------------------------------------


def start(trainer: Trainer, module: LightningModule) -> None:
    """Start the other processes of a run, unless torchrun or SLURM has, and connect with them.

    Lightning would do this at the first fit, but samples are shared long before that. Later fits find it done.

    Args:
        trainer: Of the run.
        module: What it will fit.
    """
    if trainer.world_size == 1:
        return
    strategy = trainer.strategy
    launcher = os.environ.setdefault(LAUNCHER, str(os.getpid()))
    if strategy.launcher is not None:
        strategy.launcher.launch(lambda: None, trainer=trainer)
    if os.getppid() == int(launcher):
        threading.Thread(target=_end_with, args=(int(launcher),), daemon=True).start()
    strategy.connect(module)
    strategy.setup_environment()


def _end_with(launcher: int) -> None:
    """Rank 0 notices, by Lightning's observer, when a process it has started fails; this is the other direction."""
    while os.getppid() == launcher:
        time.sleep(0.5)
    time.sleep(EXIT_SECONDS / 2)  # for a report of this rank's own that is being written
    if dist.is_initialized():
        os._exit(1)


def finish() -> None:
    """The run has ended well: disconnect, so that the ranks may end one by one."""
    if dist.is_initialized():
        barrier()
        dist.destroy_process_group()


@contextmanager
def leaving(exit_code: Callable[[BaseException], int]) -> Iterator[None]:
    """See to it that a failed process of several ends within seconds, with its exit status, whatever its peers do."""
    try:
        yield
    except BaseException as error:
        if dist.is_initialized():
            timer = threading.Timer(EXIT_SECONDS, os._exit, (exit_code(error),))
            timer.daemon = True
            timer.start()
        raise


# --- who ------------------------------------------------------------------------------------------------------------


def rank() -> int:
    """Number of this process."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def processes_of_host() -> int:
    """Processes of the run that share this machine's memory."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))


def is_first() -> bool:
    """Whether this process writes what all share; also right before `start`."""
    return getattr(rank_zero_only, "rank", 0) == 0


# --- what is said ---------------------------------------------------------------------------------------------------


def barrier() -> None:
    """Wait for all ranks."""
    if world_size() > 1:
        dist.barrier()


def all_reduce_(tensor: Tensor, largest: bool = False) -> Tensor:
    """Replace a tensor by the sum over all ranks, or by the largest of each element; the same bits on all of them."""
    if world_size() > 1:
        dist.all_reduce(tensor, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM)
    return tensor


def gather(value: T) -> list[T]:
    """The (small, picklable) values of all ranks, in their order."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def from_first(compute: Callable[[], T]) -> T:
    """What `compute` returns on rank 0, which alone calls it, on all ranks (picklable); the others wait."""
    values: list[Any] = [compute() if rank() == 0 else None]
    if world_size() > 1:
        dist.broadcast_object_list(values)
    return values[0]


@contextmanager
def first_alone() -> Iterator[None]:
    """Rank 0 goes through the `with` block before the others, which then find what it has left on disk."""
    if rank() != 0:
        barrier()
    yield
    if rank() == 0:
        barrier()


def average_(tensor: Tensor) -> None:
    """Replace a tensor by its mean over all ranks."""
    if dist.get_backend() == "nccl":
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
    else:
        dist.all_reduce(tensor.div_(world_size()))


def average_rows_(tensor: Tensor) -> None:
    """Replace this rank's rows (`row_share`) by their mean over all ranks; the other rows are undefined then."""
    if _scatters(tensor):
        dist.reduce_scatter_tensor(tensor[row_share(len(tensor))], tensor, dist.ReduceOp.AVG)
    else:
        average_(tensor)


def gather_rows_(tensor: Tensor) -> None:
    """Fill in the rows that are the other ranks'."""
    own = tensor[row_share(len(tensor))]
    if _scatters(tensor):
        dist.all_gather_into_tensor(tensor, own)
    else:
        tensor.copy_(gather_rows(own, len(tensor)))


def _scatters(tensor: Tensor) -> bool:
    """Whether parts of a tensor can be sent in place: NCCL can, where all ranks have as many rows."""
    return dist.get_backend() == "nccl" and len(tensor) % world_size() == 0 and tensor.is_contiguous()


def row_share(rows: int) -> slice:
    """Rows of a weight that are this rank's: as many as of each other rank but the last ones, which may have none."""
    size = -(-rows // world_size())
    begin = min(rank() * size, rows)
    return slice(begin, min(begin + size, rows))


def gather_rows(part: Tensor, rows: int) -> Tensor:
    """Put a tensor together of the rows that `row_share` gives to each rank.

    Args:
        part: `[len(row_share(rows)), ...]`.
        rows: Of the whole.
    """
    if world_size() == 1:
        return part
    size = -(-rows // world_size())
    # Bytes, for not every backend sends every dtype; of equal length, for not every backend sends ragged ones.
    padded = part.new_zeros(size, *part.shape[1:])
    padded[: len(part)] = part
    whole = padded.new_empty(world_size() * size, *part.shape[1:])
    parts = list(whole.view(torch.uint8).chunk(world_size()))
    dist.all_gather(parts, padded.view(torch.uint8))
    return whole[:rows]
