"""The check before a fit: what cannot fit is refused before a weight is read, unless the user insists."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from callbacks import AllocatorStats, OOMReport
from gsq_module import forecasts, recipe_run
from gsq_module.memory.plan import MemoryPlan

GIB = 2**30
STATS = ("--trainer.callbacks+=callbacks.AllocatorStats",)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[recipe_run.Run]]:
    """Let the check see a GPU with so much free memory; the run itself stays on the CPU. Returns the runs it saw."""
    check = forecasts.check_memory

    def has(free: int) -> list[recipe_run.Run]:
        runs: list[recipe_run.Run] = []

        def on_a_gpu(run: recipe_run.Run, refuse: bool) -> None:
            runs.append(run)
            cpu, run.device = run.device, torch.device("cuda", 0)
            try:
                check(run, refuse)
            finally:
                run.device = cpu

        monkeypatch.setattr(forecasts, "check_memory", on_a_gpu)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 80 * GIB))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
        return runs

    return has


@pytest.fixture
def fit(toy, run_cli, tmp_path: Path) -> Callable[..., Any]:
    def run(*options: str) -> Any:
        return run_cli("fit", "--config", toy.recipe, "--run_dir", tmp_path / "run", *options)

    return run


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fit ends with a message of its own where it would open the model."""

    def opened(run: recipe_run.Run) -> None:
        raise ValueError("the model would be opened now")

    monkeypatch.setattr(recipe_run.Run, "open_model", opened)


def plans(run: recipe_run.Run) -> list[object]:
    """What the callbacks of a run that have a use for the plan know of it."""
    callbacks = run.trainer.callbacks  # type: ignore[attr-defined]
    return [callback.plan for callback in callbacks if isinstance(callback, (AllocatorStats, OOMReport))]


@pytest.mark.usefixtures("no_model")
def test_what_cannot_fit_is_refused_before_the_model_is_touched(device, fit, tmp_path: Path) -> None:
    device(100 * 2**20)
    outcome = fit("--model.refinement.logit_dtype", "float32")
    assert outcome.status == 2
    assert "Traceback" not in outcome.err
    first, *rest = outcome.error.splitlines()
    assert first.startswith("error: the run does not fit: needs")
    assert "cuda:0" in first
    assert first.endswith("What would lower it:")
    assert rest[-1] == "To try all the same: --check_memory false"
    assert rest[:-1], "no remedy is given"
    assert all(line.startswith("  --") and line.endswith(" less") for line in rest[:-1])
    assert not list(tmp_path.glob("run/units/*"))


@pytest.mark.usefixtures("stopped")
def test_a_remedy_can_be_followed_in_the_same_run_directory(device, fit) -> None:
    """Also one that shapes the result: nothing of the refused run is there that it could clash with."""
    device(100 * 2**20)
    assert "does not fit" in fit().error
    device(8 * GIB)
    assert fit("--model.initializer", "rtn").error == "error: the model would be opened now\n"


@pytest.mark.usefixtures("stopped")
def test_what_fits_is_told_and_the_callbacks_know_the_plan(device, fit) -> None:
    runs = device(8 * GIB)
    outcome = fit(*STATS)
    assert outcome.error == "error: the model would be opened now\n", "it was refused"
    assert "memory plan: fits: needs" in outcome.out
    known = plans(runs[0])
    assert len(known) == 2
    for plan in known:
        assert isinstance(plan, MemoryPlan)
        assert plan.predicted("refine", 1, "mlp") == plan.predicted("refine", 0, "mlp") is not None


@pytest.mark.usefixtures("stopped")
def test_with_the_check_off_it_is_only_said(device, fit, caplog: pytest.LogCaptureFixture) -> None:
    runs = device(100 * 2**20)
    with caplog.at_level(logging.WARNING, logger="gsq_module"):
        outcome = fit("--check_memory", "false", *STATS)
    assert outcome.error == "error: the model would be opened now\n"
    (record,) = [r for r in caplog.records if "does not fit" in r.getMessage()]
    assert record.levelno == logging.WARNING
    assert "--check_memory" not in record.getMessage()
    assert all(isinstance(plan, MemoryPlan) for plan in plans(runs[0])), "a report of what happens then needs it most"


@pytest.mark.usefixtures("stopped")
def test_a_model_that_cannot_be_planned_is_only_warned_about(
    device, fit, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runs = device(100 * 2**20)

    def data_dependent(*args, **kwargs) -> None:
        raise torch._subclasses.fake_tensor.DataDependentOutputException(torch.ops.aten._local_scalar_dense.default)

    monkeypatch.setattr("transformers.models.llama.modeling_llama.LlamaMLP.forward", data_dependent)
    with caplog.at_level(logging.WARNING, logger="gsq_module"):
        outcome = fit(*STATS)
    assert outcome.error == "error: the model would be opened now\n"
    (record,) = [r for r in caplog.records if "no memory plan" in r.getMessage()]
    assert record.exc_info is not None, "why, for whoever wants to mend it"
    assert plans(runs[0]) == [None, None]


@pytest.mark.usefixtures("no_model")
def test_what_the_user_can_mend_is_an_error_of_the_check_too(device, fit) -> None:
    device(8 * GIB)
    outcome = fit("--model.ignore", "['*']")
    assert outcome.status == 2
    assert "model.ignore" in outcome.error


def test_on_a_cpu_nothing_is_planned(fit, monkeypatch: pytest.MonkeyPatch, stopped) -> None:
    def planned(*args, **kwargs) -> None:
        raise AssertionError("there is no device to plan for")

    monkeypatch.setattr(forecasts, "plan_run", planned)
    assert fit().error == "error: the model would be opened now\n"


@pytest.mark.usefixtures("no_model")
def test_a_rehearsal_is_checked_too(device, toy, run_cli, tmp_path: Path) -> None:
    device(100 * 2**20)
    outcome = run_cli("rehearse", "--config", toy.recipe, "--run_dir", tmp_path / "run")
    assert outcome.status == 2
    assert "does not fit" in outcome.error
    assert "--check_memory false" in outcome.error
    assert not (tmp_path / "run").exists()
