"""What the subcommands do, from checks to summary. Nothing heavy is loaded before every check has passed."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.loggers import WandbLogger

from gsq_module import ranks, tasks
from gsq_module.coverage import measure_coverage
from gsq_module.export.engines import Verdict, as_lines, check_engines
from gsq_module.export.reader import open_checkpoint
from gsq_module.export.report import ExportReport
from gsq_module.measures import Measured
from gsq_module.memory.statistics import format_bytes
from gsq_module.recipe_run import Run
from gsq_module.run_results import continue_texts, measure_original, measure_weights, measure_whole_model, write_export
from gsq_module.run_units import quantize, quantize_initially, train_final_scales
from gsq_module.streaming import source
from gsq_module.streaming.model import StreamedModel
from gsq_module.summary import build_summary, flat_figures, print_summary

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
    run.take_up(began)
    coverage = measure_coverage(model, recipe)
    run.say("original: perplexity")
    original, measured = measure_original(run, model)
    with closing(original):
        figures = {"original": measured}
        if recipe.measure_initial and recipe.refinement.epochs:
            run.say(f"initial: {recipe.initializer} alone, and its perplexity")
            initial = quantize_initially(run, model)
            figures["initial"] = measure_weights(
                run, model, run.outer(model, initial).weights(initial.weights()), original
            )
        run.say("quantized: refinement")
        results = quantize(run, model)
        tuned = train_final_scales(run, model)
        run.say("quantized: export and perplexity")
        report = ranks.from_first(lambda: write_export(run, model, coverage))
        run.keep_progress()
        outer = run.outer(model, directory.units(recipe.grid))
        figures["quantized"] = measure_weights(run, model, outer.weights(run.final_units.weights()), original)
    peaks = ranks.gather(max(run.clock.peak_memory.values(), default=0))
    # One process does what remains. Loading an export, compressed-tensors would want the help of all connected ones.
    ranks.finish()
    if not ranks.is_first():
        return {}
    continuations: list[dict[str, str]] = []
    dense_bytes = sum(parameter.numel() for parameter in model.model.parameters()) * (torch.finfo(run.dtype).bits // 8)
    if dense_bytes <= run.reload_max_gib * 2**30:
        with run.clock.stage("reload"):
            figures["reloaded"] = measure_whole_model(run, directory.export)
        continuations = continue_texts(run, model.checkpoint.directory)
    predicted = run.plan.by_stage() if run.plan is not None else {}
    summary = build_summary(
        figures, coverage, results, report, run.clock, run.total_seconds, str(directory.export), predicted, peaks,
        tuned, outer.results(),
    )  # fmt: skip
    summary["continuations"] = continuations
    verdicts = _engines(directory.export)
    summary["engines"] = [{**asdict(verdict), "loads": verdict.loads} for verdict in verdicts]
    path = directory.write_summary(summary)
    _report(run)
    for logger in run.trainer.loggers:
        logger.log_metrics(flat_figures(figures), step=run.last_step(results))
        logger.finalize("success")
    directory.finish()
    run.keep_progress("done")
    print_summary(summary)
    _print_engines(directory.export, verdicts)
    print(f"summary: {path}")
    return summary


def _print_engines(folder: Path, verdicts: Sequence[Verdict]) -> None:
    """What can load an export, and the command that serves it."""
    print(*as_lines(verdicts), sep="\n")
    if any(verdict.engine == "vLLM" and verdict.loads for verdict in verdicts):
        print(f"to serve it: vllm serve {folder}")


def _report(run: Run) -> None:
    """The report in the run directory, and on W&B. What is written is never lost for want of a picture."""
    if importlib.util.find_spec("matplotlib") is None:
        again = f"python -m gsq_module.report {run.directory.path}"
        print(f"report: not written, matplotlib is not installed. Next: pip install matplotlib, then {again}")
        return
    from gsq_module.report.page import draw, write_page
    from gsq_module.report.record import Record

    for logger in run.trainer.loggers:
        logger.save()  # the CSV log is read
    record = Record.of(run.directory.path)
    drawn = draw(record)
    print(f"report: {write_page(run.directory.path, record, drawn)}")
    for logger in run.trainer.loggers:
        if isinstance(logger, WandbLogger):
            from gsq_module.report.wandb_log import log_report

            log_report(logger, record, drawn, run.trainer.global_step)


def export(run: Run, model: StreamedModel) -> ExportReport:
    """Export the finished units of a run again; one process does it.

    Args:
        run: Checked by `check_recipe`.
        model: As `open_model` returned it.
    """
    report = write_export(run, model, measure_coverage(model, run.recipe))
    print(f"{run.directory.export}: {len(report.files)} file(s), {format_bytes(report.total_bytes)}")
    _print_engines(run.directory.export, _engines(run.directory.export))
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
    folder = _checkpoint_folder(run, checkpoint)
    verdicts = check_engines(folder)
    _print_engines(folder, verdicts)
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


def evaluate(run: Run, checkpoint: str | None, whole_model: bool, compare: bool) -> dict[str, Measured]:
    """Figures of one checkpoint on the recipe's evaluation texts.

    Args:
        run: Checked by `check_recipe`.
        checkpoint: Folder; `original` for the recipe's own model; None for the run's export.
        whole_model: Through plain transformers instead of block by block.
        compare: Also with the recipe's own model, where it is another one and both go block by block.
    """
    folder = _checkpoint_folder(run, checkpoint)
    compare = compare and checkpoint != "original" and not whole_model
    own = _checkpoint_folder(run, "original") if compare else folder
    opened = open_checkpoint(folder)
    with ranks.first_alone():
        run.data.tokenize_evaluation(run.tokenizer(folder))
    if whole_model:
        result = measure_whole_model(run, folder)
    else:
        model = StreamedModel.from_checkpoint(opened, run.device, run.dtype)
        with ExitStack() as cleanup:
            original = None
            if compare:
                own_model = StreamedModel.from_checkpoint(open_checkpoint(own), run.device, run.dtype)
                _check_vocabulary(model, own_model)
                original, _ = measure_original(run, own_model)
                cleanup.callback(original.close)
            result = measure_weights(run, model, original=original)
    if ranks.is_first():
        for name, figures in result.items():
            print(f"{folder} {name}: perplexity {figures.perplexity:.3f}")
            if figures.kl_divergence is not None:
                print(
                    f"{folder} {name}: KL divergence to the original {figures.kl_divergence:.4f} nats a token, "
                    f"the same top token at {figures.top1_agreement:.2%} of the positions"
                )
    return result


def evaluate_tasks(run: Run, checkpoint: str | None, names: list[str]) -> dict[str, dict[str, float]]:
    """Tasks of lm-evaluation-harness on what `evaluate` has measured; one process does it."""
    folder = _checkpoint_folder(run, checkpoint)
    results = tasks.evaluate_tasks(folder, names, run.device, run.dtype)
    for task, figures in results.items():
        print(f"{folder} {task}: " + ", ".join(f"{name} {value:.4f}" for name, value in figures.items()))
    return results


def _check_vocabulary(model: StreamedModel, original: StreamedModel) -> None:
    sizes = [one.embedding.num_embeddings for one in (model, original)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"--checkpoint: {model.checkpoint.directory} knows {sizes[0]} tokens, the recipe's model {sizes[1]}: "
            "their predictions cannot be compared. Next: the same command with --compare false"
        )
