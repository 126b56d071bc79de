"""The stages of a run: who is told of them, how long they take, how much device memory they need."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from gsq_module.memory.statistics import DeviceMemory, read_device_memory

logger = logging.getLogger(__name__)


@dataclass
class Stage:
    """One stage of a run. Two stages are equal when name, block and unit are.

    Args:
        name: `capture`, `initialize`, `refine`, `propagate`, `export`, `evaluate`, ...
        block: Index of the decoder block, from 0; `None` outside the block loop.
        unit: Name of the unit; `None` where the stage is the whole block's.
        num_blocks: Blocks the run goes through; 0 where that is unknown.
        device: The device the stage runs on.
        failed: Whether the stage ended in an exception, which is under way while the listeners hear of the end.
    """

    name: str
    block: int | None = None
    unit: str | None = None
    num_blocks: int = field(default=0, compare=False)
    device: torch.device = field(default=torch.device("cpu"), compare=False)
    failed: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        """`capture, block 3, mlp`."""
        block = None if self.block is None else f"block {self.block}"
        return ", ".join(part for part in (self.name, block, self.unit) if part)


class StageListener:
    """What a callback also is to see the stages outside `Trainer.fit`."""

    def on_stage_start(self, stage: Stage) -> None:
        """A stage begins."""

    def on_stage_end(self, stage: Stage, seconds: float, memory: DeviceMemory | None) -> None:
        """A stage has ended, or has failed (`stage.failed`).

        Args:
            stage: The stage.
            seconds: What it took.
            memory: The device's memory at its end, peaks since its start; `None` on CPU, or where a failure of the
                device left nothing to read.
        """


class StageClock:
    """Times the stages of a run, notes their peak memory and tells the listeners.

    Args:
        device: The device the stages run on. On CUDA the end of a stage waits for the device, so that a stage's seconds
            hold the work it queued.
        listeners: Told of the start and the end of each stage, in this order.
        num_blocks: Blocks the run goes through; 0 leaves the index of a stage's block unchecked.
        units: Names of the units; an empty one leaves the name of a stage's unit unchecked.
        now: The clock, in seconds.

    Example::

        clock = StageClock(torch.device("cuda", 0), [c for c in trainer.callbacks if isinstance(c, StageListener)])
        with clock.stage("initialize", block=3, unit="mlp"):
            ...
        clock.seconds["initialize"]
    """

    def __init__(
        self,
        device: torch.device,
        listeners: Sequence[StageListener] = (),
        num_blocks: int = 0,
        units: Sequence[str] = (),
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.device = device
        self.listeners = tuple(listeners)
        self.num_blocks = num_blocks
        self.units = tuple(units)
        self.current: Stage | None = None
        """The stage under way."""
        self.failed: Stage | None = None
        """The stage that ended in an exception, if one did."""
        self.seconds: dict[str, float] = {}
        """Seconds by the stage's name, summed over blocks and units."""
        self.peak_memory: dict[str, int] = {}
        """Highest allocated bytes by the stage's name; empty on CPU."""
        self._now = now

    @contextmanager
    def stage(self, name: str, block: int | None = None, unit: str | None = None) -> Iterator[Stage]:
        """The `with` block is one stage. An exception in it passes through, after the end was recorded and told."""
        assert self.current is None, f"stage {name} begins inside {self.current}"
        assert block is None or not self.num_blocks or 0 <= block < self.num_blocks, (block, self.num_blocks)
        assert unit is None or not self.units or unit in self.units, (unit, self.units)
        stage = Stage(name, block, unit, num_blocks=self.num_blocks, device=self.device)
        self.current = stage
        start = self._now()
        try:
            # Before CUDA has started there is no peak to reset, and asking for it raises.
            if self.device.type == "cuda" and torch.cuda.is_initialized():
                torch.cuda.reset_peak_memory_stats(self.device)
            for listener in self.listeners:
                listener.on_stage_start(stage)
            yield stage
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        except BaseException:
            stage.failed, self.failed = True, stage
            self._end(stage, start)
            raise
        self._end(stage, start)

    def _end(self, stage: Stage, start: float) -> None:
        seconds = self._now() - start
        self.current = None
        self.seconds[stage.name] = self.seconds.get(stage.name, 0.0) + seconds
        memory = None
        with _first_error_stays(stage):
            memory = read_device_memory(self.device)
        if memory is not None:
            self.peak_memory[stage.name] = max(self.peak_memory.get(stage.name, 0), memory.peak_allocated)
        for listener in self.listeners:
            with _first_error_stays(stage):
                listener.on_stage_end(stage, seconds, memory)


@contextmanager
def _first_error_stays(stage: Stage) -> Iterator[None]:
    """After a driver error every CUDA query raises too: that must not take the place of the error that says why."""
    try:
        yield
    except Exception:
        if not stage.failed:
            raise
        logger.warning("a second error while stage %s ended after its own:", stage.name, exc_info=True)
