"""One unit's refinement: a fit of the one Trainer, between two measurements on hard codes."""

from __future__ import annotations

import gc
import math
import time
from dataclasses import dataclass

import torch
from lightning.pytorch import Trainer

from gsq_module.data.module import CalibrationData
from gsq_module.module import GSQModule, UnitProblem
from gsq_module.quantization.grid import QuantizedWeight
from gsq_module.quantization.training_ops import accumulating_in_place
from gsq_module.streaming.activations import UnitSamples


@dataclass
class Outcome:
    """The weights a unit keeps and the errors that decided it (relative squared errors on validation samples)."""

    weights: dict[str, QuantizedWeight]
    initial_error: float
    refined_error: float | None
    codes_changed: float
    steps: int
    seconds: float

    @property
    def improved(self) -> bool:
        """Whether refinement beat its start; an error that is not finite did not."""
        return self.refined_error is not None and self.refined_error < self.initial_error


class UnitRefiner:
    """Refines unit after unit with one Trainer, so that its loggers see one run whose step only rises.

    Args:
        trainer: Its own limits are moved from fit to fit; it must have been made without any (`max_epochs=-1`).
        module: The recipe's module.
        data: Its data module.
    """

    def __init__(self, trainer: Trainer, module: GSQModule, data: CalibrationData) -> None:
        self.trainer, self.module, self.data = trainer, module, data

    def __call__(self, problem: UnitProblem, train: UnitSamples, validation: UnitSamples) -> Outcome:
        """Measure the initial codes, refine them, measure again, keep the better (design.md, contract 3)."""
        device = self.trainer.strategy.root_device
        module, data = self.module, self.data
        data.bind(train, validation)
        module.bind(problem, self.trainer.global_step)
        began = time.perf_counter()
        try:
            initial_error = module.hard_error(problem.initial, data.val_dataloader(), device)
            if problem.total_steps == 0:
                return Outcome(problem.initial, initial_error, None, 0.0, 0, time.perf_counter() - began)
            with accumulating_in_place(problem.student.modules() if self.trainer.world_size == 1 else ()):
                self._fit(problem.total_steps)
            refined = module.refined
            refined_error = module.hard_error(refined, data.val_dataloader(), device)
            changed = sum(int((refined[name].codes != start.codes).sum()) for name, start in problem.initial.items())
            total = sum(start.codes.numel() for start in problem.initial.values())
            outcome = Outcome(
                refined, initial_error, refined_error, changed / total, problem.total_steps, time.perf_counter() - began
            )
            if not math.isfinite(refined_error) or not outcome.improved:
                outcome.weights, outcome.codes_changed = problem.initial, 0.0
            return outcome
        finally:
            module.refined = {}
            module.release()

    def _fit(self, steps: int) -> None:
        """Run the Trainer for `steps` optimizer steps more.

        Lightning trains 0 steps, without an exception, when a Trainer that has reached its limit is fitted again. The
        attribute set here is internal to Lightning: pyproject.toml pins the minor version, and a test watches it.
        """
        trainer = self.trainer
        before = trainer.global_step
        trainer.fit_loop.epoch_loop.max_steps = before + steps
        trainer.fit(self.module, datamodule=self.data)
        if trainer.interrupted:
            raise KeyboardInterrupt
        assert trainer.global_step == before + steps, (before, steps, trainer.global_step)
        trainer.strategy.optimizers = []
        if self.trainer.strategy.root_device.type == "cuda":
            gc.collect()  # half a second
            with torch.cuda.device(self.trainer.strategy.root_device):
                torch.cuda.empty_cache()
