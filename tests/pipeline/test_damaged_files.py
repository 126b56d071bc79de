"""Files of a run directory that are cut or flipped: done again, or named; never taken for what they were (case 41)."""

from __future__ import annotations

import random
import shutil

import pytest
import torch
from toy_runs import contents, run, summary_of

from gsq_module.quantization.grid import GRIDS, QuantizedWeight
from gsq_module.run_directory import RunDirectory
from gsq_module.snapshots import Snapshots
from gsq_module.unit_shards import UnitResult, UnitShards

OPTIONS = ("--data.train_samples=16", "--reload_max_gib=0", "--model.snapshot_every=1")


def flip(content: bytes, position: int) -> bytes:
    changed = bytearray(content)
    changed[position // 8] ^= 1 << position % 8
    return bytes(changed)


HARM = {
    "0 bytes": lambda content: b"",
    "4 bytes": lambda content: content[:4],
    "half": lambda content: content[: len(content) // 2],
    "one bit": lambda content: flip(content, random.Random(len(content)).randrange(8 * len(content))),
}


@pytest.fixture(scope="module")
def finished(llama, tmp_path_factory):
    """A run that nothing disturbed, with the snapshot that it had before its last block. Not to be written to."""
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    kept = run_dir.with_name("snapshots")
    save = Snapshots.save

    def keeping(self, *args):
        save(self, *args)
        shutil.copytree(self.folder, kept / self.folder.name, dirs_exist_ok=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["run.py"])
        patch.setattr(Snapshots, "save", keeping)
        run(llama, run_dir, *OPTIONS)
    assert not (run_dir / "snapshots").exists(), "a finished run needs none"
    shutil.copytree(kept, run_dir / "snapshots")
    return run_dir


FILES = (
    *(f"units/block_000{block}.{kind}.safetensors" for block in (0, 1) for kind in ("attention", "mlp")),
    "initial/block_0001.mlp.safetensors",
    "snapshots/units/block_0001.rank0of1.bin",
    "snapshots/units/block_0001.rank0of1.json",
    "config.yaml",
    "fingerprint.json",
    "progress.json",
    "summary.json",
    "lock",
    "metrics/version_0/metrics.csv",
    "export/gsq_export.json",
    "export/config.json",
    "export/model-00001-of-00001.safetensors",
)
DEFAULT = {
    ("units/block_0001.mlp.safetensors", "one bit"),
    ("fingerprint.json", "half"),
    ("snapshots/units/block_0001.rank0of1.bin", "one bit"),
    ("metrics/version_0/metrics.csv", "half"),
}


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        pytest.param(name, harm, marks=() if (name, harm) in DEFAULT else pytest.mark.slow)
        for name in FILES
        for harm in HARM
    ],
)
def test_a_harmed_file_is_made_again_or_named(name, harm, finished, llama, tmp_path, capsys):
    disturbed = shutil.copytree(finished, tmp_path / "run")
    if name.startswith("snapshots"):  # else nobody looks at it
        (disturbed / "units" / "block_0001.mlp.safetensors").unlink()
    file = disturbed / name
    file.write_bytes(HARM[harm](file.read_bytes()))
    if name == "fingerprint.json":
        with pytest.raises(SystemExit) as refused:
            run(llama, disturbed, *OPTIONS)
        assert refused.value.code == 2
        assert str(file) in capsys.readouterr().err
        return
    run(llama, disturbed, *OPTIONS)
    assert contents(disturbed / "export") == contents(finished / "export")
    assert summary_of(disturbed)["perplexity"] == summary_of(finished)["perplexity"]


@pytest.fixture
def shards(tmp_path):
    """One finished unit."""
    shards = UnitShards(tmp_path / "units", GRIDS[3])
    random_codes = torch.randint(-4, 4, (6, 32), generator=torch.Generator().manual_seed(0), dtype=torch.int8)
    weight = QuantizedWeight(random_codes, torch.rand(6, 2, generator=torch.Generator().manual_seed(1)).bfloat16())
    shards.save(UnitResult(0, "mlp", "layers.0.mlp", 0.5, 0.25, "refined"), {"layers.0.mlp.up": weight})
    return shards


@pytest.mark.slow
def test_no_flipped_bit_of_a_unit_goes_unnoticed(shards):
    result, weights = shards.load(0, "mlp")
    (file,) = shards.files()
    whole = file.read_bytes()
    for position in range(8 * len(whole)):
        file.write_bytes(flip(whole, position))
        other = UnitShards(shards.directory, shards.grid)
        found = other.load(0, "mlp")
        # Some bits of the header mean nothing, such as spaces behind it.
        if found is not None:
            assert found[0] == result
            assert torch.equal(found[1]["layers.0.mlp.up"].codes, weights["layers.0.mlp.up"].codes)
            assert torch.equal(found[1]["layers.0.mlp.up"].scales, weights["layers.0.mlp.up"].scales)
        else:
            assert not other.results()
            assert not len(other.weights())


def test_a_unit_that_is_damaged_while_it_is_in_use_is_named(shards):
    weights = shards.weights()
    (file,) = shards.files()
    content = file.read_bytes()
    file.write_bytes(flip(content, 8 * len(content) - 1))
    with pytest.raises(ValueError, match=r"block_0000\.mlp\.safetensors is damaged: start fit again"):
        weights["layers.0.mlp.up"]


def test_a_wandb_id_that_is_none_is_made_again(tmp_path):
    directory = RunDirectory(tmp_path)
    known = directory.wandb_id()
    assert directory.wandb_id() == known
    for harmed in (b"", known[:4].encode(), b"\xff" * 16):
        (tmp_path / "wandb_id").write_bytes(harmed)
        assert len(directory.wandb_id()) == 16
