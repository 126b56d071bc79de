"""Tasks of lm-evaluation-harness on a checkpoint: a thin call; the package is the extra `eval`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

from gsq_module.export.loading import initializing_no_packed_embedding


def check_tasks(tasks: str) -> list[str]:
    """The names in a list with commas.

    Raises:
        ValueError: No names, or lm-evaluation-harness is not installed.
    """
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if not names:
        raise ValueError(f"--tasks {tasks!r} names no task; for example: --tasks arc_easy,piqa")
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError(
            "--tasks: lm-evaluation-harness is not installed. Next: pip install 'gsq-recipes[eval]' "
            "(from a checkout: pip install -e '.[eval]')"
        )
    return names


def evaluate_tasks(
    folder: Path, tasks: list[str], device: torch.device, dtype: torch.dtype
) -> dict[str, dict[str, float]]:
    """Results of each task, of the whole model through plain transformers; most tasks download their data.

    Args:
        folder: Checkpoint folder, exported or original.
        tasks: Names as lm-evaluation-harness knows them, or paths of its YAML files.
        device: Where the model goes.
        dtype: What it is computed in.

    Returns:
        By task: figures by `metric,filter`, standard errors included.
    """
    import lm_eval

    with initializing_no_packed_embedding():
        found = lm_eval.simple_evaluate(
            model="hf",
            model_args={"pretrained": str(folder), "dtype": str(dtype).removeprefix("torch.")},
            tasks=tasks,
            device=str(device),
        )
    return {
        task: {name: float(value) for name, value in figures.items() if "," in name and isinstance(value, (int, float))}
        for task, figures in found["results"].items()
    }
