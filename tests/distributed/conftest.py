"""Runs of several processes on one two-block toy checkpoint, as a user starts them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import pytest
import torch

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
sys.path.insert(0, str(FOLDER.parent / "pipeline"))

from toy_runs import toy_checkpoint, write_recipe  # noqa: E402

LIMIT = 120
"""Seconds after which a run counts as hung."""


@dataclass
class Ended:
    """A command that has ended.

    Attributes:
        run_dir: Its run directory.
        status: Its exit status; negative where a signal ended it.
        output: stdout and stderr of all its processes.
        ended: `time.time()` when all its processes had ended.
    """

    run_dir: Path
    status: int
    output: str
    ended: float


@pytest.fixture(scope="session")
def recipe(tmp_path_factory):
    """Of a checkpoint whose linears have 2, 32, 64 and 128 rows; a batch of 12 for 1, 2 and 3 processes; in float64."""
    folder = tmp_path_factory.mktemp("toy")
    heads = {"num_attention_heads": 16, "num_key_value_heads": 1, "head_dim": 2}
    checkpoint = toy_checkpoint(folder / "checkpoint", "llama", torch.bfloat16, **heads)
    return write_recipe(folder, checkpoint)


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


@pytest.fixture(scope="session")
def launch(recipe):
    """Run a command to its end, all its processes included."""

    def launch(run_dir: Path, *options: str, command: str = "fit") -> Ended:
        process = started(recipe, run_dir, *options, command=command)
        try:
            # The pipe closes when the last process of the run has ended, not the first.
            output, _ = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            pytest.fail(f"the run hung:\n{output}")
        return Ended(run_dir, process.returncode, output, time.time())

    return launch


@pytest.fixture(scope="session")
def alone(launch, tmp_path_factory):
    """The run of one process that all others are compared with."""
    run = launch(tmp_path_factory.mktemp("alone") / "run")
    assert run.status == 0, run.output
    return run
