"""The folder that holds the whole truth about a run: configuration, fingerprint, one shard a unit, metrics, summary.

Every write goes to a temporary file first, is fsynced, and is renamed into place (design.md, contract 5).

    config.yaml          the resolved configuration; an earlier one with other content is kept as config.<n>.yaml
    fingerprint.json     what shapes the result; a run is resumed only where it agrees
    units/               codes and scales of each finished unit, packed as in the export, with its results
    wandb_id             the id of its W&B run, if it has one
    tuned/               finished units with the scales of the final pass, and final_pass.json
    initial/             the same for the initial quantization measured alone
    source/              a GGUF checkpoint converted to safetensors
    activations/         hidden states, where they are on disk; removed at the end
    metrics/             CSV logs
    export/              the checkpoint, unless export_dir says otherwise
    summary.json
    report/              index.html, made of the summary and the metrics
"""

from __future__ import annotations

import json
import math
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from gsq_module.atomic import write_atomically
from gsq_module.export.packing import pack, unpack_codes
from gsq_module.quantization.grid import Grid, QuantizedWeight


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

    Args:
        directory: Where the files are.
        grid: The run's grid.
    """

    def __init__(self, directory: Path, grid: Grid) -> None:
        self.directory = directory
        self.grid = grid

    def _file(self, block: int, unit: str) -> Path:
        return self.directory / f"block_{block:04d}.{unit}.safetensors"

    def save(self, result: UnitResult, weights: Mapping[str, QuantizedWeight]) -> None:
        """Store a finished unit; `weights` by the linears' module paths."""
        tensors: dict[str, Tensor] = {}
        for name, weight in weights.items():
            for key, tensor in pack(weight.to("cpu"), self.grid).items():
                tensors[f"{name}.{key}"] = tensor.contiguous()
        content = save(tensors, metadata={"result": json.dumps(asdict(result))})
        write_atomically(self._file(result.block, result.unit), content)

    def result(self, block: int, unit: str) -> UnitResult | None:
        """What became of a finished unit, or None where its file is missing or not whole (it is then done again)."""
        try:
            # Opening compares the header with the file's length.
            with safe_open(self._file(block, unit), framework="pt") as file:
                return UnitResult(**json.loads(file.metadata()["result"]))
        except (FileNotFoundError, SafetensorError, KeyError, TypeError, ValueError):
            return None

    def load(self, block: int, unit: str) -> tuple[UnitResult, dict[str, QuantizedWeight]] | None:
        """A finished unit with its weights by the linears' module paths, or None as from `result`."""
        result = self.result(block, unit)
        if result is None:
            return None
        with safe_open(self._file(block, unit), framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}
        names = sorted({key.rpartition(".")[0] for key in tensors})
        return result, {name: self._weight(name, tensors) for name in names}

    def _weight(self, name: str, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        packed = {key: tensors[f"{name}.{key}"] for key in ("weight_packed", "weight_scale", "weight_shape")}
        return QuantizedWeight(unpack_codes(packed, self.grid), packed["weight_scale"])

    def results(self) -> list[UnitResult]:
        """Results of all finished units, in block order."""
        found = []
        for path in sorted(self.directory.glob("block_*.safetensors")):
            with safe_open(path, framework="pt") as file:
                found.append(UnitResult(**json.loads(file.metadata()["result"])))
        return found

    def weights(self) -> QuantizedWeights:
        """All finished weights by module path, read when asked for."""
        return QuantizedWeights(self)


class QuantizedWeights(Mapping[str, QuantizedWeight]):
    """The weights of a run's shards by module path; each access reads one layer."""

    def __init__(self, shards: UnitShards) -> None:
        self._shards = shards
        self._file_of: dict[str, Path] = {}
        for path in sorted(shards.directory.glob("block_*.safetensors")):
            with safe_open(path, framework="pt") as file:
                for key in file.keys():
                    name, _, suffix = key.rpartition(".")
                    if suffix == "weight_packed":
                        self._file_of[name] = path

    def __getitem__(self, name: str) -> QuantizedWeight:
        with safe_open(self._file_of[name], framework="pt") as file:
            keys = [key for key in file.keys() if key.rpartition(".")[0] == name]
            return self._shards._weight(name, {key: file.get_tensor(key) for key in keys})

    def __iter__(self):
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)


class RunDirectory:
    """Paths and small files of a run.

    Args:
        path: The folder; made if missing.
        export_dir: Where the exported checkpoint goes; `path/export` if None.
    """

    def __init__(self, path: str | Path, export_dir: str | Path | None = None) -> None:
        self.path = Path(path)
        self.export = Path(export_dir) if export_dir is not None else self.path / "export"

    def prepare(self, config: str, fingerprint: dict[str, Any]) -> None:
        """Make the folder, or check that the run in it is this one.

        Args:
            config: The resolved configuration as YAML.
            fingerprint: What shapes the result, flat.

        Raises:
            ValueError: A run with other settings is in it; the fields that differ are listed.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"run_dir={str(self.path)!r}: cannot be made ({error}); try --run_dir runs/another"
            ) from error
        self.check(fingerprint)
        shutil.rmtree(self.activations, ignore_errors=True)  # a killed run cannot
        write_atomically(self._fingerprint_file, _fingerprint_text(fingerprint).encode())
        target = self.path / "config.yaml"
        if target.is_file() and target.read_text() != config:
            number = sum(1 for _ in self.path.glob("config.*.yaml")) + 1
            target.rename(self.path / f"config.{number}.yaml")
        write_atomically(target, config.encode())

    def check(self, fingerprint: dict[str, Any]) -> None:
        """Compare the run in the folder, if units of one are there, with the one that is wanted.

        Raises:
            ValueError: As `prepare`.
        """
        finished = [*self.path.glob("units/*.safetensors"), *self.path.glob("initial/*.safetensors")]
        if not finished or not self._fingerprint_file.is_file():
            return
        wanted = json.loads(_fingerprint_text(fingerprint))
        try:
            before = json.loads(self._fingerprint_file.read_text())
        except ValueError:
            before = {}
        differing = [key for key in sorted({*before, *wanted}) if before.get(key) != wanted.get(key)]
        if differing:
            listed = "\n".join(f"  {key}: {before.get(key)!r} there, {wanted.get(key)!r} now" for key in differing)
            raise ValueError(
                f"run_dir={str(self.path)!r} holds a run with other settings:\n{listed}\n"
                f"Start a new one with --run_dir {self.path}-2, or remove {self.path} to start over."
            )

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
        if not known.is_file():
            write_atomically(known, secrets.token_hex(8).encode())
        return known.read_text()

    def units(self, grid: Grid) -> UnitShards:
        return UnitShards(self.path / "units", grid)

    def tuned_units(self, grid: Grid) -> UnitShards:
        return UnitShards(self.path / "tuned", grid)

    def initial_units(self, grid: Grid) -> UnitShards:
        return UnitShards(self.path / "initial", grid)

    def write_summary(self, summary: dict[str, Any]) -> Path:
        """Write summary.json; numbers that are not finite become null, for JSON has none."""
        target = self.path / "summary.json"
        write_atomically(target, json.dumps(_finite(summary), indent=1, allow_nan=False).encode())
        return target


def _fingerprint_text(fingerprint: dict[str, Any]) -> str:
    return json.dumps(fingerprint, indent=1, sort_keys=True, default=str)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value
