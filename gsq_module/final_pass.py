"""The final pass: the scales of all quantized linears, trained together so that the whole model predicts what the
original predicts. The checkpoint keeps its codes, its format and its size.

Both models are on the device whole. For models that leave no room for that there is no final pass.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from gsq_module.atomic import write_atomically
from gsq_module.data.module import CalibrationData
from gsq_module.data.samples import Samples
from gsq_module.quantization.grid import QuantizedWeight
from gsq_module.refinement import fit_steps
from gsq_module.scale_tuning import ScaleTuning, quantized_whole
from gsq_module.settings import FinalPass
from gsq_module.streaming.model import StreamedModel
from gsq_module.unit_shards import UnitShards

OUTCOME_FILE = "final_pass.json"
"""Beside the units with trained scales; written last, so that it also says that they are complete."""


class TokenRows:
    """Token rows of this rank, as the data module's loaders read them.

    Args:
        tokens: int64 `[num_samples, seq_len]` in host memory.
        total: Rows of all ranks together.
        device: Where microbatches go.
    """

    def __init__(self, tokens: Tensor, total: int, device: torch.device) -> None:
        self.tokens, self.total, self.device = tokens, total, device

    def __len__(self) -> int:
        return self.total

    def batches(self, indices: Iterable[list[int]]) -> Iterator[tuple[Tensor, ...]]:
        """Microbatches of token rows `[len(microbatch), seq_len]`."""
        for rows in indices:
            yield (self.tokens[rows].to(self.device),)


@dataclass
class TunedScales:
    """What the final pass came to.

    Attributes:
        before: KL(original || quantized) a token on the validation rows.
        after: The same with the trained scales, in the export's dtype.
        seconds: Of the pass.
        basis: Of the units that it began with (`UnitShards.basis`), and its settings.
    """

    before: float
    after: float
    seconds: float
    basis: str = ""

    @property
    def improved(self) -> bool:
        """Otherwise the scales stay as they were (design.md, contract 3)."""
        return self.after < self.before


def train_scales(
    trainer: Trainer,
    settings: FinalPass,
    data: CalibrationData,
    samples: Samples,
    model: StreamedModel,
    other: StreamedModel,
    weights: Mapping[str, QuantizedWeight],
    outer: Mapping[str, QuantizedWeight],
    steps: int,
) -> tuple[TunedScales, dict[str, QuantizedWeight]]:
    """Train the scales on the calibration rows.

    Args:
        trainer: The one Trainer.
        settings: Of the recipe.
        data: Its loaders are used.
        samples: Rows of this rank.
        model: The original; nothing of it is loaded.
        other: Another tree of the same checkpoint, likewise; it becomes the quantized model.
        weights: Codes and scales of the blocks' linears by module path.
        outer: The same of embedding and head, where they are quantized; these stay as they are.
        steps: Optimizer steps.

    Returns:
        What came of it, and the weights with the better scales, in host memory.
    """
    began = time.perf_counter()
    device = model.device
    train, validation = (
        TokenRows(samples.tokens[part.start : part.stop], total, device)
        for part, total in zip(samples.fitted, samples.totals, strict=True)
    )
    data.bind(train, validation)
    with model.whole() as original, quantized_whole(other, weights, outer) as scaled:

        def teacher(tokens: Tensor) -> Tensor:
            return original(input_ids=tokens, use_cache=False).logits

        def student(tokens: Tensor) -> Tensor:
            return other.model(input_ids=tokens, use_cache=False).logits

        other.model.requires_grad_(False)
        module = ScaleTuning(student, scaled, teacher, settings, steps, trainer.global_step)
        before = module.measure(data.val_dataloader(), device)
        # The measurements before and after are its validation: a loader of those rows would have nothing to do.
        fit_steps(trainer, module, steps, train_dataloaders=data.train_dataloader())
        trained = {name: linear.hardened() for name, linear in scaled.items()}
        for name, linear in scaled.items():
            linear.place(trained[name])
        after = module.measure(data.val_dataloader(), device)
        trained = {name: weight.to("cpu") for name, weight in trained.items()}
    outcome = TunedScales(before, after, time.perf_counter() - began)
    return outcome, trained if outcome.improved else dict(weights)


def load_outcome(units: UnitShards, tuned: UnitShards, settings: FinalPass) -> TunedScales | None:
    """What a finished final pass came to; None where there is none, or another one, or one that is not whole any more.

    Another one is one of other units, or with other settings: these may change, for the units stay what they are.
    """
    try:
        found = TunedScales(**json.loads((tuned.directory / OUTCOME_FILE).read_text()))
        found.before, found.after, found.seconds = map(float, (found.before, found.after, found.seconds))
    except (FileNotFoundError, TypeError, ValueError):
        return None
    whole = _places(units) == _places(tuned)
    return found if whole and found.basis == _basis(units, settings) else None


def save_tuned(
    outcome: TunedScales,
    weights: Mapping[str, QuantizedWeight],
    units: UnitShards,
    tuned: UnitShards,
    settings: FinalPass,
) -> None:
    """Store each unit again with its trained scales, and then the outcome. Rank 0 does it."""
    (tuned.directory / OUTCOME_FILE).unlink(missing_ok=True)
    for result in units.results():
        loaded = units.load(result.block, result.unit)
        assert loaded is not None
        tuned.save(result, {name: weights[name] for name in loaded[1]})
    outcome.basis = _basis(units, settings)
    write_atomically(tuned.directory / OUTCOME_FILE, json.dumps(asdict(outcome)).encode())


def _basis(units: UnitShards, settings: FinalPass) -> str:
    return f"{units.basis(_places(units))} {json.dumps(asdict(settings), sort_keys=True)}"


def _places(shards: UnitShards) -> list[tuple[int, str]]:
    return [(result.block, result.unit) for result in shards.results()]
