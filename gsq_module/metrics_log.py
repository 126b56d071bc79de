"""The metrics of a run as one history, whatever number of sessions wrote it: no step twice, none left out."""

from __future__ import annotations

import csv
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from typing_extensions import override

from gsq_module.atomic import write_atomically

log = logging.getLogger(__name__)

Row = dict[str, float]
Key = tuple[int, frozenset[str]]
"""A row is known by its step and the names of its metrics."""

METRICS_FILE = "metrics/version_0/metrics.csv"
"""A run's log, in its run directory."""
FINAL = "perplexity/"
"""Begin of the names of what every session that ends well logs: the last one counts."""


class RunCSVLogger(CSVLogger):
    """CSV log of a whole run in `run_dir/metrics/version_0/metrics.csv`; Lightning's own begins a file each session.

    Args:
        save_dir: The run directory.
        flush_logs_every_n_steps: As Lightning's; with 1 every row is on disk before the next one, so that a killed run
            has in its file what it has logged.
    """

    def __init__(self, save_dir: str, flush_logs_every_n_steps: int = 1) -> None:
        super().__init__(save_dir, name="metrics", version=0, flush_logs_every_n_steps=flush_logs_every_n_steps)

    @property
    @override
    @rank_zero_experiment
    def experiment(self) -> ExperimentWriter:
        if self._experiment is None:
            self._experiment = _GoingOn(self.log_dir)
        return self._experiment  # type: ignore[return-value]

    @property
    def logged(self) -> set[Key]:
        """Rows that sessions before this one have logged."""
        return self.experiment.logged if isinstance(self.experiment, _GoingOn) else set()


class _GoingOn(ExperimentWriter):
    """Adds to the file that is there instead of removing it."""

    @override
    def _check_log_dir_exists(self) -> None:
        path = Path(self.metrics_file_path)
        rows = [row for row in read_rows(path) if not any(name.startswith(FINAL) for name in row)]
        self.logged = {(int(row["step"]), frozenset(row) - {"step"}) for row in rows}
        self.metrics_keys = sorted({name for row in rows for name in row})
        if rows:  # half a row, or one that is damaged, has gone
            write_atomically(path, _as_csv(self.metrics_keys, rows))
        else:
            path.unlink(missing_ok=True)

    @override
    def _rewrite_with_new_header(self, fieldnames: list[str]) -> None:
        path = Path(self.metrics_file_path)
        write_atomically(path, _as_csv(fieldnames, read_rows(path)))


def read_rows(path: Path) -> list[Row]:
    """Rows of a metrics.csv without its empty cells; what is cut off or damaged is left out."""
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    complete = text[: text.rfind("\n") + 1].replace("\0", "")
    rows = []
    for cells in csv.DictReader(complete.splitlines()):
        try:
            row = {name: float(value) for name, value in cells.items() if value}
        except (TypeError, ValueError):
            continue
        if math.isfinite(row.get("step", math.nan)):
            rows.append(row)
    return rows


def _as_csv(names: Iterable[str], rows: Iterable[Mapping[str, float]]) -> bytes:
    names = list(names)
    lines = [names, *([_number(row[name]) if name in row else "" for name in names] for row in rows)]
    return "".join(",".join(cells) + "\r\n" for cells in lines).encode()


def _number(value: float) -> str:
    return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)


def log_once(loggers: Iterable[Logger]) -> None:
    """Let no logger log a row that this run has logged before, be it in an earlier session or before a retry.

    What a resumed session does again, it does alike: the rows of the unit in flight are there already, in W&B as in the
    CSV file, up to where the killed one stopped.
    """
    loggers = list(loggers)
    before = {key for logger in loggers if isinstance(logger, RunCSVLogger) for key in logger.logged}
    for logger in loggers:
        logger.log_metrics = _once(logger.log_metrics, set(before))  # type: ignore[method-assign]


def _once(log_metrics: Callable[..., None], seen: set[Key]) -> Callable[..., None]:
    def log_new(metrics: Mapping[str, Any], step: int | None = None) -> None:
        if step is not None and not any(name.startswith(FINAL) for name in metrics):
            key = (step, frozenset(metrics))
            if key in seen:
                return
            seen.add(key)
        log_metrics(metrics=metrics, step=step)

    return log_new
