"""Sections of the recipe's `model`: how units are refined, and what is done with the whole model at the end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jsonargparse.typing import ClosedUnitInterval, NonNegativeFloat, NonNegativeInt, PositiveFloat


@dataclass
class Refinement:
    """How long and how fast the codes of a unit are refined.

    Args:
        epochs: Passes over the training samples; 0 keeps the initial codes (GPTQ or round-to-nearest alone).
        lr: Lion step of a logit at the start. Neighbouring candidates start 0.03 apart; total travel is about half of
            lr x steps, so fewer steps want a larger lr.
        scale_lr: Lion step of a scale at the start, in units of the weight.
        final_lr_fraction: Both, at the last step, as a fraction of those at the first (cosine between).
        betas: Lion's factors of the update and of the momentum.
        weight_decay: Decoupled weight decay on the logits.
        temperature: Gumbel-softmax temperature at the first and the last step (linear between).
        logit_scale: Factor on the logits inside the softmax, likewise.
        init_std: Standard deviation of the initial logits' noise.
        init_strength: How far the initial code is preferred, in units of init_std.
        logit_dtype: `bfloat16` (half the memory, rounded stochastically) or `float32`.
        units: Units that are refined; the others keep their initial codes. Null for all of `model.units`.
    """

    epochs: int = 10
    lr: PositiveFloat = 2e-4
    scale_lr: NonNegativeFloat = 1e-4
    final_lr_fraction: ClosedUnitInterval = 0.1
    betas: tuple[ClosedUnitInterval, ClosedUnitInterval] = (0.9, 0.95)
    weight_decay: NonNegativeFloat = 1.0
    temperature: tuple[PositiveFloat, PositiveFloat] = (2.0, 0.05)
    logit_scale: tuple[PositiveFloat, PositiveFloat] = (100.0, 500.0)
    init_std: NonNegativeFloat = 0.01
    init_strength: NonNegativeFloat = 6.0
    logit_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    units: list[Literal["attention", "mlp"]] | None = None

    def __post_init__(self) -> None:
        if self.epochs < 0:
            raise ValueError(f"model.refinement.epochs: {self.epochs} is negative; 0 means no refinement")


@dataclass
class FinalPass:
    """After all blocks: train all scales together against the original model's predictions.

    Needs room for both models on the device, the quantized one with a byte a weight.

    Args:
        epochs: Passes over the training samples; 0 leaves the pass out.
        lr: Adam step of a scale at the start, as a fraction of the scale.
        final_lr_fraction: The same at the last step, as a fraction of it (cosine between).
    """

    epochs: NonNegativeInt = 0
    lr: PositiveFloat = 1e-2
    final_lr_fraction: ClosedUnitInterval = 0.1
