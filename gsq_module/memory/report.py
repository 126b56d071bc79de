"""The report of an error that has to do with memory: what was known when it was met, for people and as JSON.

Every query may fail, as all do after a driver error: what it asked for is then unavailable. Nothing here allocates on
the device, waits for it, or talks to other ranks.
"""

from __future__ import annotations

import json
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gsq_module.atomic import write_atomically
from gsq_module.memory.allocator_setting import AllocatorSetting
from gsq_module.memory.failure import DeviceState, Place, ask
from gsq_module.memory.oom import Verdict, without_impossible
from gsq_module.memory.remedies import MemoryPlan, Remedy, find_remedies
from gsq_module.memory.statistics import format_bytes, host_peak_bytes

MESSAGE_LENGTH = 600
"""Characters of an error's message that the report for people shows; the JSON has all."""


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
