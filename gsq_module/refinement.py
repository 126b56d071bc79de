"""One unit's refinement: a fit of the one Trainer, between two measurements on hard codes."""

from __future__ import annotations

import gc
import logging
import math
import time
import traceback
from dataclasses import dataclass
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import SingleDeviceStrategy
from typing_extensions import override

from callbacks import OOMReport
from gsq_module.data.module import CalibrationData
from gsq_module.memory.oom import Evidence, Kind, classify
from gsq_module.module import GSQModule, UnitProblem
from gsq_module.quantization.grid import QuantizedWeight
from gsq_module.quantization.training_ops import accumulating_in_place
from gsq_module.strategies import RelaxedDDPStrategy
from gsq_module.streaming.activations import UnitSamples

log = logging.getLogger(__name__)


@dataclass
class Outcome:
    """The weights a unit keeps and the errors that decided it (relative squared errors on validation samples)."""

    weights: dict[str, QuantizedWeight]
    initial_error: float
    refined_error: float | None
    codes_changed: float
    steps: int
    seconds: float
    note: str = ""
    """That the refinement was tried again with less, and why."""

    @property
    def improved(self) -> bool:
        """Whether refinement beat its start; an error that is not finite did not."""
        return self.refined_error is not None and self.refined_error < self.initial_error


class _LetGo(Callback):
    """After an error, keeps Lightning's teardown from moving models and the optimizer's state to the host."""

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        cast(Any, pl_module).student = None  # of a unit, or of the final pass
        for optimizer in trainer.optimizers:
            optimizer.state.clear()
        trainer.strategy.optimizers = []


class UnitRefiner:
    """Refines unit after unit with one Trainer, so that its loggers see one run: a unit's steps have the same numbers
    whether they are done in the first session or in a later one, or again with less memory.

    Args:
        trainer: Its own limits are moved from fit to fit; it must have been made without any (`max_epochs=-1`).
        module: The recipe's module.
        data: Its data module.
    """

    def __init__(self, trainer: Trainer, module: GSQModule, data: CalibrationData) -> None:
        self.trainer, self.module, self.data = trainer, module, data
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        # Last: reports want to see the memory as the error left it.
        callbacks[:] = [callback for callback in callbacks if not isinstance(callback, _LetGo)] + [_LetGo()]

    def __call__(self, problem: UnitProblem, train: UnitSamples, validation: UnitSamples) -> Outcome:
        """Measure the initial codes, refine them, measure again, keep the better (design.md, contract 3).

        After a certain out-of-memory error all of it is done again with half the microbatch, down to one sample. The
        batch stays, so the result does, up to rounding. Later units begin with what this one has come to.
        """
        self.data.bind(train, validation)
        note = ""
        while True:
            smaller = self._smaller_microbatch(problem)
            for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(callback, OOMReport):
                    callback.retry_follows = smaller is not None
            if problem.first_step is not None:
                self.count_from(problem.first_step)
            step = self.trainer.global_step
            self.module.bind(problem, step)
            try:
                return self._refine(problem, note)
            except RuntimeError as error:
                if smaller is None or classify(error, Evidence()).kind is not Kind.DEVICE_MEMORY:
                    raise
                # Its frames hold the tensors that there was no more room beside.
                traceback.clear_frames(error.__traceback__)
                note = f"out of device memory after {self.trainer.global_step - step} steps; "
            finally:
                self.module.refined = {}
                self.module.release()
            note += f"refined again in microbatches of {smaller}"
            log.warning("%s (%s)", note, ", ".join(problem.weights))
            self._start_over(problem, smaller)

    def _refine(self, problem: UnitProblem, note: str) -> Outcome:
        device, module, data = self.trainer.strategy.root_device, self.module, self.data
        began = time.perf_counter()
        initial_error = module.hard_error(problem.initial, data.val_dataloader(), device)
        if problem.total_steps == 0:
            return Outcome(problem.initial, initial_error, None, 0.0, 0, time.perf_counter() - began, note)
        # Lightning's own DDP, which a recipe may name by its class, reduces by hooks on the gradients.
        in_place = isinstance(self.trainer.strategy, (SingleDeviceStrategy, RelaxedDDPStrategy))
        with accumulating_in_place(problem.student.modules() if in_place else ()):
            fit_steps(self.trainer, module, problem.total_steps, datamodule=data)
        refined = module.refined
        refined_error = module.hard_error(refined, data.val_dataloader(), device)
        changed = sum(int((refined[name].codes != start.codes).sum()) for name, start in problem.initial.items())
        total = sum(start.codes.numel() for start in problem.initial.values())
        seconds = time.perf_counter() - began
        outcome = Outcome(refined, initial_error, refined_error, changed / total, problem.total_steps, seconds, note)
        if not math.isfinite(refined_error) or not outcome.improved:
            outcome.weights, outcome.codes_changed = problem.initial, 0.0
        return outcome

    def _smaller_microbatch(self, problem: UnitProblem) -> int | None:
        """Half the microbatch, or the next less that divides the batch; None where there is none.

        Only on a single device: other ranks would not know of it.
        """
        if self.trainer.world_size > 1 or problem.resize is None:
            return None
        batch = self.data.batch_size
        now = batch // self.trainer.accumulate_grad_batches
        return next((size for size in range(now // 2, 0, -1) if batch % size == 0), None)

    def _start_over(self, problem: UnitProblem, microbatch: int) -> None:
        """Give back what the failed fit has left, and prepare the next one."""
        for weight in problem.weights.values():
            weight.grad = None
        free(self.trainer)
        self.data.microbatch_size = microbatch
        self.trainer.accumulate_grad_batches = self.data.accumulate_grad_batches(1)
        assert problem.resize is not None
        for size in self.data.microbatch_sizes():
            problem.resize(size)

    def count_from(self, step: int) -> None:
        """Set the Trainer's counters to those of a run that was never interrupted.

        These too are internal to Lightning. Loggers see `_batches_that_stepped`, the loops the optimizer's count.
        """
        loop = self.trainer.fit_loop
        loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed = step
        loop.epoch_loop._batches_that_stepped = step
        epochs = step // self.data.steps_per_epoch
        for count in ("ready", "started", "processed", "completed"):
            setattr(loop.epoch_progress.current, count, epochs)


def fit_steps(trainer: Trainer, module: LightningModule, steps: int, **loaders: Any) -> None:
    """Run the Trainer for `steps` optimizer steps more, and let go of what the fit leaves behind.

    Args:
        trainer: The one Trainer.
        module: What is trained.
        steps: How many.
        loaders: As `Trainer.fit` takes them.

    Lightning trains 0 steps, without an exception, when a Trainer that has reached its limit is fitted again. The
    attribute set here is internal to Lightning: pyproject.toml pins the minor version, and a test watches it.
    """
    before = trainer.global_step
    trainer.fit_loop.epoch_loop.max_steps = before + steps
    trainer.fit(module, **loaders)
    if trainer.interrupted:
        raise KeyboardInterrupt
    assert trainer.global_step == before + steps, (before, steps, trainer.global_step)
    free(trainer)


def free(trainer: Trainer) -> None:
    """Let go of what Lightning, reference cycles and the allocator still hold."""
    trainer.strategy.optimizers = []
    trainer.strategy.lr_scheduler_configs = []
    if trainer.strategy.root_device.type == "cuda":
        gc.collect()
        with torch.cuda.device(trainer.strategy.root_device):
            torch.cuda.empty_cache()
