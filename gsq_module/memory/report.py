"""The report of an error that has to do with memory: what was known when it was met, for people and as JSON.

Every query may fail, as all do after a driver error: what it asked for is then unavailable. Nothing here allocates on
the device, waits for it, or talks to other ranks.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from gsq_module.atomic import write_atomically
from gsq_module.memory.allocator_setting import AllocatorSetting
from gsq_module.memory.oom import Kind, Verdict, without_impossible
from gsq_module.memory.statistics import format_bytes, host_peak_bytes

T = TypeVar("T")
Otherwise = TypeVar("Otherwise")

MESSAGE_LENGTH = 600
"""Characters of an error's message that the report for people shows; the JSON has all."""


class MemoryPlan(Protocol):
    """What the report asks of the memory plan. Stages have the names of the StageClock."""

    def predicted(self, stage: str, block: int | None, unit: str | None) -> int | None:
        """Peak of a stage on this rank's device, in bytes; `None` where the plan does not know it."""

    def remedies(self, stage: str) -> list[tuple[str, int]]:
        """Changes of the recipe that lower a stage's peak, and the bytes each saves, in order of gain."""


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


@dataclass(frozen=True)
class Remedy:
    """What may help, and the bytes it saves where the plan knows them."""

    text: str
    saves_bytes: int | None = None


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
        "Without the package triton (pip uninstall triton) the eager path is taken, which needs no such kernel",
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
    if place.stage in _INDEPENDENT_OF_MICROBATCH:
        return [store, others]
    return [
        "--data.microbatch_size N with a smaller N, down to 1: the same result up to rounding; the run resumes with it",
        store,
        others,
    ]


_INDEPENDENT_OF_MICROBATCH = ("initialize", "export")
"""Stages that hold no microbatch."""


@dataclass(frozen=True)
class MemoryReport:
    """All that is known of one error.

    Args:
        verdict: What it is.
        place: Where it was met.
        state: The device's memory then.
        setting: The allocator's setting in force.
        predicted: The plan's peak of the stage, in bytes; `None` without a plan.
        remedies: What may help, most promising first.
        chain: The error and what caused it, as Python prints them.
        host_peak: Highest resident set size of the process so far, in bytes.
        seconds_since_epoch: When.
    """

    verdict: Verdict
    place: Place
    state: DeviceState
    setting: AllocatorSetting | None
    predicted: int | None
    remedies: tuple[Remedy, ...]
    chain: str
    host_peak: int | None
    seconds_since_epoch: float

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON; sizes are in bytes, what is unknown is null."""
        verdict, place = self.verdict, asdict(self.place)
        place["device"] = str(self.place.device)
        return {
            "class": verdict.kind.name.lower(),
            "title": verdict.kind.title,
            "exit_code": verdict.kind.exit_code,
            "reason": verdict.reason,
            "error": {"type": verdict.error_type, "message": verdict.message},
            "asked_bytes": verdict.asked_bytes,
            "asked": verdict.asked,
            **place,
            "memory": {**asdict(self.state), "others": self.state.others},
            "host_peak_bytes": self.host_peak,
            "predicted_bytes": self.predicted,
            "allocator": None if self.setting is None else asdict(self.setting),
            "remedies": [asdict(remedy) for remedy in self.remedies],
            "traceback": self.chain,
            "seconds_since_epoch": self.seconds_since_epoch,
        }

    def write(self, directory: Path) -> Path:
        """Write `rank<N>.json` into a folder, whole or not at all."""
        path = directory / f"rank{self.place.rank}.json"
        write_atomically(path, json.dumps(self.as_dict(), indent=1).encode())
        return path

    def text(self) -> str:
        """For people."""
        verdict, place = self.verdict, self.place
        message = without_impossible(verdict.message).strip()
        if len(message) > MESSAGE_LENGTH:
            message = f"{message[:MESSAGE_LENGTH]} ..."
        rows = [
            ("error", f"{verdict.error_type}: {message}"),
            ("asked for", verdict.asked),
            ("where", self._where()),
            ("device", str(place.device)),
            *self._device_rows(),
            ("predicted", "no plan" if self.predicted is None else f"{_size(self.predicted)} at the stage's peak"),
            ("allocator", self._allocator()),
            ("host", f"{_size(self.host_peak)} at this process's peak"),
        ]
        lines = [
            "",
            f"== memory report, rank {place.rank} of {place.world_size}: {verdict.kind.title} ==",
            verdict.reason[:1].upper() + verdict.reason[1:],
            *(f"  {name:<12}{value}" for name, value in rows),
        ]
        if self.remedies:
            lines.append("What may help, most promising first:")
        for number, remedy in enumerate(self.remedies, 1):
            saves = "" if remedy.saves_bytes is None else f" (saves {_size(remedy.saves_bytes)})"
            lines.append(f"  {number}. {remedy.text}{saves}")
        return "\n".join(lines)

    def _where(self) -> str:
        place = self.place
        words = [f"stage {place.stage}" if place.stage else f"after stage {place.after}" if place.after else "no stage"]
        words += [
            f"{n} {v}" for n, v in (("block", place.block), ("unit", place.unit), ("step", place.step)) if v is not None
        ]
        if place.batch:
            words.append(f"microbatch {', '.join(place.batch)}")
        return ", ".join(words)

    def _device_rows(self) -> list[tuple[str, str]]:
        state = self.state
        if state == DeviceState(note=state.note):
            return [("memory", state.note or "unavailable")]
        return [
            ("allocated", f"{_size(state.allocated)} now, {_size(state.peak_allocated)} at the stage's peak"),
            ("reserved", f"{_size(state.reserved)}; allocations tried again after a flush: {_count(state.retries)}"),
            ("free", f"{_size(state.free)} of {_size(state.total)}"),
            ("others", f"{_size(state.others)} (CUDA context, NCCL, other processes)"),
            *([("", state.note)] if state.note else []),
        ]

    def _allocator(self) -> str:
        setting = self.setting
        if setting is None:
            return "unavailable"
        return f"{setting.text or 'not set'} ({setting.origin}); WSL2: {'yes' if setting.wsl else 'no'}"


def _size(size: int | None) -> str:
    return "unavailable" if size is None else format_bytes(size)


def _count(count: int | None) -> str:
    return "unavailable" if count is None else str(count)


def build_report(
    error: BaseException,
    verdict: Verdict,
    place: Place,
    state: DeviceState,
    setting: AllocatorSetting | None = None,
    plan: MemoryPlan | None = None,
) -> MemoryReport:
    """Gather what is left to ask.

    Args:
        error: As it was raised; the verdict may be on a cause of it.
        verdict: On it.
        place: Where it was met.
        state: The device's memory, read before the verdict.
        setting: The allocator's setting in force.
        plan: The memory plan.
    """
    stage = place.stage
    predicted = None
    if plan is not None and stage is not None:
        predicted = ask(lambda: plan.predicted(stage, place.block, place.unit), None)
    chain = ask(lambda: "".join(traceback.format_exception(type(error), error, error.__traceback__)), repr(error))
    return MemoryReport(
        verdict=verdict,
        place=place,
        state=state,
        setting=setting,
        predicted=predicted,
        remedies=find_remedies(verdict, place, state, setting, plan),
        chain=chain,
        host_peak=ask(host_peak_bytes, None),
        seconds_since_epoch=time.time(),
    )
