"""The benchmarks of several GPUs say what they lack; their processes run here on the CPU, on a toy."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import many_gpus
import nccl_memory
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "pipeline"))

from toy_runs import SEQ_LEN, toy_checkpoint, write_recipe


def test_without_gpus_they_say_what_is_needed(monkeypatch):
    for module, options in ((many_gpus, []), (nccl_memory, []), (many_gpus, ["--share_gpu"])):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
        monkeypatch.setattr(sys, "argv", ["benchmark", *options])
        with pytest.raises(SystemExit, match="needed, there are 0"):
            module.main()


def test_nccl_settings_never_turn_multicast_on():
    assert all(setting.variables().get("NCCL_NVLS_ENABLE") in (None, "0") for setting in nccl_memory.SETTINGS.values())


def figures(gib: float) -> dict:
    size = int(gib * many_gpus.GIB)
    return {"allocated": size, "reserved": size, "device_used": 2 * size}


def test_a_row_compares_ranks_with_the_plan_and_the_single_gpu(monkeypatch):
    options = type("Options", (), {"devices": 2, "share_gpu": False})
    found = {"ranks": [figures(4), figures(5)], "predicted": 5.5 * many_gpus.GIB, "before": [0, 2**30]}
    found["step_seconds"] = 0.6
    row = many_gpus.cells("ddp 8 x 1024", found, 1.08, options)
    assert row[1:] == ["4.00 / 5.00", "4.00 / 5.00", "8.00 / 9.00", "5.50", "1.100", "600.0", "0.90"]
    options.share_gpu = True
    assert many_gpus.cells("ddp 8 x 1024", found, 1.08, options)[-2:] == ["-", "-"], "they mean nothing"


@pytest.mark.slow
def test_processes_of_every_row_end_to_end(monkeypatch, tmp_path, capsys):
    recipe = write_recipe(tmp_path, toy_checkpoint(tmp_path / "checkpoint"))
    monkeypatch.setattr(many_gpus, "BATCHES", {"4 x 1024": (4, SEQ_LEN, 1)})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    out = tmp_path / "out.json"
    arguments = ["--share_gpu", f"--config={recipe}", f"--run_dir={tmp_path / 'runs'}", f"--out={out}"]
    rows = ("single 4 x 1024", "ddp 4 x 1024", "sharded 4 x 1024")
    monkeypatch.setattr(sys, "argv", ["benchmark", *arguments, "--only", *rows])
    many_gpus.main()
    found = json.loads(out.read_text())["rows"]
    for row, ranks in zip(rows, (1, 2, 2), strict=True):
        assert found[row]["statuses"] == [0] * ranks, capsys.readouterr().out
        assert len(found[row]["ranks"]) == ranks
        assert found[row]["step_seconds"] > 0
