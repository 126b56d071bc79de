"""The folder that holds the whole truth about a run: configuration, fingerprint, one shard a unit, metrics, summary.

Every write goes to a temporary file first, is fsynced, and is renamed into place (design.md, contract 5).

    lock                 held by the process that works here, named in it
    config.yaml          the resolved configuration; an earlier one with other content is kept as config.<n>.yaml
    fingerprint.json     what shapes the result; a run is resumed only where it agrees
    units/               codes and scales of each finished unit, packed as in the export, with its results and checksums
    wandb_id             the id of its W&B run, if it has one
    tuned/               finished units with the scales of the final pass, and final_pass.json
    initial/             the same for the initial quantization measured alone
    snapshots/           hidden states before a block, where model.snapshot_every asks for them; removed at the end
    source/              a GGUF checkpoint converted to safetensors
    activations/         hidden states, where they are on disk; removed at the end
    metrics/             CSV log, one of all sessions
    progress.json        time and peak memory of all sessions so far
    export/              the checkpoint, unless export_dir says otherwise
    summary.json
    report/              index.html, made of the summary and the metrics
"""

from __future__ import annotations

import json
import math
import re
import secrets
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gsq_module import fingerprint as fingerprints
from gsq_module.atomic import remove_leftovers, write_atomically
from gsq_module.quantization.grid import Grid
from gsq_module.storage import storing
from gsq_module.unit_shards import UnitShards


@dataclass
class Progress:
    """What the sessions of a run have come to together. It shapes no result.

    Attributes:
        state: `running`, or `done` once the export is verified and the summary written.
        sessions: How often the command was started.
        seconds: By stage, and `total`.
        peak_memory: Highest allocated bytes on rank 0's device, by stage.
    """

    state: str = "running"
    sessions: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    peak_memory: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, figures in (("seconds", self.seconds), ("peak_memory", self.peak_memory)):
            if not all(isinstance(figure, (int, float)) for figure in dict(figures).values()):
                raise TypeError(f"{name}: {figures}")


class RunDirectory:
    """Paths and small files of a run.

    Args:
        path: The folder; made if missing.
        export_dir: Where the exported checkpoint goes; `path/export` if None.
    """

    def __init__(self, path: str | Path, export_dir: str | Path | None = None) -> None:
        self.path = Path(path)
        self.export = Path(export_dir) if export_dir is not None else self.path / "export"
        self._shards: dict[tuple[str, str], UnitShards] = {}

    def make(self) -> None:
        """Make the folder.

        Raises:
            ValueError: It cannot be made.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"run_dir={str(self.path)!r}: cannot be made ({error}); try --run_dir runs/another"
            ) from error

    def prepare(self, config: str) -> None:
        """Keep the configuration, and remove what a killed process has left.

        Args:
            config: The resolved configuration as YAML.

        Raises:
            StorageError: Nothing can be written there.
        """
        shutil.rmtree(self.activations, ignore_errors=True)  # a killed run cannot
        for folder in (self.path, *(self.path / name for name in ("units", "tuned", "initial", "metrics"))):
            remove_leftovers(folder)
        target = self.path / "config.yaml"
        if target.is_file() and target.read_bytes() != config.encode():
            number = sum(1 for _ in self.path.glob("config.*.yaml")) + 1
            with storing(target):
                target.rename(self.path / f"config.{number}.yaml")
        write_atomically(target, config.encode())

    def finish(self) -> None:
        """Remove what only an unfinished run needs."""
        shutil.rmtree(self.snapshots, ignore_errors=True)

    def identify(self, fingerprint: dict[str, Any]) -> None:
        """Check the whole fingerprint, and keep it, before the first unit is made by it.

        Raises:
            ValueError: As `check`.
        """
        self.check(fingerprint)
        write_atomically(self._fingerprint_file, fingerprints.as_text(fingerprint).encode())

    def check(self, fingerprint: dict[str, Any]) -> None:
        """Compare the run in the folder, if units of one are there, with the one that is wanted.

        Args:
            fingerprint: What shapes the result, flat. Those of `CONTENT_FIELDS` that it lacks are not compared.

        Raises:
            ValueError: A run with other settings is in it, and the fields that differ are listed; or its fingerprint is
                damaged.
        """
        if not [*self.path.glob("units/*.safetensors"), *self.path.glob("initial/*.safetensors")]:
            return
        found = self._fingerprint_file.read_bytes() if self._fingerprint_file.is_file() else b""
        before, wanted = fingerprints.parse(found), fingerprints.comparable(fingerprint)
        remedy = f"Start a new one with --run_dir {self.path}-2, or remove {self.path} to start over."
        if before is None:
            state = "damaged" if found else "missing or empty"
            raise ValueError(
                f"run_dir={str(self.path)!r}: {self._fingerprint_file} is {state}: "
                f"nobody knows what settings the run there had. Put it back from a backup. {remedy}"
            )
        fields = {*before, *wanted} - (fingerprints.CONTENT_FIELDS - wanted.keys())
        differing = [key for key in sorted(fields) if before.get(key) != wanted.get(key)]
        if differing:
            listed = "\n".join(f"  {key}: {before.get(key)!r} there, {wanted.get(key)!r} now" for key in differing)
            raise ValueError(f"run_dir={str(self.path)!r} holds a run with other settings:\n{listed}\n{remedy}")

    @property
    def _fingerprint_file(self) -> Path:
        return self.path / "fingerprint.json"

    @property
    def source(self) -> Path:
        return self.path / "source"

    @property
    def activations(self) -> Path:
        return self.path / "activations"

    def wandb_id(self) -> str:
        """An id for the run's W&B run: made once, so that a resumed run goes on in the same one."""
        known = self.path / "wandb_id"
        if not known.is_file() or not re.fullmatch(rb"[0-9a-f]{16}", known.read_bytes()):
            write_atomically(known, secrets.token_hex(8).encode())
        return known.read_text()

    def units(self, grid: Grid) -> UnitShards:
        return self._shards_in("units", grid)

    def tuned_units(self, grid: Grid) -> UnitShards:
        return self._shards_in("tuned", grid)

    def final_units(self, grid: Grid, final_pass: bool) -> UnitShards:
        """The units that are exported and measured: those of the final pass, where the run has one."""
        return self.tuned_units(grid) if final_pass else self.units(grid)

    def initial_units(self, grid: Grid) -> UnitShards:
        return self._shards_in("initial", grid)

    def _shards_in(self, folder: str, grid: Grid) -> UnitShards:
        """The same object each time, for it remembers which files it has found whole."""
        return self._shards.setdefault((folder, grid.name), UnitShards(self.path / folder, grid))

    @property
    def snapshots(self) -> Path:
        return self.path / "snapshots"

    def progress(self) -> Progress:
        """Of the sessions before this one; an empty one where the file is missing or damaged."""
        try:
            return Progress(**json.loads((self.path / "progress.json").read_bytes()))
        except (FileNotFoundError, TypeError, ValueError):
            return Progress()

    def write_progress(self, progress: Progress) -> None:
        write_atomically(self.path / "progress.json", json.dumps(asdict(progress), indent=1).encode())

    def write_summary(self, summary: dict[str, Any]) -> Path:
        """Write summary.json; numbers that are not finite become null, for JSON has none."""
        target = self.path / "summary.json"
        write_atomically(target, json.dumps(_finite(summary), indent=1, allow_nan=False).encode())
        return target


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value
