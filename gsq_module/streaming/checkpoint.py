"""Reading a checkpoint folder one tensor at a time: safetensors, with an index or as a single file."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


class Checkpoint:
    """The tensors of a checkpoint folder by name. Files are memory-mapped: a tensor is read when it is asked for.

    Args:
        directory: A folder with `model.safetensors` or with an index and the shards it names, and `config.json`.

    Raises:
        FileNotFoundError: The folder, its weights, or shards that the index names are missing (all of them are listed).
        ValueError: A file is cut off, or the index is, or names tensors that its files do not hold.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self._file_of = self._locate_tensors()

    def _locate_tensors(self) -> dict[str, str]:
        if not self.directory.is_dir():
            raise FileNotFoundError(f"no checkpoint folder at {self.directory}")
        index = self.directory / INDEX_FILE
        if index.is_file():
            weight_map = self._read_index(index)
            missing = sorted({name for name in weight_map.values() if not (self.directory / name).is_file()})
            if missing:
                raise FileNotFoundError(
                    f"{index} names files that are not there: {', '.join(missing)}. "
                    f"Download the rest: hf download <repository> --local-dir {self.directory}"
                )
            stored = {name: self._keys(name) for name in dict.fromkeys(weight_map.values())}
            absent = [f"{tensor} in {name}" for tensor, name in weight_map.items() if tensor not in stored[name]]
            if absent:
                raise ValueError(
                    f"{index} does not belong to these files: it names {len(absent)} tensors that are not there, the "
                    f"first {absent[0]}. {self._get_again()}"
                )
            return weight_map
        single = self.directory / SINGLE_FILE
        if single.is_file():
            return dict.fromkeys(self._keys(SINGLE_FILE), SINGLE_FILE)
        raise FileNotFoundError(
            f"{self.directory} holds neither {INDEX_FILE} nor {SINGLE_FILE}. "
            "Checkpoints are read as safetensors; convert others with transformers' save_pretrained first."
        )

    def _read_index(self, index: Path) -> dict[str, str]:
        """File names by tensor."""
        try:
            content = json.loads(index.read_text(encoding="utf-8"))
        except ValueError as error:  # not JSON, or not UTF-8
            raise ValueError(f"{index} is cut off or no JSON ({error}). {self._get_again()}") from error
        weight_map = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ValueError(f"{index} has no weight_map from tensors to file names. {self._get_again()}")
        if not weight_map:
            raise ValueError(f"{index}: weight_map is empty. {self._get_again()}")
        return weight_map

    def _get_again(self) -> str:
        return f"Remove it, and get it again: hf download <repository> --local-dir {self.directory}"

    def _keys(self, name: str) -> dict[str, None]:
        """Names of a file's tensors, in order."""
        try:
            with safe_open(self.directory / name, framework="pt") as file:  # compares its length with its header
                return dict.fromkeys(file.keys())
        except SafetensorError as error:
            raise ValueError(
                f"{self.directory / name} is not whole ({error}): was a download cut off? {self._get_again()}"
            ) from error

    def names(self) -> list[str]:
        """Names of all weights, in file order."""
        return list(self._file_of)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def files(self) -> list[str]:
        """Names of the safetensors files, in index order, each once."""
        return list(dict.fromkeys(self._file_of.values()))

    def names_in(self, file: str) -> list[str]:
        """Names of the weights in one of `files()`."""
        return [name for name, owner in self._file_of.items() if owner == file]

    def tensor(self, name: str) -> Tensor:
        """One tensor in host memory, in its stored dtype.

        Raises:
            KeyError: No such tensor.
        """
        with safe_open(self.directory / self._file_of[name], framework="pt") as file:
            return file.get_tensor(name)

    def rows(self, name: str, begin: int, end: int) -> Tensor:
        """Rows of a matrix in its stored dtype; the others are not read."""
        with safe_open(self.directory / self._file_of[name], framework="pt") as file:
            return file.get_slice(name)[begin:end]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape without reading the data."""
        with safe_open(self.directory / self._file_of[name], framework="pt") as file:
            return tuple(file.get_slice(name).get_shape())

    def tensors(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Several tensors; each file is opened once."""
        by_file: dict[str, list[str]] = {}
        for name in names:
            by_file.setdefault(self._file_of[name], []).append(name)
        result = {}
        for owner, members in by_file.items():
            with safe_open(self.directory / owner, framework="pt") as file:
                for name in members:
                    result[name] = file.get_tensor(name)
        return result

    def dtype(self) -> torch.dtype:
        """Dtype of the widest float tensor shared by most weights: what the model was stored in."""
        counts: dict[torch.dtype, int] = {}
        with safe_open(self.directory / self.files()[0], framework="pt") as file:
            for name in file.keys():
                dtype = _SAFETENSORS_DTYPES.get(file.get_slice(name).get_dtype())
                if dtype is not None:
                    counts[dtype] = counts.get(dtype, 0) + 1
        return max(counts, key=counts.__getitem__) if counts else torch.bfloat16


_SAFETENSORS_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
