"""What the subcommands do, from checks to summary. Nothing heavy is loaded before every check has passed."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from gsq_module import ranks
from gsq_module.coverage import measure_coverage
from gsq_module.evaluation import whole_model_perplexity
from gsq_module.export.engines import Verdict, as_lines, check_engines
from gsq_module.export.reader import open_checkpoint
from gsq_module.export.writer import ExportReport
from gsq_module.memory.statistics import format_bytes
from gsq_module.recipe_run import Run
from gsq_module.streaming import source
from gsq_module.streaming.model import StreamedModel
from gsq_module.summary import build_summary, print_summary

logger = logging.getLogger(__name__)


def fit(run: Run, model: StreamedModel, began: float) -> dict[str, Any]:
    """Quantize, export, evaluate, summarize.

    Args:
        run: Checked by `check_recipe`; its texts are tokenized.
        model: As `open_model` returned it.
        began: `time.perf_counter()` at the start of the command.

    Returns:
        The summary; on ranks other than the first, which write nothing, an empty one.
    """
    recipe, directory = run.recipe, run.directory
    coverage = measure_coverage(model, recipe)
    run.say("original: perplexity")
    perplexities = {"original": run.perplexity(model)}
    if recipe.measure_initial and recipe.refinement.epochs:
        run.say(f"initial: {recipe.initializer} alone, and its perplexity")
        initial = run.quantize_initially(model)
        perplexities["initial"] = run.perplexity(model, run.outer(model, initial).weights(initial.weights()))
    run.say("quantized: refinement")
    results = run.quantize(model)
    tuned = run.train_scales(model)
    run.say("quantized: export and perplexity")
    report = ranks.from_first(lambda: run.export(model, coverage))
    outer = run.outer(model, directory.units(recipe.grid))
    perplexities["quantized"] = run.perplexity(model, outer.weights(run.final_units.weights()))
    peaks = ranks.gather(max(run.clock.peak_memory.values(), default=0))
    # One process does what remains. Loading an export, compressed-tensors would want the help of all connected ones.
    ranks.finish()
    if not ranks.is_first():
        return {}
    dense_bytes = sum(parameter.numel() for parameter in model.model.parameters()) * (torch.finfo(run.dtype).bits // 8)
    if dense_bytes <= run.reload_max_gib * 2**30:
        perplexities["reloaded"] = run.reloaded_perplexity()
    seconds = time.perf_counter() - began
    predicted = run.plan.by_stage() if run.plan is not None else {}
    summary = build_summary(
        perplexities, coverage, results, report, run.clock, seconds, str(directory.export), predicted, peaks,
        tuned, outer.results(),
    )  # fmt: skip
    verdicts = _engines(directory.export)
    summary["engines"] = [{**asdict(verdict), "loads": verdict.loads} for verdict in verdicts]
    path = directory.write_summary(summary)
    for logger in run.trainer.loggers:
        flat = {f"perplexity/{text}/{name}": v for name, values in perplexities.items() for text, v in values.items()}
        logger.log_metrics(flat, step=run.trainer.global_step)
        logger.finalize("success")
    print_summary(summary)
    print(*as_lines(verdicts), sep="\n")
    print(f"summary: {path}")
    return summary


def export(run: Run) -> ExportReport:
    """Export the finished units of a run again; one process does it."""
    model = run.open_model()
    report = run.export(model, measure_coverage(model, run.recipe))
    print(f"{run.directory.export}: {len(report.files)} file(s), {format_bytes(report.total_bytes)}")
    print(*as_lines(_engines(run.directory.export)), sep="\n")
    return report


def _engines(folder: Path) -> list[Verdict]:
    """Verdicts on what has just been exported. Nothing is lost where they cannot be had."""
    try:
        return check_engines(folder)
    except Exception:
        logger.warning("%s could not be checked", folder, exc_info=True)
        return []


def check(run: Run, checkpoint: str | None) -> list[Verdict]:
    """Print which engines can load an export, and why not.

    Args:
        run: Checked by `check_recipe`.
        checkpoint: Folder; `original` for the recipe's own model, which is no export; None for the run's export.
    """
    verdicts = check_engines(_checkpoint_folder(run, checkpoint))
    print(*as_lines(verdicts), sep="\n")
    return verdicts


def _checkpoint_folder(run: Run, checkpoint: str | None) -> Path:
    """Folder of a checkpoint as `evaluate` is told it.

    Raises:
        FileNotFoundError: The run has no export yet.
    """
    folder = run.directory.export if checkpoint is None else Path(checkpoint)
    if checkpoint is None and not folder.is_dir():
        raise FileNotFoundError(
            f"run_dir={str(run.directory.path)!r}: there is no export at {folder} yet. Run fit first, "
            "or name another checkpoint: --checkpoint FOLDER, or --checkpoint original"
        )
    if checkpoint == "original":
        with ranks.first_alone():
            folder = source.fetch(run.recipe.path, run.recipe.gguf_file, run.directory.source)
    return folder


def evaluate(run: Run, checkpoint: str | None, whole_model: bool) -> dict[str, float]:
    """Perplexity of one checkpoint on the recipe's evaluation texts.

    Args:
        run: Checked by `check_recipe`.
        checkpoint: Folder; `original` for the recipe's own model; None for the run's export.
        whole_model: Through plain transformers instead of block by block.
    """
    folder = _checkpoint_folder(run, checkpoint)
    opened = open_checkpoint(folder)
    with ranks.first_alone():
        run.data.tokenize_evaluation(run.tokenizer(folder))
    if whole_model:
        result = whole_model_perplexity(folder, run.data.evaluation_tokens, run.device, run.dtype)
    else:
        result = run.perplexity(StreamedModel.from_checkpoint(opened, run.device, run.dtype))
    if ranks.is_first():
        for name, value in result.items():
            print(f"{folder} {name}: perplexity {value:.3f}")
    return result
