"""The units of a run: the block loop with the recipe's settings, and the final pass over their scales."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from gsq_module import ranks
from gsq_module.data.samples import Samples
from gsq_module.final_pass import TunedScales, save_tuned, train_scales
from gsq_module.pipeline import BlockLoop
from gsq_module.recipe_run import Run
from gsq_module.refinement import UnitRefiner
from gsq_module.snapshots import Snapshots
from gsq_module.streaming.model import StreamedModel
from gsq_module.unit_shards import UnitResult, UnitShards


def quantize(run: Run, model: StreamedModel) -> list[UnitResult]:
    """The block loop of the recipe."""
    steps = run.recipe.refinement.epochs * run.data.steps_per_epoch
    samples = _samples(run, run.data.train if steps else run.data.train[:0])
    return _loop(run, model, samples, run.recipe.target, steps, run.directory.units(run.recipe.grid))


def quantize_initially(run: Run, model: StreamedModel) -> UnitShards:
    """The same loop without refinement: what the initializer alone comes to."""
    samples = _samples(run, run.data.train[:0])
    shards = run.directory.initial_units(run.recipe.grid)
    _loop(run, model, samples, "original_unit", 0, shards)
    return shards


def train_final_scales(run: Run, model: StreamedModel) -> TunedScales | None:
    """The final pass, unless it is done; None where the recipe has none."""
    if not run.recipe.final_pass.epochs:
        return None
    units, tuned = run.directory.units(run.recipe.grid), run.directory.tuned_units(run.recipe.grid)
    outcome = run.final_outcome()
    if outcome is None:
        run.say("quantized: scales of the whole model")
        samples = _samples(run, run.data.train)
        other = StreamedModel.from_checkpoint(model.checkpoint, model.device, model.dtype)
        steps = run.recipe.final_pass.epochs * run.data.steps_per_epoch
        with run.clock.stage("final_pass"):
            outcome, weights = train_scales(
                run.trainer, run.recipe.final_pass, run.data, samples, model, other, units.weights(),
                run.outer(model, units).weights({}), steps,
            )  # fmt: skip
        ranks.from_first(partial(save_tuned, outcome, weights, units, tuned, run.recipe.final_pass))
    return outcome


def _samples(run: Run, train: Tensor) -> Samples:
    data = run.data
    return Samples.of(train, data.validation, data.gptq, data.batch_size, ranks.rank(), ranks.world_size())


def _loop(
    run: Run, model: StreamedModel, samples: Samples, target: str, steps: int, shards: UnitShards
) -> list[UnitResult]:
    loop = BlockLoop(
        recipe=run.recipe,
        model=model,
        samples=samples,
        batch_size=run.data.sequences_at_once(run.data.seq_len),
        loader_sizes=run.data.microbatch_sizes(ranks.rank(), ranks.world_size()),
        clock=run.clock,
        scratch=run.scratch,
        target=target,
        steps=steps,
        on_unit=partial(_log_refined if steps else _tell, run),
        pin_memory=run.data.pin_memory,
        snapshots=Snapshots(run.directory.snapshots / shards.directory.name, run.recipe.snapshot_every, samples.tokens),
    )
    units = [(index, kind) for index in range(loop.num_blocks) for kind in run.recipe.units]
    finished = [shards.result(*unit) is not None for unit in units]
    refiner = UnitRefiner(run.trainer, run.recipe, run.data)
    refiner.count_from(finished.index(False) * steps if False in finished else len(units) * steps)
    run.clock.num_blocks = loop.num_blocks
    run.progress.begin_run(len(units), sum(finished))
    try:
        return loop.run(shards, run.refine or refiner)
    finally:
        run.progress.end_run()


def _tell(run: Run, result: UnitResult) -> None:
    text = f"error {result.initial_error:.4f}"
    if result.steps:
        text += f" -> {result.refined_error:.4f}" if result.kept == "refined" else ", initial codes kept"
    run.progress.end_unit(text)
    run.keep_progress()


def _log_refined(run: Run, result: UnitResult) -> None:
    _tell(run, result)
    metrics = {
        "unit/block": float(result.block),
        "unit/initial_error": result.initial_error,
        "unit/refined_error": result.refined_error,
        "unit/codes_changed": result.codes_changed,
    }
    for logger in run.trainer.loggers:
        logger.log_metrics(metrics, step=run.trainer.global_step)
