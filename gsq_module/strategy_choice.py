"""What `trainer.strategy: auto` means on several GPUs: the strategy that the memory plan says fits best."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence

import torch
from lightning.fabric.plugins.environments import (
    LSFEnvironment,
    MPIEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from lightning.pytorch.accelerators import CUDAAccelerator

from gsq_module import ranks
from gsq_module.memory.doctor import nvidia_smi
from gsq_module.memory.plan import MemoryPlan
from gsq_module.memory.statistics import format_bytes

log = logging.getLogger(__name__)

CHOICE = "GSQ_STRATEGY"
"""Environment variable by which the first process tells those it starts what it has chosen."""
COMFORT = 0.8
"""The part of the free memory that `ddp` may need where it is preferred: it neither splits nor gathers weights, but a
run that is short of memory after hours has gained nothing by that."""
LAUNCHERS = (TorchElasticEnvironment, SLURMEnvironment, LSFEnvironment, MPIEnvironment)
"""Of Lightning's environments, those in which every process is started from outside, torchrun's first."""


def cuda_devices(accelerator: object, devices: object) -> list[int]:
    """Numbers of the GPUs that a Trainer with these arguments would use on this machine; empty for another accelerator.

    Raises:
        MisconfigurationException: There are no such GPUs.
    """
    if accelerator not in ("auto", "gpu", "cuda") or not CUDAAccelerator.is_available():
        return []
    chosen = CUDAAccelerator.auto_device_count() if devices == "auto" else devices
    return CUDAAccelerator.parse_devices(chosen) or []  # type: ignore[arg-type]


def free_bytes(devices: Sequence[int]) -> int:
    """Least free memory of several GPUs, in bytes.

    nvidia-smi is asked: torch would start CUDA on each of them, and its context would stay there beside the rank's own.

    Raises:
        OSError: There is no nvidia-smi, or it fails.
        KeyError: It does not know one of them.
    """
    known = dict(nvidia_smi("gpu=uuid,memory.free"))
    return min(int(known[f"GPU-{torch.cuda.get_device_properties(device).uuid}"]) for device in devices) * 2**20


def by_plan(ddp: MemoryPlan, free: int) -> tuple[str, str]:
    """The strategy for a device with so much free memory, and why.

    Args:
        ddp: The plan for `ddp`.
        free: In bytes, of the device that has least.
    """
    sharded = ddp.changed(strategy="sharded")
    needed, other, there = (format_bytes(size) for size in (ddp.needed, sharded.needed, free))
    if ddp.needed <= COMFORT * free:
        return "ddp", f"it needs {needed} of {there} free, and sends least"
    if ddp.needed <= sharded.needed:
        return "ddp", f"it needs {needed} of {there} free, and sharded would need {other}"
    return "sharded", f"it needs {other} of {there} free; ddp would need {needed}"


def choose(devices: Sequence[int], nodes: int, make_plan: Callable[[int], MemoryPlan]) -> str:
    """Decide before processes are started, and so that all of them come to the same.

    Processes that know nothing of each other yet would read different amounts of free memory, and a collective between
    different strategies never ends: where another launcher has started them, it is `sharded`, which needs least.

    Args:
        devices: Numbers of this machine's GPUs.
        nodes: Machines of the run.
        make_plan: Of free bytes, the plan for `ddp`.

    Returns:
        `ddp` or `sharded`.
    """
    told = os.environ.get(CHOICE)
    if told is not None and ranks.is_launched():
        return told
    if nodes > 1 or any(environment.detect() for environment in LAUNCHERS):
        name, why = "sharded", "it needs least; processes that are started apart do not compare memory"
    else:
        try:
            free = free_bytes(devices)
            name, why = by_plan(make_plan(free), free)
        except Exception as error:
            # What is wrong with the recipe, the checks say that come next.
            log.debug("no plan to choose a strategy by", exc_info=True)
            name, why = "sharded", f"it needs least; no memory plan can be made ({type(error).__name__})"
    os.environ[CHOICE] = name
    if ranks.is_first():
        print(f"trainer.strategy=auto: {name}, for {why}", flush=True)
    return name
