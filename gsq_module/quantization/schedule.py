"""Annealing of the learning rates, the temperature and the logit scale over the steps of one unit."""

from __future__ import annotations

import math
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from gsq_module.quantization.optimizer import RelaxedLion


class AnnealingSchedule(LRScheduler):
    """Cosine learning rates; linear temperature and logit scale (arXiv 2604.18556, defaults of the paper).

    Args:
        optimizer: Its groups' `lr`, `scale_lr`, `temperature` and `logit_scale` are the values at the start.
        total_steps: Optimizer steps of the unit.
        final_temperature: Temperature at the last step.
        final_logit_scale: Logit scale at the last step.
        final_lr_fraction: Learning rates at the last step, as a fraction of those at the first.
    """

    def __init__(
        self,
        optimizer: RelaxedLion,
        total_steps: int,
        final_temperature: float = 0.05,
        final_logit_scale: float = 500.0,
        final_lr_fraction: float = 0.1,
    ) -> None:
        self.total_steps = total_steps
        self.final_lr_fraction = final_lr_fraction
        self._ends = {"temperature": final_temperature, "logit_scale": final_logit_scale}
        self._starts: list[dict[str, float]] = [
            {key: group[key] for key in ("scale_lr", *self._ends)} for group in optimizer.param_groups
        ]
        super().__init__(optimizer)

    @property
    def progress(self) -> float:
        """Fraction of the unit's steps that is done, in [0, 1]."""
        return min(1.0, self.last_epoch / max(1, self.total_steps - 1))

    def _cosine(self) -> float:
        return self.final_lr_fraction + (1.0 - self.final_lr_fraction) * 0.5 * (1.0 + math.cos(math.pi * self.progress))

    def get_lr(self) -> list[Any]:
        """Learning rates of the logits, a group."""
        return [base * self._cosine() for base in self.base_lrs]

    def step(self, epoch: int | None = None) -> None:
        """Advance one optimizer step: logit and scale learning rates, temperature, logit scale."""
        super().step(epoch)
        for group, start in zip(self.optimizer.param_groups, self._starts, strict=True):
            group["scale_lr"] = start["scale_lr"] * self._cosine()
            for key, end in self._ends.items():
                group[key] = start[key] + (end - start[key]) * self.progress
