"""A rehearsal: one block of each kind through every stage, with the recipe's settings and made-up weights and text."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch import Trainer
from rich.table import Table

from gsq_module import ranks
from gsq_module.data.module import CalibrationData
from gsq_module.data.samples import Samples
from gsq_module.evaluation import HiddenStates, hidden_states, measure
from gsq_module.memory.plan import MemoryPlan
from gsq_module.memory.stages import StageClock, StageListener
from gsq_module.memory.statistics import format_bytes, host_peak_bytes
from gsq_module.module import GSQModule
from gsq_module.outer import OuterQuantizer
from gsq_module.pipeline import BlockLoop
from gsq_module.quantization.grid import QuantizedWeight
from gsq_module.refinement import UnitRefiner
from gsq_module.rehearsal_final_pass import rehearse_final_pass
from gsq_module.rehearsal_times import Evaluation, FinalPassTimes, RehearsalTimes, now
from gsq_module.streaming.activations import Location
from gsq_module.streaming.model import StreamedModel
from gsq_module.unit_shards import UnitShards

STEPS = 6
"""Optimizer steps of a rehearsed unit; all but the first are timed."""
TRAIN_TOKENS = 2**17
"""Of a rehearsal, at most, unless two batches have more. With one step an epoch, its beginning and end would count as
the step's time: 15 ms on one GPU, some 20 on several (docs/experiments.md)."""
EVALUATION_BATCHES = 4
"""Of a rehearsal and a rank, at most: what is loaded once a pass counts in proportion to the batches."""


@dataclass
class Rehearsed:
    """One stage as it was measured.

    Attributes:
        stage: Its name.
        block: Index of the block.
        unit: Kind of the unit.
        seconds: What it took here.
        allocated: Peak bytes of tensors on the device, of the rank with most; None on a CPU.
        reserved: Peak bytes of the allocator, tensors included, likewise; None on a CPU.
        margin: Least free bytes of the whole device during the stage, of the rank with least; None on a CPU.
        predicted: What the plan says of `allocated`.
        full_seconds: What the real run will take for all blocks of the kind.
    """

    stage: str
    block: int | None
    unit: str | None
    seconds: float
    allocated: int | None
    reserved: int | None
    margin: int | None
    predicted: int | None
    full_seconds: float
    step_seconds: float | None = None
    """Of an optimizer step, where there were some."""
    by_rank: list[int] = field(default_factory=list)
    """`allocated` of every rank, in their order."""


def rehearse(
    trainer: Trainer,
    recipe: GSQModule,
    data: CalibrationData,
    model: StreamedModel,
    plan: MemoryPlan,
    listeners: list[StageListener],
    folder: Path,
) -> list[Rehearsed]:
    """Run one block of each kind of the plan.

    Args:
        trainer: The recipe's.
        recipe: The `model` section.
        data: The `data` section; its texts are not read.
        model: Of synthetic weights, on the device.
        plan: Of the real run.
        listeners: Told of the stages, the trainer's own callbacks among them.
        folder: For shards and hidden states; emptied before and after.

    Returns:
        Every stage in the order it ran.
    """
    job = plan.job
    ranks.from_first(lambda: shutil.rmtree(folder, ignore_errors=True))
    watch = RehearsalTimes()
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    clock = StageClock(model.device, [*listeners, watch])
    random = torch.Generator().manual_seed(0)

    def text(rows: int, length: int) -> torch.Tensor:
        return torch.randint(job.vocabulary, (rows, length), generator=random)

    # Of each rank: a batch of every size that the real run has
    rank, world_size = ranks.rank(), ranks.world_size()
    batches = max(2, TRAIN_TOKENS // (data.batch_size * job.seq_len))
    batches = min(STEPS, batches, data.steps_per_epoch)
    sizes = (max(batches * data.batch_size, job.forward_batch * world_size), 2 * job.microbatch, 2 * job.forward_batch)
    train, validation, gptq = (text(rows, job.seq_len) for rows in (sizes[0], *(n * world_size for n in sizes[1:])))
    samples = Samples.of(train, validation, gptq, data.batch_size, rank, world_size)
    indices = [kind.indices[0] for kind in plan.blocks]

    def loop(told: StageClock, part: Path, blocks: list[int], steps: int) -> None:
        block_loop = BlockLoop(
            recipe, model, samples, job.forward_batch, {job.microbatch}, told, part / f"activations{rank}",
            recipe.target, steps, pin_memory=data.pin_memory, indices=blocks,
        )  # fmt: skip
        block_loop.run(UnitShards(part / "units", recipe.grid), UnitRefiner(trainer, recipe, data))

    chosen, recipe.store = recipe.store, cast(Location, job.store)
    total = sum(map(len, (train, validation, gptq)))
    ballast = left_out(plan.store_bytes, total, job.samples, job.store, model.device)
    try:
        # Kernels are compiled and libraries loaded now, so that they do not count as the run's time.
        loop(StageClock(model.device, listeners), folder / "warm", indices[:1], 1)
        callbacks.append(watch)
        loop(clock, folder, indices, STEPS)
        del ballast
        at_once = min(data.sequences_at_once(job.evaluation_seq_len), job.evaluation_samples)
        evaluated = min(EVALUATION_BATCHES * at_once * world_size, max(job.evaluation_samples, world_size))
        texts = {"rehearsal": text(evaluated, job.evaluation_seq_len)}
        place = cast(Location, job.evaluation_store)
        scratch = folder / f"activations{rank}"

        units = UnitShards(folder / "units", recipe.grid)
        weights = OuterQuantizer(model, recipe, units).weights({})
        if recipe.final_pass.epochs:
            with clock.stage("final_pass"):
                rehearse_final_pass(
                    trainer, recipe.final_pass, data, samples, model, plan, units.weights(), weights
                )  # fmt: skip

        def states(part: Path, weights: Mapping[str, QuantizedWeight], blocks: list[int]) -> HiddenStates:
            return hidden_states(model, texts, at_once, part, weights, data.pin_memory, blocks, place)

        with closing(states(scratch / "original", {}, indices)) as original:
            original.leave_device()
            began = now(model.device)
            states(scratch, weights, []).close()
            embedding = now(model.device) - began
            ballast = left_out(
                plan.evaluation_store_bytes, evaluated, job.evaluation_samples, job.evaluation_store, model.device
            )
            with clock.stage("evaluate"):
                began = now(model.device)
                quantized = states(scratch, weights, indices)
                passing = now(model.device) - began - embedding
                with closing(quantized):
                    measure(quantized, original)
            del ballast
    finally:
        recipe.store = chosen
        callbacks[:] = [callback for callback in callbacks if callback is not watch]
        if ranks.is_first():
            shutil.rmtree(folder, ignore_errors=True)
    evaluation = Evaluation(evaluated, embedding, max(0.0, passing))
    return _summarize(watch, plan, recipe, data, samples, total, evaluation)


def left_out(stores: int, samples: int, of_run: int, place: str, device: torch.device) -> torch.Tensor:
    """Bytes on the device for hidden states of the samples that a rehearsal leaves out, where the run keeps them there.

    Args:
        stores: Bytes that the run's take.
        samples: Of the rehearsal, as many ranks as they are on.
        of_run: Those of the run.
    """
    missing = stores * max(0, of_run - samples) // max(1, of_run) if place == "device" else 0
    return torch.empty(missing, dtype=torch.uint8, device=device)


def _summarize(
    watch: RehearsalTimes,
    plan: MemoryPlan,
    recipe: GSQModule,
    data: CalibrationData,
    samples: Samples,
    rows: int,
    evaluation: Evaluation,
) -> list[Rehearsed]:
    job = plan.job
    steps = recipe.refinement.epochs * data.steps_per_epoch
    # The initial codes alone are a pass of their own, on the quantized stream.
    passes = 2 if recipe.measure_initial and recipe.refinement.epochs else 1
    found = []
    for stage, seconds, memory in watch.stages:
        count = next((len(kind.indices) for kind in plan.blocks if stage.block in kind.indices), 1)
        if stage.name == "refine":
            per_step = watch.step_seconds.get((stage.block, stage.unit), 0.0)  # 0 where the unit is not refined
            full = max(0.0, seconds - STEPS * per_step) + steps * per_step
        elif stage.name in ("embedding", "initialize", "head"):
            full = seconds * passes
        elif stage.name == "final_pass":
            times = FinalPassTimes(watch.step_seconds[None, None], *watch.around_fit[None, None])
            full = times.of_run(
                recipe.final_pass.epochs * data.steps_per_epoch, plan, data.validation_samples / samples.totals[1]
            )
        elif stage.name == "evaluate":
            full = evaluation.of_run(seconds, plan, passes)
        else:
            full = seconds * job.samples / rows * (1 if stage.name == "original" else passes)
        found.append(
            Rehearsed(
                stage.name, stage.block, stage.unit, seconds,
                None if memory is None else memory.peak_allocated,
                None if memory is None else memory.peak_reserved,
                None if memory is None else memory.margin,
                plan.predicted(stage.name, stage.block, stage.unit), full * count,
                watch.step_seconds.get((stage.block, stage.unit)) if stage.name in ("refine", "final_pass") else None,
            )
        )  # fmt: skip
    return _joined(ranks.gather(found))


def _joined(of_ranks: list[list[Rehearsed]]) -> list[Rehearsed]:
    """The ranks' rows as one list: each figure of the rank that it is worst for."""
    joined = []
    for rows in zip(*of_ranks, strict=True):
        row = replace(
            rows[0],
            seconds=max(other.seconds for other in rows),
            full_seconds=max(other.full_seconds for other in rows),
            step_seconds=max((other.step_seconds for other in rows if other.step_seconds is not None), default=None),
        )
        if row.allocated is not None:
            row.by_rank = [other.allocated or 0 for other in rows]
            row.allocated = max(row.by_rank)
            row.reserved = max(other.reserved or 0 for other in rows)
            row.margin = min((other.margin for other in rows if other.margin is not None), default=None)
        joined.append(row)
    return joined


def render(found: list[Rehearsed]) -> Table:
    """The table for the terminal."""
    table = Table(title="Rehearsal: one block of each kind")
    measured = "measured, by rank" if any(len(row.by_rank) > 1 for row in found) else "measured"
    for name in ("stage", "predicted", measured, "ratio", "left free", "seconds", "whole run"):
        table.add_column(name, justify="left" if name == "stage" else "right")
    for row in found:
        where = "".join(
            f", {part}" for part in (f"block {row.block}" if row.block is not None else "", row.unit) if part
        )
        ratio = f"{row.predicted / row.allocated:.3f}" if row.predicted and row.allocated else "-"
        predicted, margin = (format_bytes(n) if n is not None else "-" for n in (row.predicted, row.margin))
        table.add_row(
            row.stage + where,
            predicted,
            ", ".join(map(format_bytes, row.by_rank)) or "-",
            ratio,
            margin,
            f"{row.seconds:.2f}",
            f"{row.full_seconds / 60:.1f} min",
        )
    return table


def as_dict(found: list[Rehearsed]) -> Mapping[str, Any]:
    """For JSON: bytes and seconds."""
    return {
        "stages": [vars(row) for row in found],
        "hours": sum(row.full_seconds for row in found) / 3600,
        "host_peak": host_peak_bytes(),
    }
