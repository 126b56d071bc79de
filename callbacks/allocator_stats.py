"""Device memory as metrics, by step and by stage."""

from __future__ import annotations

from typing import Any

from jsonargparse.typing import PositiveInt
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from typing_extensions import override

from gsq_module.memory.stages import Stage, StageListener
from gsq_module.memory.statistics import GIB, DeviceMemory, format_bytes, read_device_memory


class AllocatorStats(Callback, StageListener):
    r"""Logs what rank zero's device holds to the Trainer's loggers, and warns when memory runs short.

    Sizes are in GiB, steps are `trainer.global_step`. On CPU it does nothing.

    **Logged Metrics**

    After every n-th optimizer step:

    - ``memory/allocated_gib`` -- held by tensors
    - ``memory/reserved_gib`` -- held by the caching allocator, tensors included
    - ``memory/peak_allocated_gib`` -- highest allocated since the stage began
    - ``memory/device_used_gib`` -- in use on the whole device: context, NCCL and other processes included
    - ``memory/retries`` -- allocations so far that needed the allocator to flush its cache first

    At the end of each stage (those that end before the first fit are logged when it begins, as highest by name):

    - ``memory/stage/<name>/peak_allocated_gib`` -- highest allocated during the stage

    Args:
        every_n_steps: Optimizer steps between two readings.

    Raises:
        ValueError: If ``every_n_steps`` is less than 1.

    Example::

        from callbacks import AllocatorStats
        from lightning.pytorch import Trainer

        trainer = Trainer(callbacks=[AllocatorStats(every_n_steps=10)])
    """

    def __init__(self, every_n_steps: PositiveInt = 50) -> None:
        if every_n_steps < 1:
            raise ValueError(f"AllocatorStats: every_n_steps is {every_n_steps}; it is 1 or more")
        self.every_n_steps = every_n_steps
        self._trainer: Trainer | None = None
        self._waiting: dict[str, float] = {}
        self._last_step = 0
        self._warned = False

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._trainer = trainer

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last_step = trainer.global_step
        if self._waiting:
            self._log(trainer, self._waiting)
            self._waiting = {}

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if step == self._last_step or step % self.every_n_steps or not trainer.is_global_zero:
            return
        self._last_step = step
        memory = read_device_memory(trainer.strategy.root_device)
        if memory is None:
            return
        self._warn_of_retries(memory)
        metrics = {
            "memory/allocated_gib": memory.allocated / GIB,
            "memory/reserved_gib": memory.reserved / GIB,
            "memory/peak_allocated_gib": memory.peak_allocated / GIB,
            "memory/device_used_gib": memory.device_used / GIB,
            "memory/retries": float(memory.retries),
        }
        self._log(trainer, metrics)

    @override
    def on_stage_end(self, stage: Stage, seconds: float, memory: DeviceMemory | None) -> None:
        if memory is None:
            return
        self._warn_of_retries(memory)
        name, peak = f"memory/stage/{stage.name}/peak_allocated_gib", memory.peak_allocated / GIB
        if self._trainer is None:
            self._waiting[name] = max(peak, self._waiting.get(name, 0.0))
        else:
            self._log(self._trainer, {name: peak})
            # Outside a fit nothing else makes a logger write what it has buffered.
            for logger in self._trainer.loggers:
                logger.save()

    def _log(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        # log_metrics is rank zero's alone in every Lightning logger.
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)

    def _warn_of_retries(self, memory: DeviceMemory) -> None:
        if self._warned or not memory.retries:
            return
        self._warned = True
        rank_zero_warn(
            f"The device's memory is nearly full: the allocator flushed its cache and tried again {memory.retries} "
            f"time(s), which is slow; {format_bytes(memory.device_used)} of {format_bytes(memory.device_total)} are in "
            f"use, {format_bytes(memory.allocated)} of them by tensors of this process. A smaller microbatch with more "
            "accumulate_grad_batches needs less."
        )
