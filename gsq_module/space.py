"""Is there room on disk for all that a run will write, and may it be written? Asked before the work."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from gsq_module.coverage import measure_coverage
from gsq_module.geometry import count_stores, export_dtype, hidden_bytes
from gsq_module.outer import outer_parts
from gsq_module.recipe_run import Run
from gsq_module.storage import StorageError, existing, free_bytes, gigabytes
from gsq_module.streaming.activations import choose_location, free_device_bytes
from gsq_module.streaming.model import StreamedModel

MARGIN = 1.02
"""Headers, logs and small files beside the tensors: the toy runs of the tests take less, larger ones a hundredth."""


@dataclass(frozen=True)
class Need:
    """Bytes that a part of the run still takes.

    Attributes:
        what: The part.
        folder: Where.
        nbytes: How much.
        remedy: What of the recipe lowers it.
    """

    what: str
    folder: Path
    nbytes: int
    remedy: str = ""


def needs(run: Run, model: StreamedModel) -> list[Need]:
    """What a run will write, by geometry; finished units are there already, and an older export stays until the end."""
    recipe, data, directory = run.recipe, run.data, run.directory
    coverage = measure_coverage(model, recipe)
    bits, itemsize = recipe.grid.storage_bits, export_dtype(model).itemsize
    packed = 0
    outer = {part.module: part for part in outer_parts(model, recipe)}
    for name in coverage.quantized:
        if name in outer:
            continue
        rows, columns = model.model.get_submodule(name).weight.shape
        packed += 4 * rows * math.ceil(columns * bits / 32) + rows * (columns // recipe.group_size) * itemsize
    around = sum(len(part.modules) * part.packed_bytes(itemsize) for part in outer.values())
    in_float = sum(coverage.float_parameters.values()) * itemsize

    def missing(folder: str) -> int:
        return max(0, packed - sum(path.stat().st_size for path in (directory.path / folder).glob("*.safetensors")))

    found = [
        Need("refined units", directory.path, missing("units")),
        Need("export", directory.export.resolve().parent, packed + around + in_float, "--export_dir on another disk"),
    ]
    if recipe.measure_initial and recipe.refinement.epochs:
        found.append(Need("initial units", directory.path, missing("initial"), "--model.measure_initial false"))
    if around:
        found.append(Need("embedding and head", directory.path, around, "without --model.embedding_bits, .head_bits"))
    if recipe.final_pass.epochs:
        found.append(Need("units of the final pass", directory.path, missing("tuned"), "--model.final_pass.epochs 0"))
    samples = data.train_samples + data.validation_samples + data.gptq_samples
    stream = hidden_bytes(model, samples * data.seq_len)
    texts = sum(tokens.numel() for tokens in data.evaluation_tokens.values()) * model.hidden_size
    here, free = run.trainer.world_size, free_device_bytes(run.device)
    on_disk = [
        total
        for total in (count_stores(recipe, recipe.target) * stream, texts * (run.dtype.itemsize))
        if choose_location(recipe.store, total // here, free, here) == "disk"
    ]
    if on_disk:
        remedy = "--model.store memory, or less data.train_samples"
        found.append(Need("hidden states", directory.activations, max(on_disk), remedy))
    if recipe.snapshot_every is not None:
        streams = 2 if recipe.target == "original_stream" else 1
        # The older one stays until the newer is whole.
        found.append(Need("snapshots", directory.snapshots, 2 * streams * stream, "without --model.snapshot_every"))
    return found


def check_space(run: Run, model: StreamedModel) -> None:
    """Refuse a run whose files have no room or no permission where they are to be.

    Raises:
        StorageError: Lists every disk that is too full, with what is needed, free and missing, and what would lower it.
    """
    problems: list[str] = []
    disks: dict[int, list[Need]] = {}
    for need in needs(run, model):
        folder = existing(need.folder)
        if not os.access(folder, os.W_OK | os.X_OK):
            problems.append(
                f"{need.what}: {folder} may not be written; choose another place with --run_dir or --export_dir"
            )
        disks.setdefault(folder.stat().st_dev, []).append(need)
    for parts in disks.values():
        needed, free = int(MARGIN * sum(part.nbytes for part in parts)), free_bytes(parts[0].folder)
        if needed <= free:
            continue
        listed = ", ".join(f"{part.what} {gigabytes(part.nbytes)}" for part in parts if part.nbytes)
        remedies = "".join(f"; or {part.remedy}" for part in parts if part.remedy and part.nbytes)
        problems.append(
            f"run_dir={str(run.directory.path)!r}, export_dir={str(run.directory.export)!r}: the run needs "
            f"{gigabytes(needed)} ({listed}) on the disk of {parts[0].folder}, but "
            f"{gigabytes(free)} are free: "
            f"{gigabytes(needed - free)} are missing. Free them, or choose another disk with --run_dir{remedies}"
        )
    if problems:
        raise StorageError("\n".join(dict.fromkeys(problems)))
