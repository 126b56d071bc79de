"""What the subcommands do, from checks to summary. Nothing heavy is loaded before every check has passed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from gsq_module import ranks
from gsq_module.coverage import measure_coverage
from gsq_module.evaluation import whole_model_perplexity
from gsq_module.export.reader import open_checkpoint
from gsq_module.export.writer import ExportReport
from gsq_module.memory.statistics import format_bytes
from gsq_module.recipe_run import Run
from gsq_module.streaming import source
from gsq_module.streaming.model import StreamedModel
from gsq_module.summary import build_summary, print_summary


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
    run.take_up(began)
    coverage = measure_coverage(model, recipe)
    run.say("original: perplexity")
    perplexities = {"original": run.perplexity(model)}
    if recipe.measure_initial and recipe.refinement.epochs:
        run.say(f"initial: {recipe.initializer} alone, and its perplexity")
        initial = run.quantize_initially(model)
        perplexities["initial"] = run.perplexity(model, initial.weights())
    run.say("quantized: refinement")
    results = run.quantize(model)
    run.say("quantized: export and perplexity")
    shards = directory.units(recipe.grid)
    report = ranks.from_first(lambda: run.export(model, coverage))
    run.keep_progress()
    perplexities["quantized"] = run.perplexity(model, shards.weights())
    peaks = ranks.gather(max(run.clock.peak_memory.values(), default=0))
    # One process does what remains. Loading an export, compressed-tensors would want the help of all connected ones.
    ranks.finish()
    if not ranks.is_first():
        return {}
    dense_bytes = sum(parameter.numel() for parameter in model.model.parameters()) * (torch.finfo(run.dtype).bits // 8)
    if dense_bytes <= run.reload_max_gib * 2**30:
        perplexities["reloaded"] = run.reloaded_perplexity()
    predicted = run.plan.by_stage() if run.plan is not None else {}
    summary = build_summary(
        perplexities, coverage, results, report, run.clock, run.total_seconds, str(directory.export), predicted, peaks
    )
    path = directory.write_summary(summary)
    for logger in run.trainer.loggers:
        flat = {f"perplexity/{text}/{name}": v for name, values in perplexities.items() for text, v in values.items()}
        logger.log_metrics(flat, step=sum(result.steps for result in results))
        logger.finalize("success")
    directory.finish()
    run.keep_progress("done")
    print_summary(summary)
    print(f"summary: {path}")
    return summary


def export(run: Run, model: StreamedModel) -> ExportReport:
    """Export the finished units of a run again; one process does it.

    Args:
        run: Checked by `check_recipe`.
        model: As `open_model` returned it.
    """
    report = run.export(model, measure_coverage(model, run.recipe))
    print(f"{run.directory.export}: {len(report.files)} file(s), {format_bytes(report.total_bytes)}")
    return report


def evaluate(run: Run, checkpoint: str | None, whole_model: bool) -> dict[str, float]:
    """Perplexity of one checkpoint on the recipe's evaluation texts.

    Args:
        run: Checked by `check_recipe`.
        checkpoint: Folder; `original` for the recipe's own model; None for the run's export.
        whole_model: Through plain transformers instead of block by block.
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
