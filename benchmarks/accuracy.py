#!/usr/bin/env python3
"""How much of a model is left, by method and bits, at one budget: a markdown table and JSON lines.

`python benchmarks/accuracy.py` runs every method (round-to-nearest, GPTQ, the published algorithm in four settings, and
the recipe as it is) at every number of bits with three seeds, on three held-out texts that calibration has not seen.
Each run is a process of its own; those that are finished are not run again, and one that was stopped goes on where it
was. Keys of the recipe may follow the options: `--model.units '[attention,mlp]'`.

Model and texts come in packages (requirements/demo.txt, requirements/benchmarks.txt). On a machine without them:
carry `runs/accuracy/texts` there, and give `--model.path FOLDER --model.gguf_file null`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from accuracy_job import METHODS, check_job  # noqa: E402
from accuracy_table import BITS, Row, document, read_rows  # noqa: E402
from accuracy_texts import options as text_options  # noqa: E402
from accuracy_texts import write_texts  # noqa: E402

from gsq_module.cli import user_errors  # noqa: E402
from gsq_module.streaming import source  # noqa: E402


class Job:
    """One process.

    Args:
        method: One of METHODS.
        bits: One of BITS.
        seed: Of everything random.
        budget: What jobs must agree in to be compared.
        options: Keys of the recipe that all jobs share.
        changes: What that budget changes of the recipe.
        folder: Where its run directory, its log and its result go.
    """

    def __init__(
        self,
        method: str,
        bits: str,
        seed: int,
        budget: str,
        options: Sequence[str],
        changes: Sequence[str],
        folder: Path,
    ) -> None:
        self.settings = {"method": method, "bits": bits, "seed": seed, "budget": budget}
        self._changes = list(changes)
        self.name = f"{bits}bit-{method}-seed{seed}-{budget}"
        self._run_dir, self.result, self.log = (folder / f"{self.name}{end}" for end in ("", ".json", ".log"))
        self._options = [*options, f"--model.bits={bits}", f"--seed_everything={seed}"]
        self._process: subprocess.Popen[bytes] | None = None
        self._began = 0.0

    def start(self) -> None:
        command = [sys.executable, str(HERE / "accuracy_job.py"), f"--method={self.settings['method']}"]
        command += [f"--run_dir={self._run_dir}", f"--result={self.result}", *self._options]
        self.result.parent.mkdir(parents=True, exist_ok=True)
        path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"PYTHONPATH": path})
        self._began = time.perf_counter()

    def ended(self) -> int | None:
        """Exit status, or None while it runs."""
        assert self._process is not None
        return self._process.poll()

    def stop(self) -> None:
        assert self._process is not None
        self._process.terminate()
        self._process.wait()

    def row(self, side_by_side: int) -> Row:
        return self.settings | {
            "changes": self._changes,
            "processes": side_by_side,
            "wall_seconds": round(time.perf_counter() - self._began, 1),
            **json.loads(self.result.read_text()),
        }


def run(jobs: Sequence[Job], side_by_side: int, deadline: float, rows: Path) -> tuple[list[str], list[str]]:
    """Run the jobs, `side_by_side` at a time; append each result to `rows`.

    Args:
        deadline: `time.monotonic()` at which what still runs is stopped.

    Returns:
        Names of the jobs that failed, and of those that were not finished.
    """
    waiting, running, failed = list(jobs), list[Job](), list[str]()
    while (waiting or running) and time.monotonic() < deadline:
        while waiting and len(running) < side_by_side:
            running.append(waiting.pop(0))
            running[-1].start()
        for job in list(running):
            status = job.ended()
            if status is None:
                continue
            running.remove(job)
            print(f"{job.name}: {'done' if status == 0 else f'exit status {status}, see {job.log}'}", flush=True)
            if status:
                failed.append(job.name)
                continue
            with rows.open("a") as file:
                file.write(json.dumps(job.row(side_by_side)) + "\n")
        time.sleep(0.2)
    for job in running:
        job.stop()
    return failed, [job.name for job in running + waiting]


def changes_of(overrides: Sequence[str]) -> list[str]:
    """Overrides as `--key=value`, without those that say where the model lies and what it runs on."""
    words: list[list[str]] = []
    for word in overrides:  # `--key=value`, or `--key value`
        if word.startswith("--") or not words:
            words.append([])
        words[-1].append(word)
    free = ("--model.path", "--model.gguf_file", "--trainer")
    return ["=".join(option) for option in words if not option[0].startswith(free)]


def budget_of(config: Path, changes: Sequence[str]) -> str:
    """A name for a recipe's keys with changes, wherever its model lies and whatever it runs on."""
    recipe = yaml.safe_load(config.read_text())
    for key in ("run_dir", "trainer"):
        recipe.pop(key, None)
    for key in ("path", "gguf_file"):
        recipe["model"].pop(key, None)
    return hashlib.sha256(json.dumps([recipe, list(changes)], sort_keys=True).encode()).hexdigest()[:8]


def model_options(config: Path, overrides: Sequence[str], converted: Path) -> list[str]:
    """The recipe's model; a GGUF file is converted once, not by every job."""
    model = yaml.safe_load(config.read_text())["model"]
    if any(key.startswith(("--model.path", "--model.gguf_file")) for key in overrides) or not model.get("gguf_file"):
        return []
    folder = source.fetch(model["path"], model["gguf_file"], converted)
    return [f"--model.path={folder}", "--model.gguf_file=null"]


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add: Any = parser.add_argument
    add(
        "--config",
        type=Path,
        default=HERE.parent / "recipes" / "smollm2_full.yaml",
        help="recipe: model, units, budget",
    )
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD", help=", ".join(METHODS))
    add("--bits", nargs="+", choices=BITS, default=list(BITS), metavar="BITS", help=", ".join(BITS))
    add("--seeds", nargs="+", type=int, default=[0, 1, 2], help="default: 0 1 2")
    add("--processes", type=int, default=1, help="runs side by side: for accuracy; times are then no measure of speed")
    add("--minutes", type=float, default=float("inf"), help="stop after these; the same command goes on later")
    add("--out", type=Path, default=Path("runs/accuracy"), help="texts, logs, results.jsonl and table.md")
    options, overrides = parser.parse_known_args(arguments)
    if options.processes < 1:
        parser.error(f"--processes {options.processes}: 1 or more")
    require_recipe(parser, options.config)
    return options, overrides


def require_recipe(parser: argparse.ArgumentParser, config: Path) -> None:
    """End with the parser's message where there is no such recipe."""
    if not config.is_file():
        parser.error(f"--config {config}: there is no such file. Recipes are in {HERE.parent / 'recipes'}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 where a run failed. What a user can mend ends it with status 2 before any run."""
    deadline = time.monotonic()
    options, overrides = parse(arguments)
    deadline += options.minutes * 60
    texts = text_options(options.out / "texts")
    given = [f"--config={options.config}", *texts, *overrides]
    for method in options.methods:
        check_job(method, given, options.out / "jobs" / method)
    with user_errors():
        write_texts(options.out / "texts")
        model = model_options(options.config, overrides, options.out / "model")
    shared = [f"--config={options.config}", *texts, *model, *overrides]
    changes = changes_of(overrides)
    budget = budget_of(options.config, changes)
    jobs = [
        Job(method, bits, seed, budget, shared, changes, options.out / "jobs")
        for bits, method, seed in product(options.bits, options.methods, options.seeds)
    ]
    file = options.out / "results.jsonl"
    known = {(row["method"], row["bits"], row["seed"], row["budget"]) for row in read_rows(file)}
    missing = [job for job in jobs if tuple(job.settings.values()) not in known]
    print(f"{len(jobs)} runs, {len(jobs) - len(missing)} of them finished before", flush=True)
    failed, unfinished = run(missing, options.processes, deadline, file)
    places = {method: place for place, method in enumerate(METHODS)}
    rows = sorted(read_rows(file), key=lambda row: places.get(row["method"], len(places)))  # peers come last
    if rows:
        (options.out / "table.md").write_text(document(rows) + "\n")
        print(document([row for row in rows if row["budget"] == budget]))
    for words, names in (("failed", failed), ("not finished; the same command goes on", unfinished)):
        if names:
            print(f"{words}: {', '.join(names)}")
    return int(bool(failed))


if __name__ == "__main__":
    words = sys.argv[1:]
    del sys.argv[1:]  # LightningCLI warns of arguments beside its own
    sys.exit(main(words))
