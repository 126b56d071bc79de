"""`run.py verify RUN_OR_EXPORT`: is everything there, whole, and what it says it is? Reads one tensor at a time."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from compressed_tensors.quantization import QuantizationScheme
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from gsq_module import fingerprint
from gsq_module.export.folder import MARKER_FILE
from gsq_module.export.packing import unpack_codes
from gsq_module.export.reader import match_schemes, open_checkpoint, parse_quantization, stored_quantization
from gsq_module.export.report import CHECKSUMS, folder_checksums, report_checksum
from gsq_module.quantization.grid import GRIDS, Grid
from gsq_module.run_directory import RunDirectory
from gsq_module.streaming.checkpoint import INDEX_FILE
from gsq_module.streaming.config_file import CONFIG_FILE
from gsq_module.streaming.model import StreamedModel
from gsq_module.unit_shards import QuantizedWeights, as_bytes

DAMAGED = 3
"""Exit status where something is bad; 2 where there is nothing to look at."""

PARTS = ("weight_packed", "weight_scale", "weight_shape")


def main(args: Sequence[str]) -> None:
    """Print what is bad about a run directory or an export.

    Raises:
        SystemExit: Something is (status 3), or there is neither a run nor an export (status 2).
    """
    parser = argparse.ArgumentParser(
        prog="run.py verify",
        description="Read a run directory or an export and list what is bad: checksums, shapes, scales that are not "
        "finite, codes off the grid, index and files, coverage, configuration against tensors.",
        epilog="Exit status: 0 where nothing is bad, 3 where something is, 2 where there is nothing to look at.",
    )
    parser.add_argument("folder", help="run_dir, or the folder of an export")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(args)
    folder = Path(options.folder)
    if (folder / "config.yaml").is_file() or (folder / "units").is_dir():
        notes, problems = verify_run(folder)
    elif (folder / MARKER_FILE).is_file() or _may_be_export(folder):
        notes, problems = [], verify_export(folder)
    else:
        parser.error(f"{folder} is neither a run directory (config.yaml, units/) nor an export ({MARKER_FILE})")
    if options.json:
        print(json.dumps({"folder": str(folder), "notes": notes, "problems": problems}, indent=2))
    else:
        for note in notes:
            print(note)
        for problem in problems:
            print(f"bad: {problem}")
        print(f"{folder}: {f'{len(problems)} problem(s)' if problems else 'nothing bad was found'}")
    if problems:
        raise SystemExit(DAMAGED)


def _may_be_export(folder: Path) -> bool:
    """Whether config.json says so, or is broken, which `verify_export` then names."""
    try:
        return stored_quantization(folder) is not None
    except ValueError:
        return True


# --- a run ------------------------------------------------------------------------------------------------------------


def verify_run(run_dir: Path) -> tuple[list[str], list[str]]:
    """What is there, and what is bad, of a run directory and of its export."""
    notes: list[str] = []
    problems: list[str] = []
    config = _read(run_dir / "config.yaml", yaml.safe_load, problems)
    content = (run_dir / "fingerprint.json").read_bytes() if (run_dir / "fingerprint.json").is_file() else b""
    if fingerprint.parse(content) is None:
        problems.append(f"{run_dir / 'fingerprint.json'} is missing or damaged: the run cannot be resumed without it")
    try:
        grid = GRIDS[config["model"]["bits"]]
        folder = RunDirectory(run_dir, config.get("export_dir"))
    except (TypeError, KeyError, AttributeError):
        problems.append(f"{run_dir / 'config.yaml'} does not say model.bits: units and export were not looked at")
        return notes, problems
    final = folder.final_units(grid, bool(config["model"].get("final_pass", {}).get("epochs")))
    for name, shards in {"units": folder.units(grid), "initial": folder.initial_units(grid), final.name: final}.items():
        damaged = [path for path in shards.files() if shards.verified(path) is None]
        problems += [f"{path} is damaged: the same fit again does its unit again" for path in damaged]
        notes.append(f"{name}: {len(shards.files()) - len(damaged)} finished")
    for name in ("progress.json", "summary.json"):
        if (run_dir / name).is_file():
            _read(run_dir / name, json.loads, problems)
    weights = final.weights()
    for name in weights:
        problems += [
            f"{final.name}: {name}: {problem}" for problem in _layer_problems(weights.stored(name), name, grid)
        ]
    if folder.export.is_dir():
        problems += verify_export(folder.export, weights)
        notes.append(f"export: {folder.export}")
    elif folder.progress().state == "done":
        problems.append(f"{folder.export}: the run is done, but its export is not there; `export` writes it again")
    else:
        notes.append("export: none yet")
    return notes, problems


def _read(path: Path, parse: Any, problems: list[str]) -> Any:
    try:
        return parse(path.read_bytes())
    except (OSError, ValueError, yaml.YAMLError) as error:
        problems.append(f"{path} cannot be read ({type(error).__name__})")
        return None


# --- an export --------------------------------------------------------------------------------------------------------


def verify_export(folder: Path, units: QuantizedWeights | None = None) -> list[str]:
    """What is bad of an exported checkpoint.

    Args:
        folder: The export.
        units: The finished units of its run: their tensors must be those of the export, bit for bit.
    """
    problems = list(_file_problems(folder))
    try:
        index = json.loads((folder / INDEX_FILE).read_bytes())
        listed, total = dict(index["weight_map"]), index["metadata"]["total_size"]
        about = json.loads((folder / MARKER_FILE).read_bytes()) if (folder / MARKER_FILE).is_file() else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [*problems, f"{folder}: {INDEX_FILE} or {MARKER_FILE} cannot be read: {error!r}"]
    try:
        settings = stored_quantization(folder)
        groups = parse_quantization(folder, settings).config_groups if settings else {}
    except (OSError, ValueError) as error:
        return [*problems, str(error)]
    if not groups:
        return [*problems, f"{folder / CONFIG_FILE}: it has no quantization_config, or one without config groups"]
    grid = next((grid for grid in GRIDS.values() if grid.name == about.get("grid")), None)
    packed = sorted(key.removesuffix(".weight_packed") for key in listed if key.endswith(".weight_packed"))
    try:
        schemes = match_schemes(folder, packed, [group for group in groups.values() if not isinstance(group, list)])
    except Exception as error:  # transformers raises what it likes at a strange config
        return [*problems, f"{folder / CONFIG_FILE}: no model can be made of it ({type(error).__name__}: {error})"]
    seen: set[str] = set()
    size, unreadable = 0, False
    for name in sorted(set(listed.values())):
        try:
            with safe_open(folder / name, framework="pt") as file:
                stored = set(file.keys())
                expected = {key for key, owner in listed.items() if owner == name}
                problems += [f"{INDEX_FILE}: {key} is not in {name}" for key in sorted(expected - stored)]
                problems += [f"{name}: {INDEX_FILE} does not list {key}" for key in sorted(stored - expected)]
                for layer in sorted(key.rpartition(".")[0] for key in stored if key.endswith(".weight_packed")):
                    seen.add(layer)
                    found = _stored_problems(file, stored, layer, schemes, grid, units)
                    problems += [f"{name}: {problem}" for problem in found]
                size += sum(file.get_tensor(key).nbytes for key in stored)
        except (OSError, SafetensorError, ValueError) as error:
            problems.append(f"{name} cannot be read: {error}")
            unreadable = True
    if unreadable:  # nor could what follows
        return problems
    if size != total:
        problems.append(f"{INDEX_FILE}: total_size is {total}, the tensors have {size} bytes")
    if units is not None:
        problems += [f"{name} is a finished unit's, but is not in the export" for name in sorted(set(units) - seen)]
    return problems + list(_coverage_problems(folder, seen, settings or {}))


def _file_problems(folder: Path) -> Iterator[str]:
    """Files against the checksums that lie beside them."""
    try:
        about = json.loads((folder / MARKER_FILE).read_bytes())
        checksums = dict(about[CHECKSUMS])
        whole = checksums.pop(MARKER_FILE) == report_checksum(about)
    except (OSError, ValueError, KeyError, TypeError):
        yield f"{folder / MARKER_FILE} is missing, damaged, or has no checksums: export again"
        return
    if not whole:
        yield f"{folder / MARKER_FILE} does not agree with its own checksum"
    found = folder_checksums(folder)
    for name, checksum in checksums.items():
        if name not in found:
            yield f"{folder / name} is missing"
        elif found[name] != checksum:
            yield f"{folder / name} is not what was exported: its checksum differs"
    for name in sorted(found.keys() - checksums.keys()):
        if name.endswith(".safetensors"):
            yield f"{folder / name} does not belong to the export"


def _stored_problems(
    file: Any,
    stored: set[str],
    layer: str,
    schemes: Mapping[str, QuantizationScheme],
    grid: Grid | None,
    units: QuantizedWeights | None,
) -> Iterator[str]:
    """One layer of a shard, against its scheme and its unit."""
    keys = [f"{layer}.{part}" for part in PARTS]
    missing = [key for key in keys if key not in stored]
    if missing:
        yield f"{layer}: {', '.join(missing)} missing"
        return
    tensors = {key: file.get_tensor(key) for key in keys}
    if units is not None and layer in units:
        unit = units.stored(layer)
        # Bit for bit, so that what was checked of the unit holds here.
        yield from (
            f"{key} is not what the run's unit holds" for key in keys if not _same_bits(tensors[key], unit[key])
        )
        return
    weights = schemes[layer].weights if layer in schemes else None
    if weights is None:
        yield f"{layer} is packed, but no config group of {CONFIG_FILE} is for it"
        return
    bits = weights.num_bits
    described = grid if grid is not None and grid.storage_bits == bits else _whole_grid(bits)
    yield from _layer_problems(tensors, layer, described, weights.group_size)


def _layer_problems(tensors: dict[str, Tensor], layer: str, grid: Grid, group_size: int | None = None) -> Iterator[str]:
    """Shapes, scales and codes of one packed layer."""
    packed, scale, shape = (tensors[f"{layer}.{part}"] for part in PARTS)
    rows, columns = shape.tolist() if shape.numel() == 2 else (-1, -1)
    words = -(-columns * grid.storage_bits // 32)
    if packed.dtype != torch.int32 or tuple(packed.shape) != (rows, words):
        yield (
            f"{layer}: codes are {packed.dtype} {list(packed.shape)}, but {grid.storage_bits} bits of "
            f"{[rows, columns]} take int32 {[rows, words]}"
        )
        return
    groups = scale.shape[1] if scale.ndim == 2 and len(scale) == rows else 0
    if not groups or columns % groups or (group_size is not None and groups * group_size != columns):
        yield f"{layer}: scales are {list(scale.shape)} for weights {[rows, columns]} in groups of {group_size}"
    elif not scale.isfinite().all():
        yield f"{layer}: {int((~scale.isfinite()).sum())} scales are not finite"
    if grid.num_levels < 2**grid.storage_bits:  # else every pattern of bits is a code
        codes = unpack_codes({part: tensors[f"{layer}.{part}"] for part in PARTS}, grid)
        off = (codes < grid.low) | (codes > grid.high) | ((codes - grid.low) % grid.step != 0)
        if off.any():
            yield f"{layer}: {int(off.sum())} codes are off the grid {grid.name}"


def _whole_grid(bits: int) -> Grid:
    return Grid(str(bits), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1, 1, bits)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Equal as bytes: NaN too."""
    same = one.dtype == other.dtype and one.shape == other.shape
    return same and as_bytes(one) == as_bytes(other)


def _coverage_problems(folder: Path, packed: Iterable[str], settings: dict[str, Any]) -> Iterator[str]:
    """The module tree that config.json asks for against the tensors and the list of what stayed in float."""
    try:
        checkpoint = open_checkpoint(folder, check_shapes=False)  # each layer's were looked at
        model = StreamedModel.from_checkpoint(checkpoint, torch.device("cpu"), torch.float32)
    except Exception as error:  # transformers raises what it likes at a strange config
        yield f"{folder / CONFIG_FILE}: no model can be made of it ({type(error).__name__}: {error})"
        return
    packed, ignored = set(packed), set(settings.get("ignore") or ())
    for name in model.missing_weights():
        yield f"{name} is missing: {CONFIG_FILE} asks for it"
    modules = dict(model.model.named_modules())
    for name in sorted(packed - modules.keys()):
        yield f"{name} is packed, but {CONFIG_FILE} asks for no such module"
    for name in sorted(packed & ignored):
        yield f"{name} is packed, but {CONFIG_FILE} says that it stayed in float"
    for name, module in modules.items():
        if isinstance(module, nn.Linear) and name not in packed | ignored:
            yield f"{name} is neither packed nor on the ignore list of {CONFIG_FILE}"
    for name, parameter in model.model.named_parameters():
        if name in checkpoint and checkpoint.shape(name) != tuple(parameter.shape):
            yield f"{name} is {list(checkpoint.shape(name))}, {CONFIG_FILE} asks for {list(parameter.shape)}"
