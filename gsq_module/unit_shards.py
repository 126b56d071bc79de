"""Finished units on disk: one safetensors file each, in the export's packing, with the result and checksums in it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from gsq_module.atomic import write_atomically
from gsq_module.export.packing import pack, unpack_codes
from gsq_module.problems import UserError
from gsq_module.quantization.grid import Grid, QuantizedWeight

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
        notes: By linear: why it was rounded to nearest, or what damping it took. By unit: that it was tried again, or
            that one token of each sequence decides its fit.
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
            raise UserError(f"{path} is damaged: start fit again, which does its unit again")
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
