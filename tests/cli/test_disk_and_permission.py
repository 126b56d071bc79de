"""fit and its disk: asked before the work, in the words of the recipe."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gsq_module import commands, space, storage


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that takes time may begin."""

    def begun(*args, **kwargs) -> None:
        raise AssertionError("the work has begun")

    monkeypatch.setattr(commands, "fit", begun)


@pytest.mark.usefixtures("no_work")
def test_too_little_room_is_refused_with_figures_and_remedies(toy, run_cli, tmp_path: Path, monkeypatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda path: usage._replace(free=10_000))
    disk = ("--model.store", "disk", "--model.snapshot_every", "1")
    outcome = run_cli("fit", "--config", toy.recipe, "--run_dir", tmp_path / "run", *disk)
    assert outcome.status == 2
    for part in (
        f"run_dir='{tmp_path}/run'",
        f"export_dir='{tmp_path}/run/export'",
        "refined units",
        "initial units",
        "hidden states",
        "snapshots",
        "0.010 MB are free",
        "are missing",
        "--run_dir",
        "--export_dir",
        "--model.measure_initial false",
        "--model.store memory",
    ):
        assert part in outcome.error, part


def test_the_estimate_is_not_below_what_a_run_takes(finished_toy, run_cli, tmp_path: Path, monkeypatch) -> None:
    asked: list[space.Need] = []
    needs = space.needs
    monkeypatch.setattr(space, "needs", lambda *args: asked.extend(needs(*args)) or asked)
    assert run_cli("fit", "--config", finished_toy.recipe, "--run_dir", tmp_path / "run").status == 0
    estimate = {need.what: need.nbytes for need in asked}

    def tensors(folder: str) -> int:
        files = (tmp_path / "run" / folder).glob("*.safetensors")
        return sum(tensor.nbytes for file in files for name, tensor in load_file(file).items() if "_shape" not in name)

    assert estimate == {
        "refined units": tensors("units"),
        "initial units": tensors("initial"),
        "export": tensors("export"),
    }


@pytest.mark.usefixtures("no_work")
def test_an_export_place_that_may_not_be_written_is_refused(toy, run_cli, tmp_path: Path, monkeypatch) -> None:
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode, **keywords: Path(path).name != "closed" and access(path, mode))
    (tmp_path / "closed").mkdir()
    places = ("--run_dir", tmp_path / "run", "--export_dir", tmp_path / "closed" / "export")
    outcome = run_cli("fit", "--config", toy.recipe, *places)
    assert outcome.status == 2
    assert f"export: {tmp_path}/closed may not be written" in outcome.error


@pytest.mark.usefixtures("no_model")
def test_a_run_directory_that_may_not_be_written_is_refused_at_once(toy, run_cli, tmp_path: Path, monkeypatch) -> None:
    opened = os.open

    def forbidden(path, *args, **keywords) -> int:
        if str(path).startswith(str(tmp_path)):
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *args, **keywords)

    monkeypatch.setattr(os, "open", forbidden)
    outcome = run_cli("fit", "--config", toy.recipe, "--run_dir", tmp_path / "run")
    assert outcome.status == 2
    assert "cannot be written (Permission denied)" in outcome.error
    assert "--run_dir" in outcome.error
    assert "Traceback" not in outcome.err


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("below", ["", "runs/mine"])
def test_a_run_directory_in_the_model_is_refused(toy, run_cli, tmp_path: Path, below: str) -> None:
    (tmp_path / "link").symlink_to(toy.model)
    before = sorted(toy.model.iterdir())
    places = ("--run_dir", tmp_path / "link" / below, "--export_dir", tmp_path / "export")
    outcome = run_cli("fit", "--config", toy.recipe, *places)
    assert outcome.status == 2
    assert "lies in the folder of the model" in outcome.error
    assert sorted(toy.model.iterdir()) == before


@pytest.mark.parametrize("changed", ["weights", "config", "text"])
def test_other_content_behind_the_same_names_is_refused(changed, toy, run_cli, tmp_path: Path, monkeypatch) -> None:
    """A model that was trained further, a text that was edited: the recipe is the same, and nothing is mixed."""
    model, text = Path(shutil.copytree(toy.model, tmp_path / "model")), tmp_path / "text.txt"
    shutil.copy(toy.text, text)
    short = ("--model.num_blocks", "1", "--model.measure_initial", "false")
    content = ("--model.path", model, "--data.calibration.init_args.paths", f"[{text}]")
    fit = ("fit", "--config", toy.recipe, "--run_dir", tmp_path / "run", *content, *short)
    assert run_cli(*fit).status == 0
    if changed == "weights":
        stored = load_file(model / "model.safetensors")
        save_file(
            {name: tensor * 1.01 for name, tensor in stored.items()}, model / "model.safetensors", {"format": "pt"}
        )
    elif changed == "config":
        config = model / "config.json"
        config.write_text(config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    else:
        text.write_text(text.read_text().replace("w7", "w8"))
    before = (tmp_path / "run" / "fingerprint.json").read_bytes()
    outcome = run_cli(*fit)
    assert outcome.status == 2
    expected = "data (its calibration rows)" if changed == "text" else "model (its files)"
    assert f"  {expected}: " in outcome.error
    assert outcome.error.count(" there, ") == 1
    assert (tmp_path / "run" / "fingerprint.json").read_bytes() == before
    if changed != "text":  # export reads no text
        again = run_cli("export", *fit[1:], "--export_dir", tmp_path / "elsewhere")
        assert again.status == 2
        assert f"  {expected}: " in again.error
        assert not (tmp_path / "elsewhere").exists()


def test_a_second_run_in_the_directory_is_refused(toy, run_cli, tmp_path: Path, monkeypatch) -> None:
    outcomes = []

    def meanwhile(*args) -> None:
        outcomes.append(run_cli("fit", "--config", toy.recipe, "--run_dir", tmp_path / "run"))
        outcomes.append(
            run_cli("evaluate", "--config", toy.recipe, "--run_dir", tmp_path / "run", "--checkpoint", "original")
        )
        raise ValueError("enough")

    monkeypatch.setattr(space, "check_space", meanwhile)
    assert run_cli("fit", "--config", toy.recipe, "--run_dir", tmp_path / "run").status == 2
    second, evaluated = outcomes
    assert second.status == 2
    assert f"run_dir='{tmp_path}/run' is in use by process {os.getpid()} on " in second.error
    assert evaluated.status == 0, "reading needs no lock"
    assert torch.isfinite(torch.tensor(evaluated.cli.measured["words"].perplexity))
