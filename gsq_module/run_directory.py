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

import hashlib
import json
import math
import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from gsq_module import fingerprint as fingerprints
from gsq_module.atomic import remove_leftovers, write_atomically
from gsq_module.export.packing import pack, unpack_codes
from gsq_module.quantization.grid import Grid, QuantizedWeight
from gsq_module.storage import storing

RESULT = ""
"""Key of the result's checksum among those of the layers."""


@dataclass
class UnitResult:
    """What became of one unit.

    Attributes:
        block: Index of its block.
        unit: `attention` or `mlp`.
        name: Module path.
        initial_error: Relative squared error on the validation samples with the initial codes.
        refined_error: The same with the weights that were kept: never above `initial_error`.
        kept: `refined` or `initial`.
        rejected_error: What refinement reached where the initial codes were kept; may be NaN or infinite.
        codes_changed: Fraction of codes that differ from the initial ones.
        steps: Optimizer steps.
        seconds: Of refinement.
        notes: By linear: why it was rounded to nearest, or what damping it took. By unit: that it was tried again.
    """

    block: int
    unit: str
    name: str
    initial_error: float
    refined_error: float
    kept: str
    rejected_error: float | None = None
    codes_changed: float = 0.0
    steps: int = 0
    seconds: float = 0.0
    notes: dict[str, str] = field(default_factory=dict)


class UnitShards:
    """Finished units of a run: one safetensors file each, in the export's packing, with the result as metadata.

    Checksums of the result and of each layer's tensors lie beside it. A file whose content does not agree with them is
    as good as none: its unit is done again.

    Args:
        directory: Where the files are.
        grid: The run's grid.
    """

    def __init__(self, directory: Path, grid: Grid) -> None:
        self.directory = directory
        self.grid = grid
        self._verified: dict[Path, tuple[tuple[int, ...], UnitResult]] = {}

    def _file(self, block: int, unit: str) -> Path:
        return self.directory / f"block_{block:04d}.{unit}.safetensors"

    def save(self, result: UnitResult, weights: Mapping[str, QuantizedWeight]) -> None:
        """Store a finished unit; `weights` by the linears' module paths."""
        tensors: dict[str, Tensor] = {}
        for name, weight in weights.items():
            for key, tensor in pack(weight.to("cpu"), self.grid).items():
                tensors[f"{name}.{key}"] = tensor.contiguous()
        text = json.dumps(asdict(result))
        checksums = {name: _checksum(name, part) for name, part in _by_layer(tensors).items()}
        checksums[RESULT] = hashlib.sha256(text.encode()).hexdigest()
        content = save(tensors, metadata={"result": text, "sha256": json.dumps(checksums)})
        write_atomically(self._file(result.block, result.unit), content)

    def result(self, block: int, unit: str) -> UnitResult | None:
        """What became of a finished unit, or None where its file is missing or damaged (it is then done again)."""
        return self.verified(self._file(block, unit))

    def verified(self, path: Path) -> UnitResult | None:
        """The result in a file that agrees with its checksums, else None. It is read once while it is not touched."""
        try:
            status = path.stat()
            signature = (status.st_ino, status.st_size, status.st_mtime_ns)
            if path in self._verified and self._verified[path][0] == signature:
                return self._verified[path][1]
            # Opening compares the header with the file's length.
            with safe_open(path, framework="pt") as file:
                text, checksums = file.metadata()["result"], json.loads(file.metadata()["sha256"])
                layers = {}
                for name, keys in _by_layer(dict.fromkeys(file.keys())).items():
                    layers[name] = _checksum(name, {key: file.get_tensor(key) for key in keys})
            result = UnitResult(**json.loads(text))
        except (OSError, SafetensorError, KeyError, TypeError, ValueError):
            return None
        if path != self._file(result.block, result.unit) or checksums != layers | {
            RESULT: hashlib.sha256(text.encode()).hexdigest()
        }:
            return None
        self._verified[path] = (signature, result)
        return result

    def load(self, block: int, unit: str) -> tuple[UnitResult, dict[str, QuantizedWeight]] | None:
        """A finished unit with its weights by the linears' module paths, or None as from `result`."""
        result = self.result(block, unit)
        if result is None:
            return None
        with safe_open(self._file(block, unit), framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}
        return result, {name: self._weight(name, tensors) for name in sorted(_by_layer(tensors))}

    def basis(self, units: Sequence[tuple[int, str]]) -> str:
        """Hash of the content of finished units: of what hidden states behind them depend on."""
        digest = hashlib.sha256()
        for block, unit in units:
            with safe_open(self._file(block, unit), framework="pt") as file:
                checksums = json.loads(file.metadata()["sha256"])
            checksums.pop(RESULT)  # seconds are in it
            digest.update(json.dumps([block, unit, checksums], sort_keys=True).encode())
        return digest.hexdigest()

    def _weight(self, name: str, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        packed = {key: tensors[f"{name}.{key}"] for key in ("weight_packed", "weight_scale", "weight_shape")}
        return QuantizedWeight(unpack_codes(packed, self.grid), packed["weight_scale"])

    @property
    def name(self) -> str:
        """Of the folder."""
        return self.directory.name

    def files(self) -> list[Path]:
        """The files of all units, in block order, whatever is in them."""
        return sorted(self.directory.glob("block_*.safetensors"))

    def results(self) -> list[UnitResult]:
        """Results of all finished units, in block order."""
        return [result for path in self.files() if (result := self.verified(path)) is not None]

    def weights(self) -> QuantizedWeights:
        """All finished weights by module path, read when asked for."""
        return QuantizedWeights(self)


class QuantizedWeights(Mapping[str, QuantizedWeight]):
    """The weights of a run's shards by module path; each access reads one layer."""

    def __init__(self, shards: UnitShards) -> None:
        self._shards = shards
        self._file_of: dict[str, Path] = {}
        for path in shards.files():
            if shards.verified(path) is None:
                continue
            with safe_open(path, framework="pt") as file:
                for key in file.keys():
                    name, _, suffix = key.rpartition(".")
                    if suffix == "weight_packed":
                        self._file_of[name] = path

    def __getitem__(self, name: str) -> QuantizedWeight:
        return self._shards._weight(name, self.stored(name))

    def stored(self, name: str) -> dict[str, Tensor]:
        """The tensors of a layer by name, as they are stored.

        Raises:
            ValueError: The file has been damaged since the layers were listed.
        """
        path = self._file_of[name]
        with safe_open(path, framework="pt") as file:
            keys = [key for key in file.keys() if key.rpartition(".")[0] == name]
            tensors = {key: file.get_tensor(key) for key in keys}
            expected = json.loads(file.metadata()["sha256"])[name]
        if _checksum(name, tensors) != expected:
            raise ValueError(f"{path} is damaged: start fit again, which does its unit again")
        return tensors

    def __iter__(self):
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)


def _by_layer(tensors: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The tensors of a shard by the module path of their layer."""
    layers: dict[str, dict[str, Any]] = {}
    for key, tensor in tensors.items():
        layers.setdefault(key.rpartition(".")[0], {})[key] = tensor
    return layers


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a tensor on the CPU, of whatever dtype."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data


def _checksum(name: str, tensors: Mapping[str, Tensor]) -> str:
    """Of a layer's tensors: names, dtypes, shapes and bytes."""
    digest = hashlib.sha256(name.encode())
    for key in sorted(tensors):
        tensor = tensors[key]
        digest.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(as_bytes(tensor))
    return digest.hexdigest()


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
        for folder in (self.path, self.path / "units", self.path / "initial", self.path / "metrics"):
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
