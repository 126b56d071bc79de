"""Processes of a run on a toy, as a user starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]

LIMIT = 120
"""Seconds after which a run counts as hung."""


def started(
    recipe: Path,
    run_dir: Path,
    *options: str,
    command: str = "fit",
    starter: Sequence[str] = (sys.executable,),
    variables: Mapping[str, str] = MappingProxyType({}),
) -> subprocess.Popen[str]:
    """A process of a run, or what starts several; `starter` is what runs a Python file."""
    arguments = [command, f"--config={recipe}", f"--run_dir={run_dir}", "--data.batch_size=12"]
    environment = {name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "WORLD_SIZE")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{FOLDER}"}
    return subprocess.Popen(
        [*starter, str(ROOT / "recipes" / "run.py"), *arguments, "--model.dtype=float64", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment | variables,
        cwd=ROOT,
        start_new_session=True,
    )
