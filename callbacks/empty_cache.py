"""Giving the allocator's cached memory back to the device."""

from __future__ import annotations

from typing import Any

import torch
from jsonargparse.typing import NonNegativeFloat, NonNegativeInt
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.types import STEP_OUTPUT
from typing_extensions import override

from callbacks.allocator_stats import log_now
from gsq_module.memory.stages import Stage, StageListener
from gsq_module.memory.statistics import GIB, DeviceMemory


class EmptyCache(Callback, StageListener):
    r"""Gives memory that the caching allocator holds but does not use back to the device.

    It does so at the end of each stage, and within a fit by the two keys below. A call waits for the device and the
    next allocations are slow again: leave both keys at 0 where memory suffices. On CPU it does nothing, and after a
    stage that failed neither, so that a report finds the memory as the failure left it.

    **Logged Metrics**

    Logged by rank zero each time it acted, from the first fit on; the step is `trainer.global_step`:

    - ``empty_cache/calls`` -- calls so far in this process, those before the first fit included
    - ``empty_cache/freed_gib`` -- GiB they gave back to the device, summed

    Args:
        every_n_steps: Act after every n-th optimizer step of the run; 0: never for this reason.
        min_free_gib: Act after an optimizer step that leaves less than this free on the device, in GiB; other processes
            on the device count. 0: never for this reason.

    Raises:
        ValueError: If a value is negative.

    Example::

        from callbacks import EmptyCache
        from lightning.pytorch import Trainer

        trainer = Trainer(callbacks=[EmptyCache(min_free_gib=1.0)])
    """

    def __init__(self, every_n_steps: NonNegativeInt = 0, min_free_gib: NonNegativeFloat = 0.0) -> None:
        for key, value in (("every_n_steps", every_n_steps), ("min_free_gib", min_free_gib)):
            if value < 0:
                raise ValueError(f"EmptyCache: {key} is {value}; it is 0 (off) or more")
        self.every_n_steps = every_n_steps
        self.min_free_gib = min_free_gib
        self.calls = 0
        self.freed_bytes = 0
        self._last_step = 0
        self._trainer: Trainer | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._trainer = trainer

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last_step = trainer.global_step

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        device = trainer.strategy.root_device
        if device.type != "cuda" or trainer.global_step == self._last_step:
            return
        self._last_step = trainer.global_step
        if self._is_due(device):
            self._release(device)
            log_now(trainer, self._metrics())

    @override
    def on_stage_end(self, stage: Stage, seconds: float, memory: DeviceMemory | None) -> None:
        if stage.device.type == "cuda" and not stage.failed:
            self._release(stage.device)
            if self._trainer is not None:
                log_now(self._trainer, self._metrics(), save=True)

    def _metrics(self) -> dict[str, float]:
        return {"empty_cache/calls": float(self.calls), "empty_cache/freed_gib": self.freed_bytes / GIB}

    def _is_due(self, device: torch.device) -> bool:
        if self.every_n_steps and self._last_step % self.every_n_steps == 0:
            return True
        return self.min_free_gib > 0 and torch.cuda.mem_get_info(device)[0] < self.min_free_gib * GIB

    def _release(self, device: torch.device) -> None:
        # empty_cache acts on the current device, which need not be this rank's.
        with torch.cuda.device(device):
            before = torch.cuda.memory_reserved(device)
            torch.cuda.empty_cache()
            self.freed_bytes += before - torch.cuda.memory_reserved(device)
        self.calls += 1
