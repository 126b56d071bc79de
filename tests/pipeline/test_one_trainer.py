"""One Trainer fits unit after unit: exact step counts, one step axis, metrics on disk."""

from __future__ import annotations

import csv
from itertools import pairwise

import pytest
from lightning.pytorch.callbacks import Callback
from toy_runs import BARE, ONE_BLOCK, STEPS, contents, run, summary_of

from gsq_module.cli import GSQCLI


class Watch(Callback):
    """The Trainer's step where a fit begins, at each of its batches, and where it ends."""

    fits: list[list[int]]

    def __init__(self) -> None:
        Watch.fits = []

    def on_train_start(self, trainer, pl_module):
        Watch.fits.append([trainer.global_step])

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        Watch.fits[-1].append(trainer.global_step)

    def on_train_end(self, trainer, pl_module):
        Watch.fits[-1].append(trainer.global_step)


@pytest.fixture
def watched(monkeypatch):
    """Adds the callback to whatever the recipe names."""
    instantiate = GSQCLI.instantiate_trainer

    def with_watch(self, **kwargs):
        trainer = instantiate(self, **kwargs)
        trainer.callbacks.append(Watch())
        return trainer

    monkeypatch.setattr(GSQCLI, "instantiate_trainer", with_watch)
    return Watch


def metrics(run_dir):
    """Rows of metrics.csv; empty cells left out."""
    (file,) = run_dir.glob("metrics/*/metrics.csv")
    with file.open() as lines:
        return [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(lines)]


@pytest.mark.parametrize(("epochs", "microbatch"), [(1, 8), (3, 4)])
def test_steps_are_exact(epochs, microbatch, llama, tmp_path, watched):
    options = (f"--model.refinement.epochs={epochs}", f"--data.microbatch_size={microbatch}")
    cli = run(llama, tmp_path / "run", "--data.train_samples=36", *options, *BARE)
    steps = epochs * (36 // 8)
    assert cli.trainer.global_step == 4 * steps
    assert [unit["steps"] for unit in summary_of(tmp_path / "run")["units"]] == [steps] * 4
    assert [(fit[0], fit[-1]) for fit in watched.fits] == [(unit * steps, (unit + 1) * steps) for unit in range(4)]
    for fit in watched.fits:
        assert len(fit) == 2 + steps * 8 // microbatch
        assert all(later - earlier in (0, 1) for earlier, later in pairwise(fit))


def test_metrics_have_one_step_axis(llama, tmp_path):
    run(llama, tmp_path / "run", *BARE)
    rows = metrics(tmp_path / "run")
    losses = [row["step"] for row in rows if "train/error" in row]
    assert losses == list(range(4 * STEPS))
    units = [row for row in rows if "unit/block" in row]
    assert [(row["step"], row["unit/block"]) for row in units] == [((unit + 1) * STEPS, unit // 2) for unit in range(4)]
    summary = summary_of(tmp_path / "run")
    assert [row["unit/refined_error"] for row in units] == [unit["refined_error"] for unit in summary["units"]]
    (last,) = [row for row in rows if "perplexity/held_out/quantized" in row]
    assert last["step"] == 4 * STEPS
    assert last["perplexity/held_out/quantized"] == pytest.approx(summary["perplexity"]["quantized"])


@pytest.mark.slow
def test_validation_during_the_fit_is_on_hard_codes_and_changes_nothing(llama, tmp_path):
    options = ("--model.refinement.epochs=2", "--data.train_samples=64")
    run(llama, tmp_path / "with", *options, "--trainer.limit_val_batches=1.0", *ONE_BLOCK)
    run(llama, tmp_path / "without", *options, *ONE_BLOCK)
    assert contents(tmp_path / "with" / "export") == contents(tmp_path / "without" / "export")
    validations = [row["validation/error"] for row in metrics(tmp_path / "with") if "validation/error" in row]
    assert len(validations) == 2 * 2, "one an epoch and unit"
    for unit, at_the_end in zip(summary_of(tmp_path / "with")["units"], validations[1::2], strict=True):
        reached = unit["refined_error"] if unit["kept"] == "refined" else unit["rejected_error"]
        assert at_the_end == pytest.approx(reached, rel=1e-5)
