"""What may help against an error that has to do with memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from gsq_module.memory.allocator_setting import AllocatorSetting
from gsq_module.memory.failure import DeviceState, Place, ask
from gsq_module.memory.oom import Kind, Verdict
from gsq_module.memory.statistics import format_bytes


class MemoryPlan(Protocol):
    """What the report asks of the memory plan. Stages have the names of the StageClock."""

    def predicted(self, stage: str, block: int | None, unit: str | None) -> int | None:
        """Peak of a stage on this rank's device, in bytes; `None` where the plan does not know it."""

    def remedies(self, stage: str) -> list[tuple[str, int]]:
        """Changes of the recipe that lower a stage's peak, and the bytes each saves, in order of gain."""


@dataclass(frozen=True)
class Remedy:
    """What may help, and the bytes it saves where the plan knows them."""

    text: str
    saves_bytes: int | None = None


def find_remedies(
    verdict: Verdict, place: Place, state: DeviceState, setting: AllocatorSetting | None, plan: MemoryPlan | None
) -> tuple[Remedy, ...]:
    """What may help against an error: the allocator's setting first, then the plan's changes of the recipe by gain.

    Without a plan, or where it names nothing, the changes that fit the class alone.
    """
    if verdict.kind not in _DEVICE_KINDS:
        return tuple(Remedy(text) for text in _OTHER_REMEDIES.get(verdict.kind, ()))
    remedies = [Remedy(text) for text in _of_setting(verdict, state, setting)]
    planned: list[tuple[str, int]] = []
    if plan is not None and (stage := place.stage) is not None:
        planned = ask(lambda: plan.remedies(stage), planned)
    if planned:
        remedies += [Remedy(text, saves) for text, saves in sorted(planned, key=lambda pair: -pair[1])]
    else:
        remedies += [Remedy(text) for text in _of_stage(place)]
    if verdict.kind in _NCCL_KINDS:
        # It says what failed, which the error does not.
        remedies.insert(0, Remedy("NCCL_DEBUG=WARN before the command: NCCL then says what failed, on which rank"))
        remedies.insert(1, Remedy("--nccl.max_ctas 4 --nccl.buffsize 1048576: smaller buffers of NCCL's, slower"))
    return tuple(remedies)


_NCCL_KINDS = (Kind.NCCL_MEMORY, Kind.NCCL_MEMORY_SUSPECTED)
_DEVICE_KINDS = (Kind.DEVICE_MEMORY, Kind.DEVICE_MEMORY_SUSPECTED, *_NCCL_KINDS)

_OTHER_REMEDIES: dict[Kind, tuple[str, ...]] = {
    Kind.PINNED_MEMORY: (
        "--data.pin_memory false: copies go through ordinary memory, the result is the same; WSL2 limits pinned memory",
    ),
    Kind.HOST_MEMORY: (
        "--model.store disk: hidden states in files of the run directory, the result is the same",
        "--data.train_samples N with a smaller N: fewer hidden states, another result",
    ),
    Kind.KERNEL_CONFIGURATION: (
        "--model.kernels eager: plain torch, far slower, which needs no such kernel; the result is the same",
    ),
    Kind.NUMERICAL: (
        "--model.dtype bfloat16 or float32, where the model computes in float16",
        "--model.damping X with a larger X, where it is GPTQ that fails",
    ),
    Kind.DRIVER_FAULT: (
        "CUDA_LAUNCH_BLOCKING=1 before the command: the traceback then ends where the failure began",
        "dmesg | grep -i xid: what the driver itself has noted",
    ),
}


def _of_setting(verdict: Verdict, state: DeviceState, setting: AllocatorSetting | None) -> list[str]:
    if setting is None:
        return []
    # Where both names are set torch reads the older one alone: advice on the other would do nothing.
    older = "PYTORCH_CUDA_ALLOC_CONF"
    name = older if older in setting.origin else "PYTORCH_ALLOC_CONF"
    if setting.expandable_segments:
        if verdict.kind is Kind.DEVICE_MEMORY_SUSPECTED:
            return [f"{name}=expandable_segments:False before the command: a full device is then called by its name"]
        return []
    if verdict.kind is not Kind.DEVICE_MEMORY or setting.wsl or state.reserved is None or state.allocated is None:
        return []
    unused = state.reserved - state.allocated
    if verdict.asked_bytes is None or unused < verdict.asked_bytes:
        return []
    return [
        f"{name}=expandable_segments:True before the command: {format_bytes(unused)} are reserved and unused, but "
        "in pieces too small"
    ]


def _of_stage(place: Place) -> list[str]:
    store = "--model.store memory: hidden states in host memory instead of on the device; the result is the same"
    others = "Other programs on this device need memory too: nvidia-smi lists them"
    if place.stage in _WITHOUT_BATCHES:
        return [store, others]
    key = "forward_batch_size" if place.stage in _FORWARD else "microbatch_size"
    smaller = f"--data.{key} N with a smaller N, down to 1: the same result up to rounding; the run resumes with it"
    return [smaller, store, others]


_WITHOUT_BATCHES = ("embedding", "initialize", "export")
"""Stages that hold no batch."""
_FORWARD = ("embed", "original", "capture", "propagate", "head", "evaluate")
"""Stages whose batches are those outside refinement."""
