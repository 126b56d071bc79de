"""The disk of the run is full when a stage begins: a message, nothing lost, and the run goes on once there is room.

The disk is a tmpfs, which only root may mount; elsewhere these are skipped (tests/test_space.py needs none).
"""

from __future__ import annotations

import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from toy_runs import contents, run

from gsq_module.memory.stages import StageListener
from gsq_module.quantization.grid import GRIDS
from gsq_module.recipe_run import Run
from gsq_module.run_directory import RunDirectory

OPTIONS = (
    "--data.train_samples=16",
    "--reload_max_gib=0",
    "--model.measure_initial=false",
    "--model.snapshot_every=1",
    "--model.store=disk",
)
MEBIBYTES = 16


class Fills(StageListener):
    """Leaves no byte free when a stage begins."""

    def __init__(self, stage: str, ballast: Path) -> None:
        self.stage, self.ballast = stage, ballast

    def on_stage_start(self, stage) -> None:
        if stage.name == self.stage and not self.ballast.exists():
            with open(self.ballast, "wb", buffering=0) as file, suppress(OSError):
                while file.write(bytes(4096)):
                    pass


@pytest.fixture
def disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={MEBIBYTES}m", "tmpfs", str(folder)], check=False)
    if mounted.returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    yield folder
    # Lazily: a traceback that pytest keeps may still map a file.
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture(scope="module")
def undisturbed(llama, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["run.py"])
        run(llama, run_dir, *OPTIONS)
    return contents(run_dir / "export")


@pytest.mark.parametrize(
    "stage",
    [
        pytest.param(stage, marks=() if stage in ("refine", "export") else pytest.mark.slow)
        for stage in ("evaluate", "embed", "capture", "initialize", "refine", "propagate", "snapshot", "export")
    ],
)
def test_a_full_disk_ends_with_a_message_and_loses_nothing(stage, disk, llama, undisturbed, monkeypatch, capsys):
    ballast = disk / "ballast"
    prepared = Run.__post_init__

    def with_ballast(self) -> None:
        prepared(self)
        self.clock.listeners += (Fills(stage, ballast),)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "__post_init__", with_ballast)
        with pytest.raises(SystemExit) as ended:
            run(llama, disk / "run", *OPTIONS)
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert "no room" in message or "are free there" in message
    assert "needs" in message or "are free" in message
    assert "Traceback" not in message
    assert not (disk / "run" / "summary.json").exists()
    assert not list((disk / "run").rglob(".*.tmp"))
    assert not list((disk / "run").glob("export*"))
    shards = RunDirectory(disk / "run").units(GRIDS[2])
    assert all(shards.verified(path) for path in shards.files())
    ballast.unlink()
    run(llama, disk / "run", *OPTIONS)
    assert contents(disk / "run" / "export") == undisturbed
