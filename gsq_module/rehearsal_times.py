"""What a rehearsal times: stages, optimizer steps, and the parts of an evaluation."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from gsq_module.memory.plan import MemoryPlan
from gsq_module.memory.stages import Stage, StageListener
from gsq_module.memory.statistics import DeviceMemory


class RehearsalTimes(Callback, StageListener):
    """Notes the stages, the seconds of each optimizer step, and those before and after a stage's fit."""

    def __init__(self) -> None:
        self.stages: list[tuple[Stage, float, DeviceMemory | None]] = []
        self.step_seconds: dict[tuple[int | None, str | None], float] = {}
        self.around_fit: dict[tuple[int | None, str | None], tuple[float, float]] = {}
        self._began = 0.0
        self._fit: list[float] = []
        self._marks: list[torch.cuda.Event | float] = []
        self._last_step = -1

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step != self._last_step:
            self._last_step = trainer.global_step
            self._marks.append(_mark(trainer.strategy.root_device))

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._fit.append(now(trainer.strategy.root_device))

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._fit.append(now(trainer.strategy.root_device))

    @override
    def on_stage_start(self, stage: Stage) -> None:
        self._marks, self._fit, self._began = [], [], time.perf_counter()

    @override
    def on_stage_end(self, stage: Stage, seconds: float, memory: DeviceMemory | None) -> None:
        self.stages.append((stage, seconds, memory))
        if self._fit:
            before = self._fit[0] - self._began
            self.around_fit[stage.block, stage.unit] = before, self._began + seconds - self._fit[-1]
        if len(self._marks) > 1:
            steps = [_seconds(*pair) for pair in zip(self._marks, self._marks[1:], strict=False)]
            self.step_seconds[stage.block, stage.unit] = statistics.median(steps)


@dataclass(frozen=True)
class Evaluation:
    """Of the stage `evaluate`: how many samples it had on all ranks, and seconds of embedding and blocks."""

    samples: int
    embedding: float
    blocks: float

    def of_run(self, seconds: float, plan: MemoryPlan, passes: int) -> float:
        """What it will take with all blocks and samples.

        Args:
            seconds: What the stage took here; the rest of them is the heads'.
            plan: Of the real run.
            passes: Models whose figures are wanted; the original's stream is one more.
        """
        share = sum(len(kind.indices) for kind in plan.blocks) / len(plan.blocks)
        heads = max(0.0, seconds - self.embedding - self.blocks) * passes
        times = plan.job.evaluation_samples / self.samples
        return (passes + 1) * self.embedding + times * (self.blocks * share * (passes + 1) + heads)


@dataclass(frozen=True)
class FinalPassTimes:
    """Of the stage `final_pass`: seconds of an optimizer step, and of the stage before and after all steps.

    Before, both models are loaded and measured on the validation rows; after, they are measured again.
    """

    step: float
    before: float
    after: float

    def of_run(self, steps: int, plan: MemoryPlan, rows: float) -> float:
        """What it will take.

        Args:
            steps: Of the run.
            plan: Of the run; its blocks are all loaded, of a rehearsal one of each kind.
            rows: Validation rows of the run for each one of the rehearsal.
        """
        blocks = sum(len(kind.indices) for kind in plan.blocks) + plan.job.float_blocks
        loading = max(0.0, self.before - self.after) * blocks / len(plan.blocks)
        return steps * self.step + 2 * rows * self.after + loading


def now(device: torch.device) -> float:
    """Seconds, with all work done that is queued on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _mark(device: torch.device) -> torch.cuda.Event | float:
    """This moment; on CUDA in the device's own time, so that nothing has to wait."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(begin: torch.cuda.Event | float, end: torch.cuda.Event | float) -> float:
    """Between two marks."""
    if isinstance(begin, float) or isinstance(end, float):
        return end - begin  # type: ignore[operator]
    end.synchronize()
    return begin.elapsed_time(end) / 1000
