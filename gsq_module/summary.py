"""summary.json and the table on the terminal."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from gsq_module.coverage import Coverage
from gsq_module.export.report import ExportReport
from gsq_module.final_pass import TunedScales
from gsq_module.measures import Measured
from gsq_module.memory.stages import StageClock
from gsq_module.memory.statistics import format_bytes, host_peak_bytes
from gsq_module.unit_shards import UnitResult

TABLES = (
    ("perplexity (lower is better)", "perplexity_by_text", ".2f"),
    ("KL to the original, nats", "kl_divergence_by_text", ".4f"),
    ("top token as original", "top1_agreement_by_text", ".1%"),
)
"""Title, key in the summary and format of each figure by text and model."""


def device_name(device: torch.device) -> str:
    """What the figures were measured on."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def flat_figures(figures: Mapping[str, Mapping[str, Measured]]) -> dict[str, float]:
    """Figures by `measure/text/model`, as loggers take them."""
    return {
        f"{measure}/{text}/{model}": value
        for model, texts in figures.items()
        for text, measured in texts.items()
        for measure, value in asdict(measured).items()
        if value is not None
    }


def build_summary(
    figures: Mapping[str, Mapping[str, Measured]],
    coverage: Coverage,
    units: Sequence[UnitResult],
    report: ExportReport | None,
    clock: StageClock,
    seconds: float,
    export_dir: str,
    predicted: Mapping[str, int],
    device_peaks: Sequence[int] = (),
    tuned: TunedScales | None = None,
    outer: Sequence[UnitResult] = (),
) -> dict[str, Any]:
    """Collect what a run came to.

    Args:
        figures: By model (`original`, `initial`, `quantized`, `reloaded`) and text; the first is the headline.
        coverage: Of the recipe.
        units: Results in block order.
        report: Of the export; None where none was written.
        clock: Of the run.
        seconds: Of the whole command.
        export_dir: Where the export is.
        predicted: The memory plan's peaks by stage, in bytes; empty without a plan.
        device_peaks: Highest allocated bytes of each rank's device; of no interest where there is one.
        tuned: Of the final pass, where there was one.
        outer: Results of embedding and head, where they are quantized.
    """
    texts = list(next(iter(figures.values()), {}))

    def by_text(measure: str) -> dict[str, dict[str, float]]:
        return {
            text: {
                model: value
                for model, measured in figures.items()
                if (value := getattr(measured[text], measure)) is not None
            }
            for text in texts
        }

    perplexities = by_text("perplexity")
    return {
        "perplexity": perplexities[texts[0]] if texts else {},
        "perplexity_text": texts[0] if texts else None,
        "perplexity_by_text": perplexities,
        "kl_divergence_by_text": by_text("kl_divergence"),
        "top1_agreement_by_text": by_text("top1_agreement"),
        "bits_per_weight": report.bits_per_weight if report else None,
        "average_bits": report.average_bits if report else None,
        "coverage": {
            "quantized_parameters": coverage.quantized_parameters,
            "quantized_fraction": coverage.fraction,
            "float_parameters": coverage.float_parameters,
        },
        "units": [asdict(unit) for unit in units],
        "outer": [asdict(part) for part in outer],
        "final_pass": asdict(tuned) | {"kept": tuned.improved} if tuned else None,
        "seconds": {"total": seconds, **clock.seconds},
        "peak_memory": {
            "host_bytes": host_peak_bytes(),
            "device_bytes_by_stage": clock.peak_memory,
            "predicted_bytes_by_stage": dict(predicted),
        }
        | ({"device_bytes_by_rank": list(device_peaks)} if len(device_peaks) > 1 else {}),
        "device": device_name(clock.device),
        "export": {"path": export_dir, **asdict(report)} if report else None,
    }


def around_the_units(summary: Mapping[str, Any]) -> list[str]:
    """A line for each of embedding, head and final pass, where there are any."""
    lines = []
    for part in summary["outer"]:
        solved = f" rounded, {part['refined_error']:.6f} by GPTQ" if part["kept"] == "refined" else ""
        lines.append(f"{part['unit']}: relative error {part['initial_error']:.6f}{solved}")
    if summary["final_pass"]:
        tuned = summary["final_pass"]
        lines.append(
            f"final pass: KL divergence from the original {tuned['before']:.4f} -> {tuned['after']:.4f}"
            + ("" if tuned["kept"] else "; the scales stay as they were")
        )
    return lines


def names_by_note(units: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """What was remarked on units of the summary, and on which modules: many have the same said of them."""
    names: dict[str, list[str]] = {}
    for unit in units:
        for name, note in unit["notes"].items():
            names.setdefault(note, []).append(name)
    return names


def print_summary(summary: Mapping[str, Any], console: Console | None = None) -> None:
    """The summary as tables."""
    console = console or Console()
    for title, key, form in TABLES:
        by_text = summary[key]
        models = list(next(iter(by_text.values()), {}))
        if not models:
            continue
        table = Table(title=title, title_justify="left")
        table.add_column("text")
        for model in models:
            table.add_column(model, justify="right")
        for text, values in by_text.items():
            table.add_row(text, *(format(values[model], form) for model in models))
        console.print(table)
    units = summary["units"]
    kept = sum(unit["kept"] == "initial" for unit in units)
    if units:
        before = sum(unit["initial_error"] for unit in units) / len(units)
        after = sum(unit["refined_error"] for unit in units) / len(units)
        console.print(
            f"{len(units)} units: mean relative error {before:.4f} -> {after:.4f}"
            + (f"; {kept} kept their initial codes" if kept else "")
        )
    for line in around_the_units(summary):
        console.print(line)
    for note, names in names_by_note([*units, *summary["outer"]]).items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        console.print(f"  {names[0]}{more}: {note}")
    coverage = summary["coverage"]
    console.print(f"quantized: {coverage['quantized_fraction']:.1%} of the parameters; in float:")
    for reason, count in coverage["float_parameters"].items():
        console.print(f"  {count:,} {reason}")
    if summary["export"]:
        export = summary["export"]
        console.print(
            f"export: {export['path']}  {format_bytes(export['total_bytes'])}, {summary['bits_per_weight']:.2f} bits a "
            f"quantized weight, {summary['average_bits']:.2f} bits a parameter"
        )
    seconds = summary["seconds"]
    stages = ", ".join(f"{name} {value:.0f}" for name, value in seconds.items() if name != "total" and value >= 0.5)
    console.print(f"seconds on {summary['device']}: {seconds['total']:.0f} ({stages})")
    peaks = summary["peak_memory"]
    device = max(peaks["device_bytes_by_stage"].values(), default=0)
    console.print(
        f"peak memory: host {format_bytes(peaks['host_bytes'])}"
        + (f", device {format_bytes(device)} allocated" if device else "")
    )
    for name, measured in peaks["device_bytes_by_stage"].items():
        if name in peaks["predicted_bytes_by_stage"] and measured:
            plan = peaks["predicted_bytes_by_stage"][name]
            console.print(f"  {name}: {format_bytes(plan)} predicted, {format_bytes(measured)} measured")
