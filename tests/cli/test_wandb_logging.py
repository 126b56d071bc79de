"""Weights & Biases: refused early where it cannot work, one run for all blocks where it can (36, 37)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb

from gsq_module.metrics_log import read_rows
from gsq_module.module import GSQModule

LOGGER = ("--trainer.logger", "lightning.pytorch.loggers.WandbLogger")


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Nobody is logged in to W&B, nobody can be asked, and what is written to the working directory is seen."""
    folder = tmp_path / "cwd"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_RUN_ID", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "home" / ".netrc"))
    monkeypatch.setenv("WANDB_SILENT", "true")
    yield folder
    wandb.finish()
    wandb.teardown()


@pytest.mark.usefixtures("no_model")
def test_without_a_key_and_a_terminal_it_fails_before_the_model_loads(toy, run_cli, alone: Path) -> None:
    run_dir = alone.parent / "run"
    outcome = run_cli("fit", "--config", toy.recipe, "--run_dir", run_dir, *LOGGER)
    assert outcome.status == 2
    assert "trainer.logger: WandbLogger cannot start" in outcome.error
    assert "wandb login" in outcome.error
    assert "offline true" in outcome.error
    assert not (run_dir / "units").exists()


def test_offline_all_blocks_are_one_run_whose_step_only_rises(
    toy, run_cli, alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[tuple[str, dict[str, Any]]] = []
    log = wandb.Run.log

    def spy(self: wandb.Run, data: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        logged.append((self.id, data))
        log(self, data, *args, **kwargs)

    monkeypatch.setattr(wandb.Run, "log", spy)
    run_dir = alone.parent / "run"
    offline = ("--trainer.logger.init_args.offline", "true", "--trainer.logger.init_args.save_dir", run_dir)
    outcome = run_cli("fit", "--config", toy.recipe, "--run_dir", run_dir, *LOGGER, *offline)
    assert outcome.status == 0, outcome.err
    assert len(list((run_dir / "wandb").glob("offline-run-*/*.wandb"))) == 1
    assert list(alone.iterdir()) == [], "something was written outside of the run directory"
    assert len({run_id for run_id, _ in logged}) == 1
    steps = [data["trainer/global_step"] for _, data in logged]
    assert steps == sorted(steps)
    # Two blocks of one unit, eight steps each.
    trained = [data["trainer/global_step"] for _, data in logged if "train/error" in data]
    assert trained == list(range(16))
    assert [data["unit/block"] for _, data in logged if "unit/block" in data] == [0.0, 1.0]
    assert outcome.cli is not None
    perplexity = outcome.cli.summary["perplexity"]["quantized"]
    assert logged[-1][1]["perplexity/words/quantized"] == pytest.approx(perplexity)
    pictures = {name for _, data in logged for name in data if name.startswith("report/")}
    assert {"report/errors", "report/losses", "report/figures", "report/continuations"} <= pictures
    # W&B is beside the CSV log, not in its place.
    assert (run_dir / "metrics" / "version_0" / "metrics.csv").is_file()


def test_a_resumed_run_goes_on_in_the_same_wandb_run_without_a_doubled_step(
    toy, run_cli, alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted in the second unit, offline twice; `allow` begins anew where the W&B run was deleted (case 37)."""
    inits: list[dict[str, Any]] = []
    init = wandb.init
    monkeypatch.setattr(wandb, "init", lambda **arguments: inits.append(arguments) or init(**arguments))
    logged: list[tuple[str, dict[str, Any]]] = []
    log = wandb.Run.log
    monkeypatch.setattr(
        wandb.Run, "log", lambda self, data, *args, **kwargs: logged.append((self.id, data)) or log(self, data, *args)
    )
    run_dir = alone.parent / "run"
    fit = ("fit", "--config", toy.recipe, "--run_dir", run_dir, "--model.measure_initial", "false", *LOGGER)
    offline = ("--trainer.logger.init_args.offline", "true")
    step = GSQModule.training_step

    def stopping(self: GSQModule, *args: Any) -> Any:
        if self.trainer.global_step == 11:
            raise RuntimeError("interrupted")
        return step(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(GSQModule, "training_step", stopping)
        with pytest.raises(RuntimeError, match="interrupted"):
            run_cli(*fit, *offline)
    wandb.finish()
    assert [data["trainer/global_step"] for _, data in logged if "train/error" in data] == list(range(11))
    outcome = run_cli(*fit, *offline)
    assert outcome.status == 0, outcome.err
    known = (run_dir / "wandb_id").read_text()
    assert {run_id for run_id, _ in logged} == {known}
    assert [(arguments["id"], arguments["resume"]) for arguments in inits] == [(known, "allow")] * 2
    assert [data["trainer/global_step"] for _, data in logged if "train/error" in data] == list(range(16))
    assert [data["unit/block"] for _, data in logged if "unit/block" in data] == [0.0, 1.0]
    rows = read_rows(run_dir / "metrics" / "version_0" / "metrics.csv")
    assert [row["step"] for row in rows if "train/error" in row] == list(range(16))
    assert len(list((run_dir / "wandb").glob("offline-run-*/*.wandb"))) == 2, "`wandb sync` joins them by their id"
    progress = json.loads((run_dir / "progress.json").read_text())
    assert (progress["state"], progress["sessions"]) == ("done", 2)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["seconds"]["total"] == pytest.approx(progress["seconds"]["total"], abs=5)
    assert summary["seconds"]["refine"] >= sum(unit["seconds"] for unit in summary["units"]) * 0.9
