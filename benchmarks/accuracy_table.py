"""Rows of benchmarks/accuracy.py as a markdown table: means over seeds, and their spread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import mean
from typing import Any

Row = dict[str, Any]
MEASURES = {"perplexity": "{:.2f}", "kl_divergence": "{:.3f}", "top1_agreement": "{:.1%}"}


def table(rows: Sequence[Row]) -> str:
    """One line a setting: bits and method; columns are the measures by text, seconds and memory.

    Args:
        rows: As `accuracy.py` writes them, of one budget.
    """
    texts = list(rows[0]["perplexity"])
    columns = [f"{text}: {name.replace('_', ' ')}" for text in texts for name in MEASURES]
    columns += ["seconds, refinement", "peak GiB, device", "seeds"]
    lines = [_line(["bits", "method", *columns]), _line(["---"] * (2 + len(columns)))]
    originals = [row["perplexity"][text]["original"] for text in texts for row in rows[:1]]
    cells = [cell for value in originals for cell in (f"{value:.2f}", "0", "100%")]
    lines.append(_line(["16", "original", *cells, "", "", ""]))
    settings = dict.fromkeys((row["bits"], row["method"]) for row in rows)
    for bits, method in settings:
        same = [row for row in rows if (row["bits"], row["method"]) == (bits, method)]
        cells = [
            _spread((row[name][text]["quantized"] for row in same), form.format)
            for text in texts
            for name, form in MEASURES.items()
        ]
        whole = [row for row in same if not row["resumed"]]
        seconds = _spread((row["seconds"].get("refine", 0.0) for row in whole), "{:.0f}".format) if whole else "resumed"
        peak = max(row["peak_device_bytes"] for row in same)
        cells += [seconds, f"{peak / 2**30:.2f}" if peak else "not counted", str(len(same))]
        lines.append(_line([bits, method, *cells]))
    return "\n".join(lines)


def _spread(values: Iterable[float], form: Callable[[float], str]) -> str:
    """The mean, and the lowest and the highest where there are several."""
    numbers = list(values)
    text = form(mean(numbers))
    return text if len(numbers) == 1 else f"{text} ({form(min(numbers))} to {form(max(numbers))})"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
