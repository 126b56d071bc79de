"""Runs of several processes on one two-block toy checkpoint, as a user starts them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
sys.path.insert(0, str(FOLDER.parent / "pipeline"))

from processes import LIMIT, started  # noqa: E402
from toy_runs import toy_checkpoint, write_recipe  # noqa: E402


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
