"""`evaluate --check`, and the warning before a run whose export would not serve."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest

ENGINES = ("transformers ", "compressed-tensors: ", "vLLM: ")


def test_the_runs_export(toy, toy_run: Path, run_cli) -> None:
    outcome = run_cli("evaluate", "--config", toy.recipe, "--run_dir", toy_run, "--check", "true")
    assert outcome.status == 0, outcome.err
    lines = [line for line in outcome.out.splitlines() if line.startswith(ENGINES)]
    assert len(lines) == 3
    assert all("can load it" in line for line in lines)
    assert "perplexity" not in outcome.out
    assert [verdict.loads for verdict in outcome.cli.engines] == [True, True, True]


def test_fit_and_export_say_it_too(toy, toy_run: Path, run_cli) -> None:
    summary = json.loads((toy_run / "summary.json").read_text())
    assert [engine["loads"] for engine in summary["engines"]] == [True, True, True]
    shutil.rmtree(toy_run / "export")
    outcome = run_cli("export", "--config", toy.recipe, "--run_dir", toy_run)
    assert outcome.status == 0, outcome.err
    assert sum(line.startswith(ENGINES) for line in outcome.out.splitlines()) == 3


def test_a_folder_that_is_named(toy, toy_run: Path, tmp_path: Path, run_cli) -> None:
    folder = tmp_path / "elsewhere"
    (toy_run / "export").rename(folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["ignore"].remove("model.layers.0.self_attn.k_proj")
    (folder / "config.json").write_text(json.dumps(config))
    outcome = run_cli(
        *("evaluate", "--config", toy.recipe, "--run_dir", toy_run, "--check", "true", "--checkpoint", folder)
    )
    assert outcome.status == 0, outcome.err
    assert [verdict.loads for verdict in outcome.cli.engines] == [False, True, False]
    assert "vLLM: cannot load it" in outcome.out
    assert "model.layers.0.self_attn.k_proj" in outcome.out


@pytest.mark.parametrize("options", ["--check true", "--compare false", "--whole_model true"])
def test_bits_that_are_not_those_of_the_tensors(toy, toy_run: Path, run_cli, options: str) -> None:
    file = toy_run / "export" / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] = 3
    file.write_text(json.dumps(config))
    outcome = run_cli("evaluate", "--config", toy.recipe, "--run_dir", toy_run, *options.split())
    if "check" in options:
        assert [verdict.loads for verdict in outcome.cli.engines] == [False, False, False]
        assert outcome.status == 0
    else:
        assert outcome.status == 2
        assert "Traceback" not in outcome.err
    said = outcome.out if "check" in options else outcome.error
    assert f"config_groups.group_0.weights.num_bits=3 in {file}, but stored with num_bits 2" in said
    assert "Next: set config_groups.group_0.weights.num_bits to 2" in said


def test_a_model_in_float_is_no_export(toy, toy_run: Path, run_cli) -> None:
    outcome = run_cli(
        *("evaluate", "--config", toy.recipe, "--run_dir", toy_run, "--check", "true", "--checkpoint", toy.model)
    )
    assert outcome.status == 2
    assert "has no quantization_config" in outcome.error
    assert "--checkpoint FOLDER" in outcome.error


PROBLEM = "vLLM will not load the export: gate_proj and up_proj are one layer there, but up_proj stays in float"


def test_a_plan_warns_of_half_a_fused_layer(toy, run_cli, tmp_path: Path) -> None:
    ignore = ("--model.ignore", '["*.up_proj"]', "--run_dir", tmp_path / "run", "--memory", "12GiB")
    outcome = run_cli("plan", "--config", toy.recipe, *ignore)
    assert outcome.status == 0, outcome.err
    assert f"{PROBLEM}, the rest not: model.layers.0.mlp, model.layers.1.mlp" in outcome.out


def test_a_fit_warns_of_it_and_goes_on(toy, run_cli, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    few = ("--reload_max_gib", "0", "--model.measure_initial", "false", "--model.refinement.epochs", "0")
    ignore = ("--model.ignore", '["*.up_proj"]', "--run_dir", tmp_path / "run")
    with caplog.at_level(logging.WARNING):
        outcome = run_cli("fit", "--config", toy.recipe, *few, *ignore)
    assert outcome.status == 0, outcome.err
    assert sum(PROBLEM in record.getMessage() for record in caplog.records) == 1
    assert [engine["loads"] for engine in outcome.cli.summary["engines"]] == [True, True, False]
