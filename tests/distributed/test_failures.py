"""When one rank fails, the others end within seconds, its report is on disk, and the next start goes on (case 42)."""

from __future__ import annotations

import json

import pytest
from toy_runs import BARE, contents

SECONDS = 20
"""From the last thing a failing rank left to the end of all: Lightning looks every 5."""
IN_THE_SECOND_UNIT = 15
"""A step; a unit takes 10."""


def failing(**arguments) -> list[str]:
    return [
        "--trainer.callbacks+=failing.Fails",
        *(f"--trainer.callbacks.init_args.{name}={value}" for name, value in arguments.items()),
    ]


def units(run) -> list[str]:
    return sorted(name for name in contents(run.run_dir / "units") if not name.startswith("."))


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "strategy"), [(0, "sharded"), (1, "ddp")])
def test_a_rank_out_of_memory_ends_all_and_leaves_its_report(rank, strategy, launch, alone, tmp_path):
    options = ("--trainer.devices=2", f"--trainer.strategy={strategy}", *BARE)
    run = launch(tmp_path / "run", *options, *failing(rank=rank, step=IN_THE_SECOND_UNIT))
    assert run.status != 0
    report = tmp_path / "run" / "oom_reports" / f"rank{rank}.json"
    assert json.loads(report.read_text())["class"] == "device_memory"
    assert run.ended - report.stat().st_mtime < SECONDS
    # Several ranks do not try again by themselves: the report says what to start again with.
    assert "--data.microbatch_size N with a smaller N" in run.output
    assert units(run) == ["block_0000.attention.safetensors"]
    assert not (tmp_path / "run" / "export").exists()
    if rank == 1:  # what is on disk does not depend on the rank; the number of processes may change
        resumed = launch(tmp_path / "run", *BARE)
        assert resumed.status == 0, resumed.output
        assert contents(tmp_path / "run" / "export") == contents(alone.run_dir / "export")


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_killed_rank_ends_all(rank, launch, tmp_path):
    options = ("--trainer.devices=2", "--trainer.strategy=ddp", *BARE)
    run = launch(tmp_path / "run", *options, *failing(rank=rank, how="kill", stage="capture", block=1))
    assert run.status != 0
    shard = tmp_path / "run" / "units" / "block_0000.mlp.safetensors"
    assert run.ended - shard.stat().st_mtime < SECONDS
    assert units(run) == ["block_0000.attention.safetensors", "block_0000.mlp.safetensors"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "stage", "block"),
    [
        (1, "embed", None),
        (0, "capture", 0),
        (1, "initialize", 0),
        (0, "refine", 1),
        (1, "propagate", 0),
        (0, "snapshot", 0),
        (1, "original", 1),
        (0, "export", None),
    ],
)
def test_a_run_with_a_killed_rank_goes_on_and_ends_the_same(rank, stage, block, launch, alone, tmp_path):
    """On two processes again; what is killed with rank 0 holds the lock, which must not outlive it."""
    options = ("--trainer.devices=2", "--trainer.strategy=ddp", "--model.snapshot_every=1", *BARE)
    where = {"stage": stage, "block": "null" if block is None else block}
    run = launch(tmp_path / "run", *options, *failing(rank=rank, how="kill", **where))
    assert run.status != 0
    assert not (tmp_path / "run" / "export").exists()
    resumed = launch(tmp_path / "run", *options)
    assert resumed.status == 0, resumed.output
    assert contents(tmp_path / "run" / "export") == contents(alone.run_dir / "export")
