"""The final pass in a rehearsal: the whole depth of both models, each kind of block loaded once.

Every other block of a kind is that one again, so a step takes as long, and keeps as many hidden states, as in the run.
What the weights of the others would take lies on the device as ballast, so that peak and margin are the run's.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from lightning.pytorch import Trainer

from gsq_module.data.module import CalibrationData
from gsq_module.data.samples import Samples
from gsq_module.final_pass import train_scales
from gsq_module.geometry import kinds_of_blocks
from gsq_module.memory.plan import MemoryPlan
from gsq_module.quantization.grid import QuantizedWeight
from gsq_module.settings import FinalPass
from gsq_module.streaming.model import StreamedModel

FINAL_STEPS = 2
"""Optimizer steps of a rehearsed final pass; the second is timed."""


def rehearse_final_pass(
    trainer: Trainer,
    settings: FinalPass,
    data: CalibrationData,
    samples: Samples,
    model: StreamedModel,
    plan: MemoryPlan,
    weights: Mapping[str, QuantizedWeight],
    outer: Mapping[str, QuantizedWeight],
) -> None:
    """Measure, train and measure again, as the run does it.

    Args:
        trainer: The one Trainer.
        settings: Of the recipe.
        data: Its loaders are used.
        samples: Rows of this rank.
        model: Of synthetic weights; nothing of it is loaded.
        plan: Of the real run.
        weights: Codes and scales of the rehearsed blocks' linears by module path.
        outer: The same of embedding and head, where they are quantized.
    """
    kinds = kinds_of_blocks(model, model.num_blocks)
    others = {index: indices[0] for indices in kinds for index in indices[1:]}
    original, quantized = (StreamedModel.from_checkpoint(model.checkpoint, model.device, model.dtype) for _ in range(2))
    for tree in (original, quantized):
        tree.stand_in(others)
    left_out = missing_bytes(model, plan, others) if model.device.type == "cuda" else 0
    ballast = torch.empty(left_out, dtype=torch.uint8, device=model.device)
    train_scales(trainer, settings, data, samples, original, quantized, weights, outer, FINAL_STEPS)
    del ballast


def missing_bytes(model: StreamedModel, plan: MemoryPlan, others: Mapping[int, int]) -> int:
    """What the blocks that others stand for would take on the device, in both models."""
    nbytes = sum(value.numel() for index in others for value in model.blocks[index].state_dict().values())
    weights = sum(
        unit.weights for kind in plan.blocks for unit in kind.units for index in kind.indices if index in others
    )
    return sum(plan.both_models(plan.job.itemsize * nbytes, weights).values())
