"""Rows of benchmarks/accuracy.py as markdown tables: means over seeds, and the lowest and the highest.

`python benchmarks/accuracy_table.py docs/accuracy.jsonl` prints those of the README and of docs/accuracy.md.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

Row = dict[str, Any]
BITS = ("1", "ternary", "2", "3", "4")


def read_rows(file: Path) -> list[Row]:
    """Those of a file of JSON lines; none where there is no such file."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def document(rows: Sequence[Row]) -> str:
    """Both tables of each budget, under what the budget changes of the recipe."""
    parts = []
    for budget in dict.fromkeys(row["budget"] for row in rows):
        same = [row for row in rows if row["budget"] == budget]
        changes = " ".join(same[0]["changes"])
        parts += [f"### `{changes}`" if changes else "### The recipe as it is", perplexities(same), agreement(same)]
    return "\n\n".join(parts)


def perplexities(rows: Sequence[Row]) -> str:
    """Perplexity by text, what is left of it on the first one, and what it cost.

    Args:
        rows: As `accuracy.py` writes them, of one budget.
    """
    texts = list(rows[0]["perplexity"])
    # Times of runs side by side, or of a part of a run, say nothing.
    timed = [row for row in rows if row["processes"] == 1 and not row["resumed"]]
    heads = ["bits", "method", *texts, f"ln(it / original), {texts[0]}"]
    heads += [*(["refinement, s"] if timed else []), "device peak, GiB", "seeds"]
    original = [f"{rows[0]['perplexity'][text]['original']:.2f}" for text in texts]
    original += ["0", *[""] * (len(heads) - 3 - len(texts))]
    lines = [*_head(heads), _line(["16", "original", *original])]
    for bits, method, same in _settings(rows):
        cells = [_spread((row["perplexity"][text]["quantized"] for row in same), _perplexity) for text in texts]
        values = [row["perplexity"][texts[0]] for row in same]
        cells.append(_spread((math.log(value["quantized"] / value["original"]) for value in values), "{:.3f}".format))
        if timed:
            seconds = [row["seconds"].get("refine", 0.0) for row in same if row in timed]
            cells.append(_spread(seconds, "{:.0f}".format) if seconds else "-")
        peak = max(row["peak_device_bytes"] for row in same)
        cells += [f"{peak / 2**30:.2f}" if peak else "-", str(len(same))]
        lines.append(_line([bits, method, *cells]))
    return "\n".join(lines)


def agreement(rows: Sequence[Row]) -> str:
    """KL divergence from the original's predictions, and how often the likeliest token is the original's, by text."""
    texts = list(rows[0]["perplexity"])
    measures = {"kl_divergence": ("KL", "{:.3f}"), "top1_agreement": ("top token", "{:.1%}")}
    lines = _head(["bits", "method", *(f"{short}, {text}" for text in texts for short, _ in measures.values())])
    for bits, method, same in _settings(rows):
        cells = [
            _spread((row[name][text]["quantized"] for row in same), form.format)
            for text in texts
            for name, (_, form) in measures.items()
        ]
        lines.append(_line([bits, method, *cells]))
    return "\n".join(lines)


def _settings(rows: Sequence[Row]) -> Iterator[tuple[str, str, list[Row]]]:
    """Rows by bits and method: few bits first, the methods as they come."""
    methods = list(dict.fromkeys(row["method"] for row in rows))
    for bits in BITS:
        for method in methods:
            same = [row for row in rows if (row["bits"], row["method"]) == (bits, method)]
            if same:
                yield bits, method, same


def _perplexity(value: float) -> str:
    return f"{value:.2f}" if value < 1000 else f"{value:.1e}"


def _spread(values: Iterable[float], form: Callable[[float], str]) -> str:
    """The mean, and the lowest and the highest where there are several."""
    numbers = list(values)
    text = form(mean(numbers))
    return text if len(numbers) == 1 else f"{text} ({form(min(numbers))} to {form(max(numbers))})"


def _head(cells: list[str]) -> list[str]:
    return [_line(cells), _line(["---"] * len(cells))]


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(document(read_rows(Path(sys.argv[1]))))
