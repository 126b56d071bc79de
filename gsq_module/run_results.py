"""What a run comes to: the export, the figures of original and quantized model, and texts continued by both."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from gsq_module.continuations import choose_prompts, continue_greedily
from gsq_module.coverage import Coverage
from gsq_module.evaluation import HiddenStates, hidden_states, measure, whole_model_perplexity
from gsq_module.export.report import ExportReport
from gsq_module.export.writer import export_checkpoint
from gsq_module.measures import Measured
from gsq_module.problems import UserError
from gsq_module.recipe_run import Run
from gsq_module.storage import StorageError
from gsq_module.streaming.model import StreamedModel
from gsq_module.verification import verify_export


def write_export(run: Run, model: StreamedModel, coverage: Coverage) -> ExportReport:
    """Write the finished units, embedding and head as a checkpoint, and read it back.

    Raises:
        UserError: Units are missing, or the destination is refused.
        StorageError: The disk is full, or gives back something else than was written.
    """
    outer = run.outer(model, run.directory.units(run.recipe.grid))
    weights = outer.weights(run.directory.units(run.recipe.grid).weights())
    missing = [name for name in coverage.quantized if name not in weights]
    if missing:
        raise UserError(
            f"run_dir={str(run.directory.path)!r} lacks {len(missing)} of {len(coverage.quantized)} quantized "
            f"layers ({', '.join(missing[:3])} ...): the run is not finished. Start fit again, same --config"
        )
    if run.recipe.final_pass.epochs and run.final_outcome() is None:
        raise UserError(
            f"run_dir={str(run.directory.path)!r}: the final pass (model.final_pass) is not finished. Start fit again, "
            "same --config; or leave the pass out: --model.final_pass.epochs 0"
        )
    weights = outer.weights(run.final_units.weights())
    with run.clock.stage("export"):
        report = export_checkpoint(
            model.checkpoint,
            run.directory.export,
            weights,
            run.recipe.grid,
            run.recipe.group_size,
            ignore=coverage.float_linears,
            tied=[f"{model.head_path}.weight"] if model.is_tied else [],
            outer=list(outer.parts.values()),
        )
        problems = verify_export(run.directory.export, run.final_units.weights())
        if problems:
            listed = "\n  ".join(problems)
            raise StorageError(f"the export does not read back as it was written:\n  {listed}\nIs the disk failing?")
        return report


def measure_original(run: Run, model: StreamedModel) -> tuple[HiddenStates, dict[str, Measured]]:
    """The original's figures, and its hidden states, for others to be compared with; the caller closes them."""
    with run.clock.stage("evaluate"):
        states = _hidden_states(run, model, run.scratch / "original")
        measured = measure(states)
        states.leave_device()
        return states, measured


def measure_weights(
    run: Run, model: StreamedModel, weights: Mapping[str, Any] | None = None, original: HiddenStates | None = None
) -> dict[str, Measured]:
    """Figures by text.

    Args:
        run: The run.
        model: The model.
        weights: Hard weights that stand in for its own.
        original: What it is compared with.
    """
    with run.clock.stage("evaluate"), closing(_hidden_states(run, model, run.scratch, weights)) as states:
        return measure(states, original)


def _hidden_states(
    run: Run, model: StreamedModel, scratch: Path, weights: Mapping[str, Any] | None = None
) -> HiddenStates:
    return hidden_states(
        model,
        run.data.evaluation_tokens,
        run.data.sequences_at_once(run.data.evaluation_seq_len),
        scratch,
        weights,
        run.data.pin_memory,
        location=run.recipe.store,
    )


def measure_whole_model(run: Run, folder: Path) -> dict[str, Measured]:
    """Figures by text of a checkpoint, loaded whole by plain transformers."""
    perplexities = whole_model_perplexity(folder, run.data.evaluation_tokens, run.device, run.dtype)
    return {text: Measured(value) for text, value in perplexities.items()}


def continue_texts(run: Run, original: Path) -> list[dict[str, str]]:
    """What the original (its folder) and the export make of the beginnings of evaluation texts."""
    names, prompts = zip(*choose_prompts(run.data.evaluation_tokens), strict=True)
    tokenizer = run.tokenizer(original)
    rows = torch.stack(prompts)
    with run.clock.stage("reload"):
        both = [
            continue_greedily(folder, rows, tokenizer, run.device, run.dtype)
            for folder in (original, run.directory.export)
        ]
    columns = names, tokenizer.batch_decode(rows, skip_special_tokens=True), *both
    keys = ("text", "prompt", "original", "quantized")
    return [dict(zip(keys, row, strict=True)) for row in zip(*columns, strict=True)]
