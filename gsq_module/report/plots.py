"""The report's pictures, each a matplotlib Figure, or None where the run has nothing to show in it."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from gsq_module.memory.statistics import GIB
from gsq_module.report.record import Record

BEFORE, AFTER, PREDICTED, MEASURED = "#9aa5b1", "#1f6fb4", "#c9d6e3", "#1f6fb4"


def png(figure: Figure) -> bytes:
    """A picture as a file."""
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def errors(record: Record) -> Figure | None:
    """Relative error of each unit before and after refinement, by block."""
    figure, panels = _panels_by_kind(record)
    for ax, kind, units in panels:
        blocks = [unit["block"] for unit in units]
        before, after = ([unit[key] for unit in units] for key in ("initial_error", "refined_error"))
        ax.plot(blocks, before, "o--", color=BEFORE, label="initial codes", markersize=4)
        ax.plot(blocks, after, "o-", color=AFTER, label="refined", markersize=4)
        kept = [unit for unit in units if unit["kept"] == "initial"]
        if kept:
            places = [unit["block"] for unit in kept], [unit["refined_error"] for unit in kept]
            ax.plot(*places, "x", color="#b33", label="kept its initial codes", markersize=8)
        positive = [value for value in before + after if value]
        if positive and max(positive) > 20 * min(positive):
            ax.set_yscale("log")
        _label(ax, kind, "block", "relative squared error")
        ax.legend(frameon=False)
    return figure


def codes_changed(record: Record) -> Figure | None:
    """Share of each unit's codes that refinement has changed, by block."""
    figure, panels = _panels_by_kind(record)
    for ax, kind, units in panels:
        ax.bar([unit["block"] for unit in units], [unit["codes_changed"] for unit in units], color=AFTER)
        ax.yaxis.set_major_formatter(PercentFormatter(1.0))
        _label(ax, kind, "block", "codes changed")
    return figure


def losses(record: Record) -> Figure | None:
    """`train/error` of each unit over its steps, coloured by block."""
    curves = record.loss_curves()
    if not curves:
        return None
    figure, (ax,) = _panels(1)
    last = max(1, *(block for block, _, _ in curves))
    colours = ScalarMappable(Normalize(0, last), colormaps["viridis"])
    for block, steps, values in curves:
        style = "-" if len(steps) > 1 else "."
        ax.plot(steps, values, style, color=colormaps["viridis"](block / last), linewidth=1)
    everything = [value for _, _, values in curves for value in values]
    if min(everything) > 0 and max(everything) > 20 * min(everything):
        ax.set_yscale("log")
    _label(ax, "", "optimizer step of the unit", "relative squared error, relaxed weights")
    figure.colorbar(colours, ax=ax, label="block", ticks=MaxNLocator(integer=True))
    return figure


def memory_by_stage(record: Record) -> Figure | None:
    """Highest allocated device memory of each stage, predicted and measured."""
    peaks = record.summary["peak_memory"]
    measured, predicted = peaks["device_bytes_by_stage"], peaks["predicted_bytes_by_stage"]
    stages = list(dict.fromkeys([*predicted, *measured]))
    if not stages:
        return None
    figure, (ax,) = _panels(1)
    places = range(len(stages))
    for shift, values, colour, label in (
        (-0.2, predicted, PREDICTED, "predicted"),
        (0.2, measured, MEASURED, "measured"),
    ):
        if values:
            heights = [values.get(stage, 0) / GIB for stage in stages]
            ax.bar([place + shift for place in places], heights, 0.4, color=colour, label=label)
    ax.set_xticks(list(places), stages, rotation=30, ha="right")
    _label(ax, "", "", "peak allocated, GiB", integers=False)
    ax.legend(frameon=False)
    return figure


def memory_over_time(record: Record) -> Figure | None:
    """Device memory while units are refined, and what the plan allows for it."""
    names = {
        "memory/allocated_gib": "allocated",
        "memory/peak_allocated_gib": "peak allocated since the stage began",
        "memory/device_used_gib": "in use on the device, other processes included",
    }
    found = {label: record.series(name) for name, label in names.items()}
    found = {label: series for label, series in found.items() if series[0]}
    if not found:
        return None
    figure, (ax,) = _panels(1)
    for label, (steps, values) in found.items():
        ax.plot(steps, values, label=label, linewidth=1)
    predicted = record.summary["peak_memory"]["predicted_bytes_by_stage"].get("refine")
    if predicted:
        ax.axhline(predicted / GIB, color="#b33", linestyle=":", label="predicted peak of refine")
    ax.set_ylim(bottom=0)
    _label(ax, "", "optimizer step of the run", "GiB")
    ax.legend(frameon=False)
    return figure


def seconds_by_stage(record: Record) -> Figure | None:
    """Where the time went."""
    seconds = {name: value for name, value in record.summary["seconds"].items() if name != "total"}
    if not seconds:
        return None
    figure, (ax,) = _panels(1, height=0.6 + 0.32 * len(seconds))
    names = sorted(seconds, key=lambda name: seconds[name])
    bars = ax.barh(names, [seconds[name] for name in names], color=AFTER)
    ax.bar_label(bars, fmt=" {:.3g} s", fontsize=8)
    ax.margins(x=0.1)
    _label(ax, "", "seconds", "", integers=False)
    return figure


def _panels_by_kind(record: Record) -> tuple[Figure | None, list[tuple[Axes, str, list[dict[str, Any]]]]]:
    """A panel for each kind of unit, with its units; no figure where there are none."""
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for unit in record.summary["units"]:
        by_kind.setdefault(unit["unit"], []).append(unit)
    if not by_kind:
        return None, []
    figure, axes = _panels(len(by_kind))
    return figure, [(ax, kind, units) for ax, (kind, units) in zip(axes, by_kind.items(), strict=True)]


def _panels(count: int, height: float = 3.2) -> tuple[Figure, Sequence[Axes]]:
    # Without pyplot: no window, no global state.
    figure = Figure(figsize=(8.4, height), layout="constrained")
    return figure, figure.subplots(1, count, squeeze=False)[0]


def _label(ax: Axes, title: str, x: str, y: str, integers: bool = True) -> None:
    ax.set_title(title)
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    ax.grid(alpha=0.25)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    if integers:
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
