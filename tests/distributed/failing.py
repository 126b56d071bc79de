"""A callback for recipes: one rank fails at an optimizer step, or when a stage of a block begins."""

from __future__ import annotations

import os
import signal
from typing import Literal

import torch
from lightning.pytorch.callbacks import Callback

from gsq_module import ranks
from gsq_module.memory.stages import StageListener

FULL = "CUDA out of memory. Tried to allocate 680.00 MiB. GPU 0 has a total capacity of 11.94 GiB"


class Fails(Callback, StageListener):
    """Fail on one rank.

    Args:
        rank: Which.
        how: `memory` raises a certain out-of-memory error; `kill` is SIGKILL.
        step: At this step of the run.
        stage: Or when this stage begins.
        block: Of this block; None where the stage is of none.
    """

    def __init__(
        self,
        rank: int,
        how: Literal["memory", "kill"] = "memory",
        step: int | None = None,
        stage: str | None = None,
        block: int | None = 0,
    ) -> None:
        self.rank, self.how, self.step, self.stage, self.block = rank, how, step, stage, block

    def _fail(self) -> None:
        if ranks.rank() != self.rank:
            return
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise torch.OutOfMemoryError(FULL)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == self.step:
            self._fail()

    def on_stage_start(self, stage):
        if stage.name == self.stage and stage.block == self.block:
            self._fail()
