from __future__ import annotations

import io
import logging
import sys

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from rich.console import Console

import callbacks.progress
from callbacks import RunProgress
from callbacks.progress import RemainingTime
from gsq_module.memory.stages import StageClock

CPU = torch.device("cpu")


class FakeTime:
    def __init__(self):
        self.t = 1000.0

    def __call__(self):
        return self.t


@pytest.fixture
def now(monkeypatch):
    fake = FakeTime()
    monkeypatch.setattr(callbacks.progress, "perf_counter", fake)
    return fake


@pytest.fixture
def log_file(monkeypatch):
    """Standard output as a file, narrow on purpose: lines of a log must not be wrapped."""
    console = Console(file=io.StringIO(), width=20)
    monkeypatch.setattr(callbacks.progress, "get_console", lambda: console)
    return console.file


@pytest.fixture
def terminal(monkeypatch):
    console = Console(file=io.StringIO(), force_terminal=True, force_interactive=True, width=160)
    monkeypatch.setattr(callbacks.progress, "get_console", lambda: console)
    return console


def shown(progress):
    """What the bars say at this moment."""
    console = Console(file=io.StringIO(), width=160)
    console.print(progress._render())
    return console.file.getvalue()


class Unit(BoringModel):
    """A unit of the pipeline, with a known loss."""

    def __init__(self, trainer, total_steps, loss=0.25):
        super().__init__()
        self.total_steps, self.step_offset, self.value = total_steps, trainer.global_step, loss

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)["loss"]
        return loss * 0 + self.value


def test_remaining_time_counts_this_process_only():
    now = FakeTime()
    time = RemainingTime(num_units=10, finished_units=4, now=now)
    now.t += 7
    assert time.remaining is None
    now.t += 13
    time.unit_done()
    assert time.remaining == 20 * 5
    now.t += 40
    time.unit_done()
    assert time.remaining == 30 * 4
    assert time.elapsed == 60
    assert time.finished_units == 6


def test_remaining_time_counts_down_within_a_unit_and_not_below_the_units_after_it():
    now = FakeTime()
    time = RemainingTime(num_units=3, now=now)
    now.t += 10
    time.unit_done()
    assert time.remaining == 20
    now.t += 4
    assert time.remaining == 16
    now.t += 100
    assert time.remaining == 10
    time.unit_done()
    now.t += 1000
    time.unit_done()
    assert time.remaining == 0
    with pytest.raises(AssertionError, match="more than 3"):
        time.unit_done()


def test_lines_where_there_is_no_terminal(now, log_file, make_trainer, fit):
    progress = RunProgress()
    trainer = make_trainer([progress])
    clock = StageClock(CPU, [progress], num_blocks=2)
    progress.begin_run(num_units=4, finished_units=1)
    with clock.stage("capture", block=0):
        now.t += 3
    for _ in range(2):
        with clock.stage("gptq", block=0, unit="mlp"):
            now.t += 30
    with clock.stage("refine", block=0, unit="mlp"):
        fit(trainer, 2)
        now.t += 20
    with clock.stage("propagate", block=0):
        now.t += 1
    progress.end_unit("refined 0.0123 -> 0.0045")
    now.t += 3600
    with clock.stage("export"):
        pass
    progress.end_run()
    assert log_file.getvalue().splitlines() == [
        "[1/4] block 0  capture  elapsed 0:00",
        "[1/4] block 0 mlp  gptq  elapsed 0:03",
        "[1/4] block 0 mlp  refine  elapsed 1:03",
        "[1/4] block 0  propagate  elapsed 1:23",
        "[2/4] block 0 mlp  refined 0.0123 -> 0.0045  elapsed 1:24  remaining 2:48",
        "[2/4] export  elapsed 1:01:24",
    ]


def test_nothing_is_shown_outside_a_run(log_file, make_trainer, fit):
    progress = RunProgress()
    with StageClock(CPU, [progress]).stage("capture"):
        pass
    fit(make_trainer([progress]), 2)
    progress.begin_run(1)
    progress.end_run()
    progress.end_run()
    assert log_file.getvalue() == ""


def test_other_ranks_are_silent_before_their_first_fit(monkeypatch, log_file, terminal):
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    progress = RunProgress()
    progress.begin_run(1)
    with StageClock(CPU, [progress]).stage("capture", block=0):
        pass
    progress.end_unit()
    progress.end_run()
    assert terminal.file.getvalue() == ""


def test_loss_is_not_read_where_it_is_not_shown(log_file):
    class Unreadable:
        def __float__(self):
            raise AssertionError("read")

    class Trainer:
        global_step, accumulate_grad_batches = 5, 1

    progress = RunProgress()
    progress.begin_run(1)
    progress.on_train_batch_end(Trainer, None, {"loss": Unreadable()}, None, 0)
    progress.end_run()


def test_loss_is_read_twice_a_second_at_most(now, terminal):
    reads = []

    class Loss(float):
        def __float__(self):
            reads.append(now.t)
            return 0.5

    class Trainer:
        global_step, accumulate_grad_batches = 5, 4

    progress = RunProgress()
    progress.begin_run(1)
    for _ in range(20):
        progress.on_train_batch_end(Trainer, None, {"loss": Loss()}, None, 0)
        now.t += 0.125
    progress.end_run()
    assert reads == [1000.0, 1000.5, 1001.0, 1001.5, 1002.0]
    assert progress._loss == 2.0


def test_bars_on_a_terminal(now, terminal, make_trainer, fit):
    progress, seen = RunProgress(), []

    class Watch(Unit):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            seen.append(shown(progress))
            now.t += 1

    trainer = make_trainer([progress], accumulate_grad_batches=2, limit_train_batches=6)
    clock = StageClock(CPU, [progress], num_blocks=2)
    progress.begin_run(num_units=2)
    with clock.stage("capture", block=0):
        first = shown(progress)
    assert "0/2" in first
    assert "block 0 (1 of 2)  capture\n" in first
    assert "elapsed 0:00  remaining -" in first
    assert "steps" not in first
    with clock.stage("refine", block=0, unit="mlp"):
        fit(trainer, 5, Watch(trainer, total_steps=5))
    # 5 steps of 2 microbatches, 3 steps an epoch.
    assert len(seen) == 10
    assert "block 0 (1 of 2) mlp  refine" in seen[-1]
    assert "0/5" in seen[0]
    assert "1/5" in seen[1]
    assert "5/5" in seen[-1]
    assert "epoch 1  loss 0.25" in seen[5]
    assert "epoch 2  loss 0.25" in seen[6]
    assert "steps" not in shown(progress)
    progress.end_unit("refined 0.5 -> 0.25")
    assert "1/2" in shown(progress)
    assert "remaining 0:10" in shown(progress)

    seen.clear()
    with clock.stage("refine", block=1, unit="mlp"):
        fit(trainer, 3, Watch(trainer, total_steps=3, loss=0.125))
    assert "0/3" in seen[0]
    assert "epoch 1  loss 0.125" in seen[0]
    assert "3/3" in seen[-1]
    progress.end_unit()
    progress.end_run()
    output = terminal.file.getvalue()
    assert "[1/2] block 0 mlp  refined 0.5 -> 0.25  elapsed 0:10  remaining 0:10\n" in output
    assert output.count("\x1b[?25l") == output.count("\x1b[?25h") == 1


def test_module_without_the_step_attributes(terminal, make_trainer, fit):
    progress, seen = RunProgress(), []

    class Watch(BoringModel):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            seen.append(shown(progress))

    trainer = make_trainer([progress])
    progress.begin_run(1)
    fit(trainer, 2, Watch())
    fit(trainer, 2, Watch())
    progress.end_run()
    assert ["1/?" in line for line in seen] == [True, False, True, False]


@pytest.mark.parametrize("where", ["stage", "fit"])
def test_failure_gives_the_terminal_back(where, terminal, make_trainer, fit):
    class Broken(BoringModel):
        def training_step(self, batch, batch_idx):
            raise ValueError("no")

    def fail():
        if where == "fit":
            fit(make_trainer([progress]), 2, Broken())
        with StageClock(CPU, [progress]).stage("gptq", block=0):
            raise ValueError("no")

    progress = RunProgress()
    progress.begin_run(1)
    with pytest.raises(ValueError, match="no"):
        fail()
    assert terminal.file.getvalue().count("\x1b[?25h") == 1
    before = terminal.file.getvalue()
    progress.end_run()
    assert terminal.file.getvalue() == before


def test_log_lines_go_above_the_bars_and_the_handlers_get_their_stream_back(monkeypatch, terminal):
    class Screen(io.StringIO):
        def isatty(self):
            return True

    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    handler, other = logging.StreamHandler(screen), logging.StreamHandler(io.StringIO())
    logger = logging.getLogger("test_run_progress")
    logger.addHandler(handler)
    logger.addHandler(other)
    progress = RunProgress()
    progress.begin_run(1)
    logger.warning("during the run")
    progress.end_run()
    logger.warning("after the run")
    logger.handlers.clear()
    assert "during the run" in terminal.file.getvalue()
    assert screen.getvalue() == "after the run\n"
    assert other.stream.getvalue() == "during the run\nafter the run\n"


def test_errors_that_go_to_a_file_stay_there(monkeypatch, terminal):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    progress = RunProgress()
    progress.begin_run(1)
    print("Traceback", file=sys.stderr)
    progress.end_run()
    assert sys.stderr.getvalue() == "Traceback\n"
    assert "Traceback" not in terminal.file.getvalue()


def test_bars_fit_into_80_columns(terminal):
    progress = RunProgress()
    progress.begin_run(num_units=128, finished_units=127)
    with StageClock(CPU, [progress], num_blocks=64).stage("propagate", block=63, unit="attention"):
        console = Console(file=io.StringIO(), width=80)
        progress._fitting, progress._loss, progress._step, progress._total_steps = True, 0.000123456, 9999, 10000
        console.print(progress._render())
    progress.end_run()
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[0].strip() == "block 63 (64 of 64) attention  propagate"
    assert lines[1].rstrip().endswith("remaining -")
    assert lines[2].rstrip().endswith("loss 0.0001235")


def test_it_is_the_only_bar_of_its_trainer(make_trainer):
    progress = RunProgress()
    trainer = make_trainer([progress])
    assert trainer.progress_bar_callback is progress
    progress.disable()
    assert not progress.is_enabled
    progress.enable()
    assert progress.is_enabled
