from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import DummyLogger

from callbacks import AllocatorStats
from gsq_module.memory.stages import Stage, StageClock
from gsq_module.memory.statistics import DeviceMemory

GIB = 2**30


class SpyLogger(DummyLogger):
    def __init__(self):
        super().__init__()
        self.lines = []

    def log_metrics(self, metrics, step=None):
        self.lines.append((step, dict(metrics)))

    def memory_lines(self):
        return [(step, line) for step, line in self.lines if any(key.startswith("memory/") for key in line)]


def memory(peak_gib=6.0, retries=0):
    peak = int(peak_gib * GIB)
    return DeviceMemory(
        1 * GIB, 4 * GIB, peak, peak, device_used=6 * GIB, device_total=16 * GIB, retries=retries, ooms=0
    )


@pytest.mark.parametrize("n", [0, -3])
def test_every_n_steps_is_at_least_one(n):
    with pytest.raises(ValueError, match=f"every_n_steps is {n}"):
        AllocatorStats(every_n_steps=n)


def test_names_and_values(cuda, on_cuda, make_trainer, fit):
    spy = SpyLogger()
    cuda.retries = 5
    with pytest.warns(UserWarning, match="tried again 5"):
        fit(make_trainer([on_cuda(AllocatorStats(every_n_steps=2))], logger=spy), 3)
    assert spy.memory_lines() == [
        (
            2,
            {
                "memory/allocated_gib": 1.0,
                "memory/reserved_gib": 4.0,
                "memory/peak_allocated_gib": 6.0,
                "memory/device_used_gib": 6.0,
                "memory/retries": 5.0,
            },
        )
    ]


def test_one_line_a_step_under_accumulation_and_over_two_fits(on_cuda, make_trainer, fit):
    first, second = SpyLogger(), SpyLogger()
    trainer = make_trainer(
        [on_cuda(AllocatorStats(every_n_steps=2))], logger=[first, second], accumulate_grad_batches=3
    )
    fit(trainer, 4)
    fit(trainer, 3)
    assert [step for step, _ in first.memory_lines()] == [2, 4, 6]
    assert first.memory_lines() == second.memory_lines()


def test_a_resumed_run_starts_at_its_own_step(cuda):
    callback, spy = AllocatorStats(every_n_steps=2), SpyLogger()
    strategy = SimpleNamespace(root_device=cuda.device)
    trainer = SimpleNamespace(global_step=4, is_global_zero=True, loggers=[spy], strategy=strategy)
    callback.on_train_start(trainer, None)
    callback.on_train_batch_end(trainer, None, None, None, 0)  # a microbatch before the first step of this process
    assert spy.lines == []
    trainer.global_step = 6
    callback.on_train_batch_end(trainer, None, None, None, 1)
    assert [step for step, _ in spy.lines] == [6]


def test_stages_before_the_first_fit_wait_for_a_logger_and_later_ones_do_not(on_cuda, make_trainer, fit):
    spy, callback = SpyLogger(), AllocatorStats()
    callback.on_stage_end(Stage("capture", 0), 1.0, memory(2.0))
    callback.on_stage_end(Stage("gptq", 0, "attention"), 1.0, memory(5.0))
    callback.on_stage_end(Stage("gptq", 0, "mlp"), 1.0, memory(3.0))
    trainer = make_trainer([on_cuda(callback)], logger=spy)
    fit(trainer, 2)
    fit(trainer, 2)
    waited = {"memory/stage/capture/peak_allocated_gib": 2.0, "memory/stage/gptq/peak_allocated_gib": 5.0}
    assert spy.memory_lines() == [(0, waited)]
    callback.on_stage_end(Stage("refine", 0, "mlp"), 1.0, memory(7.0))
    assert spy.memory_lines()[1][1] == {"memory/stage/refine/peak_allocated_gib": 7.0}


def test_last_stage_reaches_the_file_of_the_csv_logger(on_cuda, make_trainer, fit, tmp_path):
    callback = AllocatorStats()
    fit(make_trainer([on_cuda(callback)], logger=CSVLogger(tmp_path)), 1)
    callback.on_stage_end(Stage("evaluate"), 1.0, memory(7.5))
    text = (tmp_path / "lightning_logs/version_0/metrics.csv").read_text()
    assert "memory/stage/evaluate/peak_allocated_gib" in text
    assert "7.5" in text


def test_retries_warn_once_when_they_begin():
    callback = AllocatorStats()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        callback.on_stage_end(Stage("capture", 0), 1.0, memory(retries=0))
    with pytest.warns(UserWarning, match=r"tried again 2 time.*6\.00 GiB of 16\.00 GiB"):
        callback.on_stage_end(Stage("gptq", 0), 1.0, memory(retries=2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        callback.on_stage_end(Stage("gptq", 1), 1.0, memory(retries=9))


def test_other_ranks_do_not_query_their_device(cuda):
    callback, spy = AllocatorStats(every_n_steps=1), SpyLogger()
    trainer = SimpleNamespace(
        global_step=1,
        is_global_zero=False,
        loggers=[spy],
        strategy=SimpleNamespace(root_device=torch.device("cuda", 1)),  # the fake device refuses any but its own
    )
    callback.on_train_batch_end(trainer, None, None, None, 0)
    assert spy.lines == []


def test_cpu_logs_nothing(make_trainer, fit):
    spy, callback = SpyLogger(), AllocatorStats(every_n_steps=1)
    clock = StageClock(torch.device("cpu"), [callback])
    trainer = make_trainer([callback], logger=spy)
    with clock.stage("capture"):
        pass
    with clock.stage("refine"):
        fit(trainer, 2)
    assert spy.memory_lines() == []
