"""Refinement helps, never harms, and starts from what it is told to start from (design.md, contracts 2 and 3)."""

from __future__ import annotations

import json
import math

import pytest
import torch
from toy_runs import BARE, ONE_BLOCK, STEPS, contents, run, summary_of

from gsq_module.module import GSQModule
from gsq_module.quantization.grid import GRIDS
from gsq_module.quantization.scales import round_to_nearest
from gsq_module.run_directory import RunDirectory
from gsq_module.streaming.checkpoint import Checkpoint


def codes(run_dir, grid=2):
    """Codes and scales of all units, by linear."""
    return dict(RunDirectory(run_dir).units(GRIDS[grid]).weights())


@pytest.mark.slow
def test_more_steps_help_clearly(llama, tmp_path):
    run(llama, tmp_path / "run", "--model.refinement.epochs=6", *ONE_BLOCK)
    units = summary_of(tmp_path / "run")["units"]
    for unit in units:
        assert unit["kept"] == "refined"
        assert unit["refined_error"] < 0.95 * unit["initial_error"]
        assert 0.01 < unit["codes_changed"] < 0.5
    assert units[0]["refined_error"] < 0.8 * units[0]["initial_error"]


BAD = {
    "logits thrown about": ("--model.refinement.lr=50", "--model.refinement.scale_lr=0.5"),
    "scales beyond all numbers": ("--model.refinement.scale_lr=1e38",),
}


@pytest.mark.parametrize("how", BAD)
def test_bad_refinement_keeps_the_initial_codes(how, llama, tmp_path):
    run(llama, tmp_path / "bad", *BAD[how], *BARE)
    run(llama, tmp_path / "initial", "--model.refinement.epochs=0", *BARE)
    results = RunDirectory(tmp_path / "bad").units(GRIDS[2]).results()
    for unit in results:
        assert unit.kept == "initial"
        assert not unit.rejected_error <= unit.initial_error == unit.refined_error
        assert unit.codes_changed == 0.0
        assert unit.steps == STEPS
    overflown = how == "scales beyond all numbers"
    assert [math.isfinite(unit.rejected_error) for unit in results] == [not overflown] * 4
    summary = summary_of(tmp_path / "bad")
    assert [unit["rejected_error"] is None for unit in summary["units"]] == [overflown] * 4
    assert same_weights(tmp_path / "bad", tmp_path / "initial")
    assert summary["perplexity"]["quantized"] == summary_of(tmp_path / "initial")["perplexity"]["quantized"]


def same_weights(one, other):
    weights, others = (contents(folder / "export") for folder in (one, other))
    shards = [name for name in weights if name.endswith(".safetensors")]
    assert shards
    return all(weights[name] == others[name] for name in shards)


def test_loss_that_is_nan_keeps_the_initial_codes(llama, tmp_path, monkeypatch):
    training_step = GSQModule.training_step
    monkeypatch.setattr(GSQModule, "training_step", lambda *arguments: training_step(*arguments) * math.nan)
    run(llama, tmp_path / "nan", *ONE_BLOCK)
    run(llama, tmp_path / "initial", "--model.refinement.epochs=0", *ONE_BLOCK)
    for unit in summary_of(tmp_path / "nan")["units"]:
        assert unit["kept"] == "initial"
        assert unit["refined_error"] == unit["initial_error"]
        assert unit["codes_changed"] == 0.0
    assert same_weights(tmp_path / "nan", tmp_path / "initial")


def test_no_epochs_no_refinement(llama, tmp_path, monkeypatch):
    monkeypatch.setattr(GSQModule, "training_step", None)
    cli = run(llama, tmp_path / "run", "--model.refinement.epochs=0")
    summary = summary_of(tmp_path / "run")
    assert set(summary["perplexity"]) == {"original", "quantized", "reloaded"}, "initial would be quantized once more"
    assert not (tmp_path / "run" / "initial").exists()
    assert cli.trainer.global_step == 0
    for unit in summary["units"]:
        assert unit["kept"] == "initial"
        assert unit["rejected_error"] is None
        assert (unit["steps"], unit["codes_changed"]) == (0, 0.0)
        assert 0 < unit["refined_error"] == unit["initial_error"]


def test_units_that_are_not_to_be_refined_keep_their_initial_codes(llama, tmp_path):
    run(llama, tmp_path / "run", "--model.refinement.units=[mlp]", *ONE_BLOCK)
    attention, mlp = summary_of(tmp_path / "run")["units"]
    assert (attention["unit"], attention["kept"], attention["steps"]) == ("attention", "initial", 0)
    assert (mlp["unit"], mlp["kept"]) == ("mlp", "refined")
    assert mlp["steps"] > 0


def test_units_to_refine_must_be_quantized(llama, tmp_path, capsys):
    with pytest.raises(SystemExit) as error:
        run(llama, tmp_path / "run", "--model.units=[mlp]", "--model.refinement.units=[attention]")
    assert error.value.code == 2
    assert "model.refinement.units" in capsys.readouterr().err


@pytest.mark.slow
def test_what_is_measured_initially_is_the_run_without_refinement(llama, tmp_path):
    run(llama, tmp_path / "both", "--reload_max_gib=0")
    run(llama, tmp_path / "initial", "--model.refinement.epochs=0", *BARE)
    initial = summary_of(tmp_path / "both")["perplexity"]["initial"]
    assert initial == summary_of(tmp_path / "initial")["perplexity"]["quantized"]


@pytest.mark.parametrize("signed", ["true", "false"])
def test_rtn_rounds_the_checkpoint(signed, llama, tmp_path):
    options = ("--model.initializer=rtn", f"--model.signed_scales={signed}", "--model.refinement.epochs=0")
    cli = run(llama, tmp_path / "run", *options, *BARE)
    found = codes(tmp_path / "run")
    assert len(found) == 14
    checkpoint = Checkpoint(cli.model.path)
    for name, weight in found.items():
        original = checkpoint.tensor(f"{name}.weight")
        expected = round_to_nearest(original, GRIDS[2], 32, torch.float32, signed == "true")
        assert torch.equal(weight.codes, expected.codes)
        assert torch.equal(weight.scales, expected.scales)
    assert any((weight.scales < 0).any() for weight in found.values()) == (signed == "true")


@pytest.mark.slow
def test_gptq_starts_better_than_rtn(llama, tmp_path):
    errors = {}
    for initializer in ("gptq", "rtn"):
        options = (f"--model.initializer={initializer}", "--model.refinement.epochs=0")
        run(llama, tmp_path / initializer, *options, *BARE)
        errors[initializer] = [unit["initial_error"] for unit in summary_of(tmp_path / initializer)["units"]]
    assert all(gptq < rtn for gptq, rtn in zip(errors["gptq"], errors["rtn"], strict=True))


def test_only_the_first_blocks(llama, tmp_path):
    run(llama, tmp_path / "run", "--model.num_blocks=1", "--model.units=[mlp]", *BARE)
    summary = summary_of(tmp_path / "run")
    assert [(unit["block"], unit["unit"]) for unit in summary["units"]] == [(0, "mlp")]
    assert set(codes(tmp_path / "run")) == {f"model.layers.0.mlp.{linear}_proj" for linear in ("gate", "up", "down")}
    ignored = json.loads((tmp_path / "run" / "export" / "config.json").read_text())["quantization_config"]["ignore"]
    assert len(ignored) == 4 + 7 + 1
    assert "model.layers.1.mlp.up_proj" in ignored
