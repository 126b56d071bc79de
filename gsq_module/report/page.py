"""The report as one HTML file: tables of the summary, and the pictures inside it."""

from __future__ import annotations

import base64
from pathlib import Path

import jinja2

from gsq_module.atomic import write_atomically
from gsq_module.memory.statistics import format_bytes
from gsq_module.report import plots
from gsq_module.report.record import Record
from gsq_module.summary import TABLES, around_the_units, names_by_note

PICTURES = {
    "errors": (plots.errors, "Error by block", "No unit was quantized."),
    "codes_changed": (plots.codes_changed, "Codes changed by refinement", "No unit was quantized."),
    "losses": (
        plots.losses,
        "Loss curves",
        "No losses were logged: nothing was refined, or fewer steps than trainer.log_every_n_steps.",
    ),
    "memory_by_stage": (plots.memory_by_stage, "Device memory by stage", "Nothing is predicted or measured on a CPU."),
    "memory_over_time": (
        plots.memory_over_time,
        "Device memory over time",
        "Not logged: a run on a CPU, or without callbacks.AllocatorStats.",
    ),
    "seconds_by_stage": (plots.seconds_by_stage, "Time by stage", "No stage was timed."),
}
"""What draws each picture, its heading, and what stands in its place where there is nothing to draw."""

_TEMPLATE = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
    """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ run_dir }}: quantization report</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 960px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; border-bottom: 1px solid #ddd; }
table { border-collapse: collapse; margin: .6em 0 1.2em; } caption { text-align: left; font-weight: 600; }
th, td { padding: .2em .9em .2em 0; text-align: left; vertical-align: top; } td.n, th.n { text-align: right; }
tr + tr td { border-top: 1px solid #eee; }
img { max-width: 100%; } .none { color: #777; font-style: italic; } .prompt { color: #777; }
</style>
</head>
<body>
<h1>Quantization report: {{ run_dir }}</h1>
<p>{{ facts }}</p>
<section id="figures"><h2>Perplexity, KL divergence, top token</h2>
{% for table in tables %}
<table><caption>{{ table.title }}</caption>
<tr><th>text</th>{% for model in table.models %}<th class="n">{{ model }}</th>{% endfor %}</tr>
{% for row in table.rows %}
<tr><td>{{ row[0] }}</td>{% for cell in row[1:] %}<td class="n">{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</table>
{% endfor %}
{% for line in around %}
<p>{{ line }}</p>
{% endfor %}
</section>
{% for picture in pictures %}
<section id="{{ picture.name }}"><h2>{{ picture.title }}</h2>
{% if picture.data %}
<img alt="{{ picture.title }}" src="data:image/png;base64,{{ picture.data }}">
{% else %}
<p class="none">{{ picture.absent }}</p>
{% endif %}
</section>
{% endfor %}
<section id="coverage"><h2>What stayed in float</h2>
<table>
<tr><td class="n">{{ "{:,}".format(coverage.quantized_parameters) }}</td><td>quantized, {{ quantized }} of all</td></tr>
{% for reason, count in coverage.float_parameters.items() %}
<tr><td class="n">{{ "{:,}".format(count) }}</td><td>{{ reason }}</td></tr>
{% endfor %}
</table>
{% if notes %}
<table><caption>Notes</caption>
{% for note, names in notes.items() %}
<tr><td>{% for name in names %}{{ name }}<br>{% endfor %}</td><td>{{ note }}</td></tr>
{% endfor %}
</table>
{% endif %}
</section>
<section id="continuations"><h2>Continuations side by side</h2>
{% if continuations %}
<p>Greedy, from the first tokens of evaluation texts; both models loaded whole with plain transformers.</p>
<table>
<tr><th>text</th><th>original</th><th>quantized</th></tr>
{% for row in continuations %}
<tr><td>{{ row.text }}</td>
{% for model in ("original", "quantized") %}
<td><span class="prompt">{{ row.prompt }}</span>{{ row[model] }}</td>
{% endfor %}</tr>
{% endfor %}
</table>
{% else %}
<p class="none">Not made: the model is too large to be loaded whole here (reload_max_gib).</p>
{% endif %}
</section>
</body>
</html>
"""
)


def draw(record: Record) -> dict[str, bytes]:
    """The pictures that there are, as PNG files by name."""
    figures = {name: plot(record) for name, (plot, _, _) in PICTURES.items()}
    return {name: plots.png(figure) for name, figure in figures.items() if figure is not None}


def write_report(run_dir: Path) -> Path:
    """Write `report/index.html` of a finished run.

    Raises:
        FileNotFoundError: No finished run is in the folder.
        ValueError: Its summary.json is broken.
    """
    record = Record.of(run_dir)
    return write_page(run_dir, record, draw(record))


def write_page(run_dir: Path, record: Record, drawn: dict[str, bytes]) -> Path:
    """The same of what was read and drawn already."""
    summary = record.summary
    tables = []
    for title, key, form in TABLES:
        by_text = summary[key]
        models = list(next(iter(by_text.values()), {}))
        rows = [[text, *(_format(values[model], form) for model in models)] for text, values in by_text.items()]
        if models:
            tables.append({"title": title, "models": models, "rows": rows})
    pictures = [
        {
            "name": name,
            "title": title,
            "absent": absent,
            "data": base64.b64encode(drawn[name]).decode() if name in drawn else "",
        }
        for name, (_, title, absent) in PICTURES.items()
    ]
    page = _TEMPLATE.render(
        run_dir=run_dir.name,
        facts=_facts(record),
        tables=tables,
        around=around_the_units(summary),
        pictures=pictures,
        coverage=summary["coverage"],
        quantized=f"{summary['coverage']['quantized_fraction']:.1%}",
        notes=names_by_note([*summary["units"], *summary["outer"]]),
        continuations=summary["continuations"],
    )
    target = run_dir / "report" / "index.html"
    target.parent.mkdir(exist_ok=True)
    write_atomically(target, page.encode())
    return target


def _facts(record: Record) -> str:
    summary = record.summary
    facts = [f"{len(summary['units'])} units on {summary['device']}", f"{summary['seconds']['total']:.0f} s"]
    facts.append(f"peak host memory {format_bytes(summary['peak_memory']['host_bytes'])}")
    if summary["export"]:
        export = summary["export"]
        facts.append(f"{summary['bits_per_weight']:.2f} bits a quantized weight")
        facts.append(f"export {export['path']}, {format_bytes(export['total_bytes'])}")
    return "; ".join(facts)


def _format(value: float | None, form: str) -> str:
    return "not finite" if value is None else format(value, form)
