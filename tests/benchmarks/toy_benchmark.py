"""A recipe for a toy, for the accuracy benchmarks' tests."""

from __future__ import annotations

from pathlib import Path

import yaml
from toy_models import family, save


def write_recipe(folder: Path, epochs: int, batch_size: int, **samples: int) -> Path:
    """A recipe for the MLPs of a two-block toy, group size 32, with so many samples of each use."""
    save(family("llama", num_hidden_layers=2), folder / "model")
    settings = {
        "model": {
            "path": str(folder / "model"),
            "group_size": 32,
            "units": ["mlp"],
            "dtype": "float32",
            "refinement": {"epochs": epochs},
        },
        "data": {
            "calibration": {"class_path": "gsq_module.data.Speeches"},
            "evaluation": {},
            "seq_len": 32,
            "batch_size": batch_size,
            **{f"{use}_samples": count for use, count in samples.items()},
        },
        "trainer": {"accelerator": "cpu", "limit_val_batches": 0, "enable_progress_bar": False, "logger": False},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path
