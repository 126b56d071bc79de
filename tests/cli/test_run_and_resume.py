"""The three commands on a toy model: fit and resume (case 33), export, evaluate, exit statuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from gsq_module.refinement import UnitRefiner

ROOT = Path(__file__).parents[2]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file but the configurations, which say where the folder was made and is now, and whose process holds it."""
    left_out = ("config*.yaml", "lock")
    files = [path for path in folder.rglob("*") if path.is_file() and not any(map(path.match, left_out))]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture
def refined(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the weights that are refined, unit by unit."""
    names: list[str] = []
    call = UnitRefiner.__call__

    def spy(self, problem, *args):
        names.extend(problem.weights)
        return call(self, problem, *args)

    monkeypatch.setattr(UnitRefiner, "__call__", spy)
    return names


def test_the_same_command_again_does_nothing_over_and_keeps_both_configs(
    toy, run_cli, toy_run: Path, refined: list[str]
) -> None:
    before, config = contents(toy_run), (toy_run / "config.yaml").read_text()
    changes_nothing = ("--data.pin_memory", "false", "--data.forward_batch_size", "3", "--model.targets", "recomputed")
    again = ("fit", "--config", toy.recipe, "--run_dir", toy_run, *changes_nothing)
    outcome = run_cli(*again)
    assert outcome.status == 0, outcome.err
    assert refined == []
    after = contents(toy_run)
    for name in before:
        if name.startswith(("export/", "units/", "initial/")) or name == "fingerprint.json":
            assert after[name] == before[name], name
    assert (toy_run / "config.1.yaml").read_text() == config
    assert yaml.safe_load(config)["data"]["pin_memory"] is True
    assert yaml.safe_load((toy_run / "config.yaml").read_text())["data"]["pin_memory"] is False

    assert run_cli(*again).status == 0
    assert not (toy_run / "config.2.yaml").exists(), "an equal config is not kept twice"


def test_an_interrupted_run_does_the_missing_unit_and_ends_the_same(
    toy, run_cli, toy_run: Path, refined: list[str]
) -> None:
    before = contents(toy_run)
    (toy_run / "units" / "block_0001.mlp.safetensors").unlink()
    outcome = run_cli("fit", "--config", toy.recipe, "--run_dir", toy_run)
    assert outcome.status == 0, outcome.err
    assert refined == [f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up", "down")]
    after = contents(toy_run)
    for name in before:
        if name.startswith("export/"):
            assert after[name] == before[name], name


def test_the_summary_agrees_with_what_is_on_disk(finished_toy) -> None:
    summary = json.loads((finished_toy.run_dir / "summary.json").read_text())
    perplexity = summary["perplexity"]
    assert set(perplexity) == {"original", "initial", "quantized", "reloaded"}
    assert perplexity["reloaded"] == pytest.approx(perplexity["quantized"], rel=1e-3)
    assert [unit["name"] for unit in summary["units"]] == ["model.layers.0.mlp", "model.layers.1.mlp"]
    assert all(unit["refined_error"] <= unit["initial_error"] for unit in summary["units"])
    assert "refined" in {unit["kept"] for unit in summary["units"]}, "the toy shows nothing of refinement"
    assert summary["export"]["path"] == str(finished_toy.run_dir / "export")


def test_export_writes_the_same_folder_again(toy, run_cli, toy_run: Path, tmp_path: Path) -> None:
    before = contents(toy_run)
    elsewhere = tmp_path / "elsewhere"
    outcome = run_cli("export", "--config", toy.recipe, "--run_dir", toy_run, "--export_dir", elsewhere)
    assert outcome.status == 0, outcome.err
    assert str(elsewhere) in outcome.out
    assert contents(elsewhere) == contents(toy_run / "export")
    assert contents(toy_run) == before


def test_export_of_an_unfinished_run_says_so(toy, run_cli, toy_run: Path) -> None:
    (toy_run / "units" / "block_0001.mlp.safetensors").unlink()
    before = contents(toy_run)
    outcome = run_cli("export", "--config", toy.recipe, "--run_dir", toy_run)
    assert outcome.status == 2
    assert "not finished" in outcome.error
    assert "3 of 6" in outcome.error
    assert "model.layers.1.mlp.gate_proj" in outcome.error
    assert "fit" in outcome.error
    assert contents(toy_run) == before


def test_export_with_other_bits_than_the_runs_is_refused(toy, run_cli, toy_run: Path) -> None:
    before = contents(toy_run)
    outcome = run_cli("export", "--config", toy.recipe, "--run_dir", toy_run, "--model.bits", "3")
    assert outcome.status == 2
    assert "model.bits: 2 there, 3 now" in outcome.error
    assert contents(toy_run) == before


def test_evaluate_agrees_block_by_block_and_whole(finished_toy, run_cli) -> None:
    def perplexity(*args: str) -> float:
        outcome = run_cli("evaluate", "--config", finished_toy.recipe, *args)
        assert outcome.status == 0, outcome.err
        assert outcome.cli is not None
        value = outcome.cli.measured["words"].perplexity
        assert f"words: perplexity {value:.3f}" in outcome.out
        return value

    original, exported = perplexity("--checkpoint", "original"), perplexity()
    assert abs(exported / original - 1) > 0.005, "the comparisons below would show nothing"
    whole = ("--whole_model", "true")
    assert perplexity("--checkpoint", "original", *whole) == pytest.approx(original, rel=1e-3)
    assert perplexity(*whole) == pytest.approx(exported, rel=1e-3)
    named = perplexity("--checkpoint", str(finished_toy.run_dir / "export"))
    assert named == exported
    summary = json.loads((finished_toy.run_dir / "summary.json").read_text())["perplexity"]
    assert original == pytest.approx(summary["original"], rel=1e-6)
    assert exported == pytest.approx(summary["quantized"], rel=1e-3)


def test_evaluate_before_there_is_an_export_says_what_to_do(toy, run_cli, tmp_path: Path) -> None:
    outcome = run_cli("evaluate", "--config", toy.recipe, "--run_dir", tmp_path / "none")
    assert outcome.status == 2
    assert f"run_dir='{tmp_path}/none'" in outcome.error
    for remedy in ("fit", "--checkpoint original"):
        assert remedy in outcome.error
    assert not (tmp_path / "none").exists()


def test_a_silent_run_is_silent(toy, run_cli, toy_run: Path) -> None:
    outcome = run_cli(
        *("fit", "--config", toy.recipe, "--run_dir", toy_run),
        *("--trainer.enable_progress_bar", "false", "--trainer.callbacks", "callbacks.RunProgress"),
    )
    assert outcome.status == 0, outcome.err
    assert "elapsed" not in outcome.out
    assert "perplexity" in outcome.out


def test_exit_statuses_of_the_script(toy, toy_run: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "bitz.yaml"
    recipe.write_text("model: {bitz: 2}\n")

    def start(*args: str | Path) -> subprocess.Popen[str]:
        command = [sys.executable, str(ROOT / "recipes" / "run.py"), "fit", "--config", *map(str, args)]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        return subprocess.Popen(
            command, cwd=tmp_path, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    good = start(toy.recipe, "--run_dir", toy_run)
    unknown_key = start(recipe)
    out, err = good.communicate(timeout=120)
    assert good.returncode == 0, err
    assert f"summary: {toy_run / 'summary.json'}" in out
    out, err = unknown_key.communicate(timeout=120)
    assert unknown_key.returncode == 2
    assert "model.bitz" in err
    assert "Traceback" not in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bitz.yaml", "run"], "nothing lands beside the run"
