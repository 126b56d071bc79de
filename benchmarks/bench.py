#!/usr/bin/env python3
"""`python benchmarks/bench.py` (or `make bench`): how fast this machine refines one MLP; a table and a JSON file."""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from context import Bench, interpreted
from lightning_overhead import lightning
from measure import Measurements, Row, SkippedError, free_memory
from rich.console import Console
from rich.table import Table
from rich.text import Text
from shapes import SHAPES
from solve import hessian, solve
from steps import floor, optimizer_part, step
from targets import SOURCE, Verdict, compare, not_applicable

from gsq_module.memory.statistics import GIB
from gsq_module.summary import device_name

PARTS: dict[str, Callable[[Bench], Measurements]] = {
    "floor": floor,
    "step": step,
    "optimizer": optimizer_part,
    "gptq": solve,
    "hessian": hessian,
    "lightning": lightning,
}
LIBRARIES = ("torch", "triton", "transformers", "lightning")
COLUMNS = ("time", "peak", "ratio_to_floor")
WIDTH = 160
"""Characters of the table where it goes to a file or a pipe."""


def machine(device: torch.device) -> dict[str, Any]:
    """What the figures were measured on, and with what."""
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "device": device_name(device),
        "memory_gib": round(memory / GIB, 2),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        **{library: _version(library) for library in LIBRARIES},
        "git_commit": _git_commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _version(library: str) -> str | None:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    """The commit, with `-dirty` where tracked files differ from it; None outside a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        described = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return described.stdout.strip()


def measure(bench: Bench, parts: Sequence[str], console: Console) -> list[Row]:
    """Fill the rows of the parts, one after the other. A row that fails says so, and the others go on."""
    rows = []
    for part in parts:
        for name, fill in PARTS[part](bench):
            console.print(f"{part}: {name}", style="dim", highlight=False)
            row = Row(part, name)
            try:
                fill(row)
            except SkippedError as reason:
                row.skipped = str(reason)
            except Exception as error:
                row.failed = f"{type(error).__name__}: {error}".splitlines()[0]
                traceback.print_exc()
            rows.append(row)
            free_memory(bench.device)
    return rows


def table_of(rows: Sequence[Row], title: str) -> Table:
    """Rows as people read them; figures without a column of their own go to the last one."""
    table = Table(title=title, title_justify="left")
    for column in ("part", "measurement"):
        table.add_column(column)
    for column in ("time", "peak memory", "to floor"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("more")
    for row in rows:
        cells = [str(row.figures[name]) if name in row.figures else "" for name in COLUMNS]
        more = [f"{name} {figure}" for name, figure in row.figures.items() if name not in COLUMNS]
        more = [", ".join(more), *row.notes]
        if row.skipped:
            more.append(f"skipped: {row.skipped}")
        if row.failed:
            more.append(f"failed: {row.failed}")
        # Text, not markup: an error may hold brackets.
        table.add_row(*map(Text, (row.part, row.name, *cells, "\n".join(filter(None, more)))))
    return table


def table_of_verdicts(verdicts: Sequence[Verdict]) -> Table:
    table = Table(title=f"limits of {SOURCE}", title_justify="left")
    for column in ("part", "measurement", "figure", "at most", "measured", ""):
        table.add_column(column)
    words = {True: "pass", False: "FAIL", None: "not measured"}
    for verdict in verdicts:
        measured = str(verdict.measured or "")
        table.add_row(verdict.part, verdict.name, verdict.figure, str(verdict.limit), measured, words[verdict.passed])
    return table


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    cuda = torch.cuda.is_available()
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if cuda else "cpu", help="where to measure")
    parser.add_argument(
        "--shape", choices=SHAPES, help="whose MLP (default: qwen3.6-27b on CUDA, smollm2-135m on a CPU)",
        default=argparse.SUPPRESS,
    )  # fmt: skip
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help="parts to run")
    parser.add_argument("--out", type=Path, default=Path("runs/bench.json"), help="JSON file to write")
    parser.add_argument("--targets", action="store_true", help=f"also compare with the limits of {SOURCE} for one H200")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not cuda:
        parser.error("--device cuda: torch sees no CUDA device here; use --device cpu")
    if "shape" not in options:
        options.shape = "qwen3.6-27b" if options.device == "cuda" else "smollm2-135m"
    if interpreted() and options.shape != "tiny":
        parser.error(f"--shape {options.shape}: with TRITON_INTERPRET=1 only --shape tiny ends in reasonable time")
    return options


def set_up_process() -> None:
    """As gsq_module/cli.py does for a run; and the solve's few calibration tokens are no news here."""
    torch.set_flush_denormal(True)
    for name in ("pytorch.utilities.rank_zero", "pytorch.accelerators.cuda"):
        logging.getLogger(f"lightning.{name}").setLevel(logging.WARNING)
    logging.getLogger("gsq_module.quantization.gptq").setLevel(logging.ERROR)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 where a row failed, or where `--targets` found a limit exceeded."""
    options = parse(arguments)
    device = torch.device(options.device)
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    facts = machine(device)
    for name, value in facts.items():
        console.print(f"{name}: {value}", highlight=False)
    shape = SHAPES[options.shape]
    rows = measure(Bench(shape, device), options.only, console)
    title = f"MLP of {options.shape} ({shape.hidden} x {shape.intermediate}, 2 bits, group {shape.group_size})"
    console.print(table_of(rows, f"{title} on {facts['device']}"))
    if device.type == "cpu":
        console.print("skipped: peak memory (only a CUDA device's allocator counts it)")

    verdicts = None
    reason = not_applicable(options.shape, device) if options.targets else None
    if reason:
        console.print(f"--targets: not applicable, {reason}")
    elif options.targets:
        verdicts = compare(rows)
        console.print(table_of_verdicts(verdicts))

    record = {
        "machine": facts,
        "shape": {"name": options.shape, "weights": shape.weights, **asdict(shape)},
        "rows": [asdict(row) for row in rows],
        "targets": reason if verdicts is None else [asdict(verdict) for verdict in verdicts],
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=2) + "\n")
    console.print(f"written: {options.out}")
    exceeded = any(verdict.passed is False for verdict in verdicts or ())
    return int(exceeded or any(row.failed for row in rows))


if __name__ == "__main__":
    set_up_process()
    sys.exit(main())
