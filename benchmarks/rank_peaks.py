"""A callback for rehearsals: what each rank's device held at most in each stage, and the seconds of a step, by rank."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from gsq_module import ranks
from gsq_module.memory.stages import Stage, StageListener
from gsq_module.memory.statistics import DeviceMemory


class RankPeaks(Callback, StageListener):
    """Writes `rank<N>.json`, anew after every stage: a run that fails later leaves what it has measured.

    Args:
        directory: Folder of the files.
    """

    def __init__(self, directory: str) -> None:
        self.directory = Path(directory)
        self.stages: list[dict[str, Any]] = []
        self._marks: list[float] = []
        self._step = 0

    @override
    def on_stage_start(self, stage: Stage) -> None:
        self._marks = []

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize(trainer.strategy.root_device)
        self._marks.append(time.perf_counter())

    @override
    def on_stage_end(self, stage: Stage, seconds: float, memory: DeviceMemory | None) -> None:
        steps = [end - begin for begin, end in zip(self._marks, self._marks[1:], strict=False)]
        row: dict[str, Any] = {"stage": stage.name, "block": stage.block, "unit": stage.unit, "failed": stage.failed}
        row["step_seconds"] = statistics.median(steps) if steps else None
        if memory is not None:
            row |= {
                "allocated": memory.peak_allocated,
                "reserved": memory.peak_reserved,
                "device_used": memory.device_total - memory.margin,
            }
        self.stages.append(row)
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / f"rank{ranks.rank()}.json").write_text(json.dumps(self.stages))
