"""Device memory as metrics, by step and by stage."""

from __future__ import annotations

from typing import Any, Protocol

from jsonargparse.typing import NonNegativeFloat, PositiveInt
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from typing_extensions import override

from gsq_module.memory.stages import Stage, StageListener
from gsq_module.memory.statistics import GIB, DeviceMemory, format_bytes, read_device_memory


class StagePredictions(Protocol):
    """What a memory plan offers."""

    def predicted(self, stage: str, block: int | None, unit: str | None) -> int | None:
        """Peak of a stage in bytes; `None` where the plan says nothing of it."""


class AllocatorStats(Callback, StageListener):
    r"""Logs what rank zero's device holds to the Trainer's loggers, and warns when memory runs short.

    Sizes are in GiB, steps are `trainer.global_step`. On CPU it does nothing.

    **Logged Metrics**

    After every n-th optimizer step, and at the end of each stage with ``stage/<name>/`` after ``memory/`` (of the
    stages that end before the first fit, the one of each name with the highest peak is logged when that fit begins):

    - ``memory/allocated_gib`` -- held by tensors
    - ``memory/reserved_gib`` -- held by the caching allocator, tensors included
    - ``memory/reserved_unallocated_gib`` -- the difference: cached, or lost to fragments
    - ``memory/peak_allocated_gib`` -- highest allocated since the stage began
    - ``memory/peak_reserved_gib`` -- highest reserved since the stage began
    - ``memory/device_used_gib`` -- in use on the whole device: context, NCCL and other processes included
    - ``memory/margin_gib`` -- least free on the whole device since the stage began
    - ``memory/retries`` -- allocations so far that needed the allocator to flush its cache first
    - ``memory/ooms`` -- out-of-memory errors of the allocator so far

    At the end of each stage, where there is a plan:

    - ``memory/stage/<name>/predicted_gib`` -- the peak that the plan predicts

    Other counters of torch's allocator: Lightning's `DeviceStatsMonitor`.

    Args:
        every_n_steps: Optimizer steps between two readings.
        min_margin_gib: Warn once if the margin falls under this, in GiB; 0: never. The default is about what an NCCL
            group takes, or what fragments cost where expandable segments are off.

    Attributes:
        plan: Predicts the peaks of stages; `None` where nothing does.

    Raises:
        ValueError: If ``every_n_steps`` is less than 1 or ``min_margin_gib`` negative.

    Example::

        from callbacks import AllocatorStats
        from lightning.pytorch import Trainer

        trainer = Trainer(callbacks=[AllocatorStats(every_n_steps=10)])
    """

    def __init__(self, every_n_steps: PositiveInt = 50, min_margin_gib: NonNegativeFloat = 0.5) -> None:
        if every_n_steps < 1:
            raise ValueError(f"AllocatorStats: every_n_steps is {every_n_steps}; it is 1 or more")
        if min_margin_gib < 0:
            raise ValueError(f"AllocatorStats: min_margin_gib is {min_margin_gib}; it is 0 (off) or more")
        self.every_n_steps = every_n_steps
        self.min_margin_gib = min_margin_gib
        self.plan: StagePredictions | None = None
        self._trainer: Trainer | None = None
        self._waiting: dict[str, tuple[int, dict[str, float]]] = {}
        self._last_step = 0
        self._warned_of_retries = self._warned_of_margin = False

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._trainer = trainer

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last_step = trainer.global_step
        if self._waiting:
            log_now(trainer, {name: value for _, metrics in self._waiting.values() for name, value in metrics.items()})
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
        self._warn(memory)
        log_now(trainer, {f"memory/{name}": value for name, value in _figures(memory).items()})

    @override
    def on_stage_end(self, stage: Stage, seconds: float, memory: DeviceMemory | None) -> None:
        if memory is None:
            return
        self._warn(memory)
        figures = _figures(memory)
        predicted = self.plan.predicted(stage.name, stage.block, stage.unit) if self.plan is not None else None
        if predicted is not None:
            figures["predicted_gib"] = predicted / GIB
        metrics = {f"memory/stage/{stage.name}/{name}": value for name, value in figures.items()}
        if self._trainer is not None:
            log_now(self._trainer, metrics, save=True)
        elif memory.peak_allocated >= self._waiting.get(stage.name, (0, {}))[0]:
            self._waiting[stage.name] = (memory.peak_allocated, metrics)

    def _warn(self, memory: DeviceMemory) -> None:
        if memory.retries and not self._warned_of_retries:
            self._warned_of_retries = True
            rank_zero_warn(
                f"The device's memory is nearly full: the allocator flushed its cache and tried again {memory.retries} "
                f"time(s), which is slow; {_use(memory)}. A smaller microbatch (--data.microbatch_size) needs less."
            )
        if memory.margin < self.min_margin_gib * GIB and not self._warned_of_margin:
            self._warned_of_margin = True
            rank_zero_warn(
                f"Only {format_bytes(memory.margin)} of the device was free when this stage needed most, under "
                f"AllocatorStats.min_margin_gib={self.min_margin_gib}; {_use(memory)}. The callback EmptyCache gives "
                "back what is cached; a smaller microbatch (--data.microbatch_size) needs less."
            )


def log_now(trainer: Trainer, metrics: dict[str, float], save: bool = False) -> None:
    """Log to all of the Trainer's loggers, inside a fit or outside.

    Args:
        trainer: Its loggers log on rank zero alone; the step is its `global_step`.
        metrics: By name.
        save: Make the loggers write what they have buffered, as nothing else does outside a fit.
    """
    for logger in trainer.loggers:
        logger.log_metrics(metrics, step=trainer.global_step)
        if save:
            logger.save()


def _figures(memory: DeviceMemory) -> dict[str, float]:
    return {
        "allocated_gib": memory.allocated / GIB,
        "reserved_gib": memory.reserved / GIB,
        "reserved_unallocated_gib": (memory.reserved - memory.allocated) / GIB,
        "peak_allocated_gib": memory.peak_allocated / GIB,
        "peak_reserved_gib": memory.peak_reserved / GIB,
        "device_used_gib": memory.device_used / GIB,
        "margin_gib": memory.margin / GIB,
        "retries": float(memory.retries),
        "ooms": float(memory.ooms),
    }


def _use(memory: DeviceMemory) -> str:
    return (
        f"{format_bytes(memory.device_used)} of {format_bytes(memory.device_total)} are in use now, of which this "
        f"process holds {format_bytes(memory.allocated)} in tensors and caches "
        f"{format_bytes(memory.reserved - memory.allocated)} more"
    )
