"""What a user can mend, met in the middle of a run: one message and the documented exit status."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gsq_module import pipeline, run_results
from gsq_module.problems import UserError

UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def options(toy, tmp_path) -> list:
    """Of a run with a copy of the model."""
    shutil.copytree(toy.model, tmp_path / "model")
    changes = {"model.path": tmp_path / "model", "run_dir": tmp_path / "run", "model.measure_initial": "false"}
    return ["--config", toy.recipe, *(f"--{key}={value}" for key, value in changes.items())]


def damage(model: Path, factor: float) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors[UP][0] *= factor
    save_file(tensors, model / "model.safetensors", {"format": "pt"})


STATES = "error: original, block 1: model.layers.1.mlp: the hidden states behind its block are not finite ("
TARGET = "error: capture, block 1, mlp: model.layers.1.mlp: its target is not finite (mean square "


@pytest.mark.parametrize(
    ("factor", "dtype", "target", "begin", "remedy"),
    [
        (math.nan, "float32", "original_stream", STATES, "the first is nan): a weight up to there is no number"),
        (math.nan, "float32", "original_unit", TARGET, "nan): a weight up to there is no number"),
        (1e6, "float16", "original_unit", TARGET, "float16 ends at 65504, and the model goes beyond"),
    ],
)
def test_numbers_that_are_not_finite(factor, dtype, target, begin, remedy, options, tmp_path, run_cli):
    damage(tmp_path / "model", factor)
    done = run_cli("fit", *options, f"--model.dtype={dtype}", f"--model.target={target}")
    assert done.status == 17
    assert "Traceback" not in done.err
    assert "memory report" not in done.err
    assert done.error.startswith(begin)
    assert remedy in done.error
    assert "Next: the same command with " in done.error
    assert done.error.count("\n") == 1


def test_an_infinite_weight_that_no_target_shows(options, tmp_path, run_cli, monkeypatch):
    """GPTQ looks at the weights themselves."""
    monkeypatch.setattr(pipeline, "gptq", _with_infinity(pipeline.gptq))
    done = run_cli("fit", *options)
    assert done.status == 17
    assert "error: initialize, block 0, mlp: model.layers.0.mlp.gate_proj: the checkpoint's weight" in done.error
    assert "the first is inf" in done.error


def _with_infinity(run_gptq):
    def gptq(weight, *args, **kwargs):
        weight = weight.clone()
        weight[0, 0] = torch.inf
        return run_gptq(weight, *args, **kwargs)

    return gptq


@pytest.mark.parametrize(("error", "status"), [(UserError("mend this"), 2), (ValueError("a slip of ours"), None)])
def test_of_what_no_user_can_mend_the_traceback_is_kept(error, status, options, run_cli, monkeypatch):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(run_results, "export_checkpoint", fail)
    if status is None:
        with pytest.raises(ValueError, match="a slip of ours"):
            run_cli("fit", *options)
        return
    done = run_cli("fit", *options)
    assert (done.status, done.error) == (2, "error: export: mend this\n")
