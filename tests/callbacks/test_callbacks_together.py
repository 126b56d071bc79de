"""Case 16: every callback on, accelerator cpu."""

from __future__ import annotations

import io

import pytest
import torch
from jsonargparse import ArgumentError, ArgumentParser
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger
from rich.console import Console

import callbacks.progress
from callbacks import AllocatorStats, EmptyCache, RunProgress
from gsq_module.memory.stages import StageClock, StageListener


@pytest.mark.parametrize("terminal", [False, True])
def test_a_run_of_two_units_on_cpu(terminal, monkeypatch, make_trainer, fit, tmp_path):
    console = Console(file=io.StringIO(), force_terminal=terminal, force_interactive=terminal, width=120)
    monkeypatch.setattr(callbacks.progress, "get_console", lambda: console)
    empty_cache, progress = EmptyCache(every_n_steps=1, min_free_gib=1000.0), RunProgress()
    used = [empty_cache, AllocatorStats(every_n_steps=1), progress]
    trainer = make_trainer(used, logger=CSVLogger(tmp_path), accumulate_grad_batches=2)
    clock = StageClock(
        torch.device("cpu"), [c for c in trainer.callbacks if isinstance(c, StageListener)], num_blocks=2
    )
    assert len(clock.listeners) == 3

    class Model(BoringModel):
        def training_step(self, batch, batch_idx):
            output = super().training_step(batch, batch_idx)
            self.log("loss", output["loss"])
            return output

    progress.begin_run(num_units=2)
    for block in range(2):
        with clock.stage("gptq", block=block, unit="mlp"):
            pass
        with clock.stage("refine", block=block, unit="mlp"):
            fit(trainer, 3, Model())
        progress.end_unit("kept")
    with clock.stage("evaluate"):
        pass
    progress.end_run()

    assert trainer.global_step == 6
    assert set(clock.seconds) == {"gptq", "refine", "evaluate"}
    assert clock.peak_memory == {}
    assert empty_cache.calls == 0
    assert "[2/2] block 1 mlp  kept" in console.file.getvalue()
    header = (tmp_path / "lightning_logs/version_0/metrics.csv").read_text().splitlines()[0]
    assert "loss" in header
    assert "memory/" not in header
    assert "empty_cache/" not in header


def test_they_are_built_from_yaml():
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--callbacks", type=list[Callback])
    config = """[
        {class_path: callbacks.EmptyCache, init_args: {every_n_steps: 5, min_free_gib: 0.5}},
        {class_path: callbacks.AllocatorStats, init_args: {every_n_steps: 7}},
        {class_path: callbacks.RunProgress}]"""
    built = parser.instantiate(parser.parse_args([f"--callbacks={config}"])).callbacks
    assert [type(callback) for callback in built] == [EmptyCache, AllocatorStats, RunProgress]
    assert (built[0].every_n_steps, built[0].min_free_gib, built[1].every_n_steps) == (5, 0.5, 7)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [("EmptyCache", "every_n_steps", -1), ("EmptyCache", "min_free_gib", -0.1), ("AllocatorStats", "every_n_steps", 0)],
)
def test_impossible_values_are_refused_at_parse(name, key, value):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--callback", type=Callback)
    config = f"{{class_path: callbacks.{name}, init_args: {{{key}: {value}}}}}"
    with pytest.raises(ArgumentError, match=key):
        parser.parse_args([f"--callback={config}"])
