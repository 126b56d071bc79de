"""Hidden states kept every few blocks: a resumed run begins there, and only where they are what it would compute."""

from __future__ import annotations

import shutil

import pytest
import torch
from toy_runs import BARE, contents, run

from gsq_module.quantization.grid import GRIDS
from gsq_module.refinement import UnitRefiner
from gsq_module.run_directory import RunDirectory
from gsq_module.snapshots import Snapshots
from gsq_module.streaming.model import StreamedModel

OPTIONS = (*BARE, "--data.train_samples=16")
EVERY = "--model.snapshot_every=1"


@pytest.fixture(scope="module")
def interrupted(llama, tmp_path_factory):
    """A run that was interrupted in its last unit, with its snapshot, and the export of one that was not."""
    folder = tmp_path_factory.mktemp("interrupted")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["run.py"])
        run(llama, folder / "whole", *OPTIONS)
        refine, done = UnitRefiner.__call__, []

        def stopping(self, *arguments):
            done.append(1)
            if len(done) == 4:
                raise KeyboardInterrupt
            return refine(self, *arguments)

        patch.setattr(UnitRefiner, "__call__", stopping)
        with pytest.raises(KeyboardInterrupt):
            run(llama, folder / "run", *OPTIONS, EVERY)
    return folder


@pytest.fixture
def loaded(monkeypatch):
    """Blocks in the order in which they are loaded; those of the evaluations before and after the loop left out."""
    blocks = []
    load_block = StreamedModel.load_block
    monkeypatch.setattr(
        StreamedModel, "load_block", lambda self, index: blocks.append(index) or load_block(self, index)
    )
    return lambda: blocks[2:-2]


def files(run_dir):
    return sorted(path.name for path in (run_dir / "snapshots" / "units").iterdir())


def test_a_resumed_run_begins_at_the_snapshot(interrupted, llama, tmp_path, loaded):
    run_dir = shutil.copytree(interrupted / "run", tmp_path / "run")
    assert files(run_dir) == ["block_0001.rank0of1.bin", "block_0001.rank0of1.json"]
    run(llama, run_dir, *OPTIONS)  # which makes no more of them, and uses what there is
    assert loaded() == [1]
    assert contents(run_dir / "export") == contents(interrupted / "whole" / "export")
    assert not (run_dir / "snapshots").exists()


@pytest.mark.slow
@pytest.mark.parametrize("why", ["damaged", "an earlier unit is done again", "another dtype", "other rows"])
def test_one_that_does_not_serve_is_as_good_as_none(why, interrupted, llama, tmp_path, loaded, monkeypatch):
    run_dir = shutil.copytree(interrupted / "run", tmp_path / "run")
    snapshot = run_dir / "snapshots" / "units" / "block_0001.rank0of1.bin"
    if why == "damaged":
        content = snapshot.read_bytes()
        snapshot.write_bytes(content[:1000] + bytes([content[1000] ^ 1]) + content[1001:])
    elif why == "an earlier unit is done again":
        (run_dir / "units" / "block_0000.mlp.safetensors").unlink()
    else:
        about = snapshot.with_suffix(".json")
        known = {"another dtype": ("float32", "float16"), "other rows": ('"rows": "', '"rows": "0')}[why]
        about.write_text(about.read_text().replace(*known))
    run(llama, run_dir, *OPTIONS, EVERY)
    assert loaded() == [0, 1]
    assert contents(run_dir / "export") == contents(interrupted / "whole" / "export")


def test_one_behind_units_that_changed_is_not_used(tmp_path):
    snapshots = Snapshots(tmp_path, 2, torch.arange(6).view(3, 2))
    streams = [torch.randn(3, 2, 4).bfloat16(), torch.randn(3, 2, 4).bfloat16()]
    assert [snapshots.is_due(block) for block in (1, 2, 3, 4)] == [False, True, False, True]
    snapshots.save(streams, 2, "basis")
    found = [torch.zeros_like(stream) for stream in streams]
    assert snapshots.restore(found, 1, lambda block: "basis") is None, "block 1 is open"
    assert snapshots.restore(found, 3, lambda block: "other") is None
    assert snapshots.restore(found, 3, lambda block: "basis") == 2
    assert all(torch.equal(one, other) for one, other in zip(found, streams, strict=True))
    assert Snapshots(tmp_path, None, torch.arange(6).view(3, 2) + 1).restore(found, 3, lambda block: "basis") is None
    snapshots.save(streams, 4, "basis")
    assert [path.name for path in tmp_path.glob("*.bin")] == ["block_0004.rank0of1.bin"], "the older one goes"
    snapshots.clear()
    assert list(tmp_path.iterdir()) == []


def test_the_basis_is_the_content_of_the_units(interrupted):
    shards = RunDirectory(interrupted / "run").units(GRIDS[2])
    others = RunDirectory(interrupted / "whole").units(GRIDS[2])
    first = [(0, "attention"), (0, "mlp")]
    assert shards.basis(first) == others.basis(first), "not of the seconds they took"
    assert shards.basis(first) != shards.basis(first[:1])
