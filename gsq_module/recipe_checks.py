"""What is refused before anything heavy is loaded: recipes that cannot be carried out, loggers that cannot start."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher

from gsq_module.data.module import CalibrationData
from gsq_module.export.folder import check_destination
from gsq_module.metrics_log import log_once
from gsq_module.module import GSQModule
from gsq_module.problems import raise_collected
from gsq_module.run_directory import RunDirectory
from gsq_module.streaming import source

STRATEGIES = (SingleDeviceStrategy, DDPStrategy)
"""Of Lightning's, those whose fits leave every rank with the same relaxed weights."""


def check_recipe(
    trainer: Trainer, recipe: GSQModule, data: CalibrationData, directory: RunDirectory, texts: bool = True
) -> None:
    """Checks that need no weights, no network but for texts from the hub, and no tokenizer.

    Args:
        trainer: The one Trainer.
        recipe: The `model` section.
        data: The `data` section; its microbatch and the trainer's accumulation are made to agree.
        directory: The run directory.
        texts: Whether texts will be read; plans and rehearsals make up theirs.

    Raises:
        ValueError: Lists every problem.
    """
    problems: list[str] = []
    try:
        folder = source.locate(recipe.path, recipe.gguf_file)
        if folder is not None:
            check_places(recipe, directory, folder)
    except (ValueError, FileNotFoundError) as error:
        problems.append(str(error))
    try:
        data.check(texts)
    except ValueError as error:
        problems.append(str(error))
    problems += _share_batch(trainer, data)
    problems += data.check_ranks(trainer.world_size)
    strategy = trainer.strategy
    # Processes that are forked or spawned for one fit would end with it.
    if not isinstance(strategy, STRATEGIES) or isinstance(strategy.launcher, _MultiProcessingLauncher):
        problems.append(
            f"trainer.strategy: a run of blocks cannot be done by {type(strategy).__name__} as it is set up; "
            "leave it out, or name ddp or sharded"
        )
    raise_collected(problems)


def check_places(recipe: GSQModule, directory: RunDirectory, source_folder: Path) -> None:
    """Refuse an export over, and a run directory in, the folder of the model."""
    check_destination(source_folder, directory.export)
    source_folder, run_dir = source_folder.resolve(), directory.path.resolve()
    if recipe.gguf_file is None and source_folder in (run_dir, *run_dir.parents):
        raise ValueError(f"run_dir={str(run_dir)!r} lies in the folder of the model {source_folder}: choose another")


def _share_batch(trainer: Trainer, data: CalibrationData) -> list[str]:
    """Settle accumulate_grad_batches and microbatch_size: both only divide the batch of one optimizer step."""
    wished = trainer.accumulate_grad_batches
    world_size = trainer.world_size
    if wished > 1 and data.microbatch_size is None:
        if data.batch_size % (wished * world_size):
            return [
                f"trainer.accumulate_grad_batches={wished} does not divide data.batch_size={data.batch_size} "
                f"over {world_size} device(s)"
            ]
        data.microbatch_size = data.batch_size // (wished * world_size)
    try:
        needed = data.accumulate_grad_batches(world_size)
    except ValueError as error:
        return [str(error)]
    if wished not in (1, needed):
        return [
            f"trainer.accumulate_grad_batches={wished}, but data.batch_size={data.batch_size} in "
            f"microbatches of {data.microbatch_size} takes {needed}: leave one of them out"
        ]
    trainer.accumulate_grad_batches = needed
    return []


def start_loggers(loggers: Sequence[Logger]) -> None:
    """Make every logger connect now: a missing key or network must not show after hours. No row is logged twice."""
    for logger in loggers:
        try:
            _ = logger.experiment  # type: ignore[attr-defined]
        except Exception as error:
            raise ValueError(
                f"trainer.logger: {type(logger).__name__} cannot start ({type(error).__name__}: {error}). "
                "For W&B: wandb login, or work offline with --trainer.logger.init_args.offline true"
            ) from error
    log_once(loggers)
