"""Killed at any instant, started again: the same bytes, the same summary, the same log as if nothing had happened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HARNESS = Path(__file__).with_name("killing.py")
OPTIONS = ("--data.train_samples=16", "--reload_max_gib=0", "--model.snapshot_every=1", "--model.store=disk")
STAGES = {"embed", "original", "capture", "initialize", "refine", "propagate", "snapshot", "export", "evaluate"}
PLACES = STAGES | {"write", "between"}


@pytest.fixture
def kill(llama, tmp_path):
    def kill(how: str, count: int, seed: int):
        command = [sys.executable, str(HARNESS), str(llama), str(tmp_path), how, str(count), str(seed), *OPTIONS]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr
        found = json.loads(ended.stdout.splitlines()[-1])
        assert set(found["places"]) == PLACES
        return found["kills"]

    return kill


def test_a_run_that_is_killed_again_and_again_ends_as_if_undisturbed(kill):
    kills = kill("chain", 4, 0)
    assert [one["killed"] for one in kills] == [-9] * 4
    assert kills[-1]["resumed"] == 0
    assert kills[-1]["different"] == []


@pytest.mark.slow
def test_thirty_instants_over_all_stages(kill):
    kills = kill("each", 30, 1)
    assert {one["place"] for one in kills} == PLACES
    for one in kills:
        assert (one["killed"], one["resumed"], one["different"]) == (-9, 0, []), one
