"""Whole runs on toy checkpoints through the real command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import yaml
from toy_models import family, save, words

from gsq_module.cli import GSQCLI, main

SEQ_LEN = 32
SAMPLES = {"train_samples": 128, "validation_samples": 5, "gptq_samples": 19, "evaluation_samples": 9}
BATCH_SIZE = 8
STEPS = SAMPLES["train_samples"] // BATCH_SIZE
"""Optimizer steps of a unit in one epoch."""
BARE = ("--model.measure_initial=false", "--reload_max_gib=0")
"""Options that leave out what only measures."""
ONE_BLOCK = (*BARE, "--model.num_blocks=1")


def toy_checkpoint(folder: Path, name: str = "llama", dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """A two-block checkpoint of a family; `changes` to its config."""
    return save(family(name, **{"num_hidden_layers": 2} | changes), folder, dtype)


def write_recipe(folder: Path, checkpoint: Path) -> Path:
    """A recipe for a run of seconds. Batches leave remainders of several sizes; nearly every unit gets better."""
    for number, name in enumerate(("calibration", "held_out")):
        (folder / f"{name}.txt").write_text(words(8000, seed=number))
    recipe = {
        "seed_everything": 0,
        "model": {
            "path": str(checkpoint),
            "group_size": 32,
            "dtype": "float32",
            "refinement": {"epochs": 1, "lr": 2e-3, "scale_lr": 1e-4, "logit_dtype": "float32"},
        },
        "data": {
            "calibration": _files(folder / "calibration.txt"),
            "evaluation": {"held_out": _files(folder / "held_out.txt")},
            "seq_len": SEQ_LEN,
            "batch_size": BATCH_SIZE,
            **SAMPLES,
        },
        "trainer": {"accelerator": "cpu", "limit_val_batches": 0, "log_every_n_steps": 1},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def _files(path: Path) -> dict[str, Any]:
    return {"class_path": "gsq_module.data.TextFiles", "init_args": {"paths": [str(path)]}}


def run(recipe: Path, run_dir: Path, *options: str, command: str = "fit") -> GSQCLI:
    """One command; `options` such as `--model.bits=3`."""
    return main([command, f"--config={recipe}", f"--run_dir={run_dir}", *options])


def summary_of(run_dir: Path) -> dict[str, Any]:
    """summary.json, read as strictly as other programs read it."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads((run_dir / "summary.json").read_text(), parse_constant=refuse)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
