"""Writing a quantized model as a checkpoint folder, one shard at a time."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import split_state_dict_into_shards_factory
from safetensors.torch import save_file
from torch import Tensor

from gsq_module.export.folder import MARKER_FILE, check_destination, replaced_folder
from gsq_module.export.packing import OuterPart, pack, quantization_config
from gsq_module.export.reader import stored_quantization
from gsq_module.export.report import CHECKSUMS, ExportReport, as_text, folder_checksums, report_checksum
from gsq_module.problems import NumericalError, UserError
from gsq_module.quantization.grid import Grid, QuantizedWeight
from gsq_module.storage import StorageError, free_bytes, gigabytes, storing
from gsq_module.streaming.checkpoint import INDEX_FILE, Checkpoint
from gsq_module.streaming.config_file import CONFIG_FILE, read_config

COMPANION_SUFFIXES = {".json", ".txt", ".model", ".tiktoken", ".jinja", ".py", ".md"}
COMPANION_STEMS = ("LICENSE", "NOTICE", "USE_POLICY", "README")


def export_checkpoint(
    source: Checkpoint,
    destination: Path,
    quantized: Mapping[str, QuantizedWeight],
    grid: Grid,
    group_size: int,
    ignore: Sequence[str],
    tied: Sequence[str] = (),
    extra_config: dict[str, Any] | None = None,
    max_shard_bytes: int = 5_000_000_000,
    outer: Sequence[OuterPart] = (),
) -> ExportReport:
    """Writes `source` with some of its linears replaced by packed codes, as compressed-tensors `pack-quantized`.

    Each file of the source becomes one shard (more where it holds over `max_shard_bytes`); no more than one shard is in
    memory. The same input gives the same bytes. The folder appears whole or not at all; an older export there stays
    until then.

    Args:
        source: The model in float. Its folder also gives config.json, which is carried over and added to, the
            tokenizer, the generation settings, custom code and licences.
        destination: Folder of the export: a new one, an empty one, or an older export.
        quantized: Codes and scales by module name (`model.layers.0.mlp.gate_proj`). One is asked for at a time.
        grid: The grid of all the codes, but for those of `outer`.
        group_size: Input columns a scale.
        ignore: Module names of exactly the linears that stay in float.
        tied: Tensor names that are left out because another tensor holds the same weight (`lm_head.weight`).
        extra_config: Further top-level keys of config.json.
        max_shard_bytes: Largest shard, unless a single tensor is larger.
        outer: Embedding and head, where `quantized` holds them. A tied head, which transformers cannot tie to packed
            codes, is written beside its embedding, and config.json no longer ties them.

    Raises:
        ValueError: The destination may not be replaced, the disk is too full, the names do not fit the source (all of
            them are listed), the source is quantized already, or a quantized weight has the wrong shape or is not
            finite.
        FileNotFoundError: The source has no config.json.
    """
    module_of = {f"{module}.weight": module for module in quantized}
    check_destination(source.directory, destination)
    _check_names(source, module_of, ignore, tied)
    config = read_config(source.directory) | (extra_config or {})
    config = _with_rope_theta(config) | {"quantization_config": quantization_config(grid, group_size, ignore, outer)}
    if outer:
        config = _untied(config)
    formats = _Formats(grid, group_size, {part.module: part for part in outer})

    shards, weight_bytes = _plan_shards(source, module_of, formats, set(tied), max_shard_bytes)
    companions = _companion_files(source.directory)
    with replaced_folder(destination) as folder:
        _check_disk(folder, destination, weight_bytes + sum(path.stat().st_size for path in companions))
        totals = _Totals()
        weight_map: dict[str, str] = {}
        for number, names in enumerate(shards, start=1):
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            tensors = _shard_tensors(source, names, module_of, quantized, formats, totals)
            with storing(destination / file, sum(tensor.nbytes for tensor in tensors.values())):
                save_file(tensors, folder / file, metadata={"format": "pt"})
            # safetensors makes its files readable by their owner only; a server often is another user.
            shutil.copymode(folder / MARKER_FILE, folder / file)
            weight_map.update(dict.fromkeys(tensors, file))
            del tensors  # or the next shard is built beside it
        report = totals.report(list(dict.fromkeys(weight_map.values())))
        for path in companions:
            copy = folder / path.relative_to(source.directory)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)
        index = {"metadata": {"total_size": report.total_bytes}, "weight_map": weight_map}
        for name, content in ((INDEX_FILE, index), (CONFIG_FILE, config)):
            (folder / name).write_text(as_text(content), encoding="utf-8")
        about = asdict(report) | {"grid": grid.name, CHECKSUMS: folder_checksums(folder)}
        about[CHECKSUMS][MARKER_FILE] = report_checksum(about)
        (folder / MARKER_FILE).write_text(as_text(about), encoding="utf-8")
    return report


@dataclass
class _Formats:
    """How each module's codes are stored."""

    grid: Grid
    group_size: int
    outer: dict[str, OuterPart]

    def of(self, module: str) -> tuple[Grid, int, list[str]]:
        """Grid, group size, and the names under which the codes are stored."""
        part = self.outer.get(module)
        return (self.grid, self.group_size, [module]) if part is None else (part.grid, part.group_size, part.modules)


@dataclass
class _Totals:
    """Counts of what was written so far."""

    total_bytes: int = 0
    packed_bytes: int = 0
    scale_bytes: int = 0
    quantized_parameters: int = 0
    float_parameters: int = 0

    def report(self, files: list[str]) -> ExportReport:
        return ExportReport(
            files=files,
            total_bytes=self.total_bytes,
            packed_bytes=self.packed_bytes,
            quantized_parameters=self.quantized_parameters,
            float_parameters=self.float_parameters,
            bits_per_weight=8 * (self.packed_bytes + self.scale_bytes) / self.quantized_parameters,
            average_bits=8 * self.total_bytes / (self.quantized_parameters + self.float_parameters),
        )


def _check_names(source: Checkpoint, module_of: dict[str, str], ignore: Iterable[str], tied: Iterable[str]) -> None:
    problems = []
    if stored_quantization(source.directory) is not None:
        problems.append(f"{source.directory} is quantized already; export from the model in float")
    if not module_of:
        problems.append("no module is quantized: there is nothing to export")
    for names, what in (
        ([name for name in module_of if name not in source], f"quantized, but not in {source.directory}"),
        (module_of.keys() & set(tied), "both quantized and tied to another tensor"),
        (set(module_of.values()).intersection(ignore), "both quantized and on the ignore list"),
    ):
        if names:
            problems.append(f"{what}: {', '.join(sorted(names))}")
    if problems:
        raise UserError("cannot export:\n  " + "\n  ".join(problems))


def _plan_shards(
    source: Checkpoint,
    module_of: dict[str, str],
    formats: _Formats,
    tied: set[str],
    max_shard_bytes: int,
) -> tuple[list[list[str]], int]:
    """Names of the source's tensors by output shard, and the bytes of all shards.

    From shapes alone: the source's files are memory-mapped, and scales are taken to have the dtype of the weight.
    """

    def stored_bytes(name: str, tensor: Tensor) -> int:
        if name not in module_of:
            return tensor.nbytes
        rows, columns = tensor.shape
        grid, group_size, modules = formats.of(module_of[name])
        packed = 4 * rows * math.ceil(columns * grid.storage_bits / 32)
        return len(modules) * (packed + rows * columns // group_size * tensor.element_size())

    shards: list[list[str]] = []
    total = 0
    for file in source.files():
        names = [name for name in source.names_in(file) if name not in tied]
        sizes = {name: stored_bytes(name, tensor) for name, tensor in source.tensors(names).items()}
        split = split_state_dict_into_shards_factory(
            sizes, get_storage_size=int, filename_pattern="{suffix}", max_shard_size=max_shard_bytes
        )
        shards += split.filename_to_tensors.values()
        total += sum(sizes.values())
    return shards, total


def _shard_tensors(
    source: Checkpoint,
    names: list[str],
    module_of: dict[str, str],
    quantized: Mapping[str, QuantizedWeight],
    formats: _Formats,
    totals: _Totals,
) -> dict[str, Tensor]:
    in_float = source.tensors(name for name in names if name not in module_of)
    totals.float_parameters += sum(tensor.numel() for tensor in in_float.values())
    result: dict[str, Tensor] = {}
    for name in names:
        if name in in_float:
            result[name] = in_float[name]
            continue
        module = module_of[name]
        grid, group_size, modules = formats.of(module)
        weight = quantized[module]
        expected = source.shape(name)
        if weight.codes.shape != expected or weight.group_size != group_size:
            raise UserError(
                f"{module} is {list(expected)} with group size {group_size}, but its codes are "
                f"{list(weight.codes.shape)} with group size {weight.group_size}: they belong to another run"
            )
        try:
            packed = pack(weight, grid)
        except NumericalError as error:
            raise NumericalError(f"{module}: {error}") from error
        totals.quantized_parameters += weight.codes.numel()
        totals.packed_bytes += len(modules) * packed["weight_packed"].nbytes
        totals.scale_bytes += len(modules) * packed["weight_scale"].nbytes
        result.update({f"{module}.{kind}": tensor for kind, tensor in packed.items()})
        for copy in modules[1:]:  # no two names of a file may share memory
            result.update({f"{copy}.{kind}": tensor.clone() for kind, tensor in packed.items()})
    totals.total_bytes += sum(tensor.nbytes for tensor in result.values())
    return result


def _untied(config: dict[str, Any]) -> dict[str, Any]:
    """Embedding and head apart, in the sections that a model may read it from."""
    config = config | {"tie_word_embeddings": False}
    if "tie_word_embeddings" in (config.get("text_config") or {}):
        config["text_config"] = _untied(config["text_config"])
    return config


def _with_rope_theta(config: dict[str, Any]) -> dict[str, Any]:
    """Adds `rope_theta` where only `rope_parameters` has it: transformers 4 knows nothing of the latter and would take
    its default of 10000 without a word."""
    config = dict(config)
    rope = config.get("rope_parameters") or {}
    if "rope_theta" in rope:
        config.setdefault("rope_theta", rope["rope_theta"])
    if isinstance(config.get("text_config"), dict):
        config["text_config"] = _with_rope_theta(config["text_config"])
    return config


def _companion_files(directory: Path) -> list[Path]:
    """Tokenizer, generation settings, chat templates, custom code, licences: neither weights nor config.json."""
    candidates = [*directory.iterdir(), *directory.glob("additional_chat_templates/*.jinja")]
    return sorted(
        path
        for path in candidates
        if path.is_file()
        and (path.suffix in COMPANION_SUFFIXES or path.name.startswith(COMPANION_STEMS))
        and not path.name.startswith(".")
        and not path.name.endswith(".index.json")
        and path.name not in (CONFIG_FILE, MARKER_FILE)
    )


def _check_disk(folder: Path, destination: Path, needed: int) -> None:
    free = free_bytes(folder)
    if free < needed:
        raise StorageError(
            f"the export to {destination} needs {gigabytes(needed)}, but {gigabytes(free)} are free there"
            f"{' (an older export is kept until the new one is complete)' if destination.exists() else ''}. "
            f"Free {gigabytes(needed - free)} or choose a destination on another disk."
        )
