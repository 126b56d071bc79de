from __future__ import annotations

import re
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


def memory(peak_gib=6.0, retries=0, device_used=6 * GIB):
    peak = int(peak_gib * GIB)
    return DeviceMemory(
        1 * GIB, 4 * GIB, peak, peak, device_used=device_used, device_total=16 * GIB, retries=retries, ooms=0
    )


def stage_line(name, peak_gib):
    """What `memory(peak_gib)` is logged as: 16 GiB less 2 of others less the peak were free."""
    values = {
        "allocated_gib": 1.0,
        "reserved_gib": 4.0,
        "reserved_unallocated_gib": 3.0,
        "peak_allocated_gib": peak_gib,
        "peak_reserved_gib": peak_gib,
        "device_used_gib": 6.0,
        "margin_gib": 14.0 - peak_gib,
        "retries": 0.0,
        "ooms": 0.0,
    }
    return {f"memory/stage/{name}/{key}": value for key, value in values.items()}


class Plan:
    """Predicts 5 GiB for GPTQ of block 0's MLP alone."""

    def predicted(self, stage, block, unit):
        return 5 * GIB if (stage, block, unit) == ("gptq", 0, "mlp") else None


@pytest.fixture
def cuda(cuda, monkeypatch):
    """The fake device, with the statistics that only this callback reads."""
    stats = cuda.memory_stats
    more = {"reserved_bytes.all.peak": 7 * GIB, "num_ooms": 1}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats(device) | more)
    return cuda


@pytest.mark.parametrize("n", [0, -3])
def test_every_n_steps_is_at_least_one(n):
    with pytest.raises(ValueError, match=f"every_n_steps is {n}"):
        AllocatorStats(every_n_steps=n)


def test_a_negative_margin_is_refused():
    with pytest.raises(ValueError, match=r"min_margin_gib is -0\.5"):
        AllocatorStats(min_margin_gib=-0.5)


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
                "memory/reserved_unallocated_gib": 3.0,
                "memory/peak_allocated_gib": 6.0,
                "memory/peak_reserved_gib": 7.0,
                "memory/device_used_gib": 6.0,
                "memory/margin_gib": 7.0,  # 16 in all, 2 of others, 7 reserved at the peak
                "memory/retries": 5.0,
                "memory/ooms": 1.0,
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
    assert spy.memory_lines() == [(0, stage_line("capture", 2.0) | stage_line("gptq", 5.0))]
    callback.on_stage_end(Stage("refine", 0, "mlp"), 1.0, memory(7.0))
    assert spy.memory_lines()[1][1] == stage_line("refine", 7.0)


def test_what_the_plan_predicts_stands_beside_the_peak(on_cuda, make_trainer, fit):
    spy, callback = SpyLogger(), AllocatorStats()
    callback.plan = Plan()
    predicted = {"memory/stage/gptq/predicted_gib": 5.0}
    # Of the two that wait, the one with the higher peak is logged, with its own prediction.
    callback.on_stage_end(Stage("gptq", 0, "mlp"), 1.0, memory(4.75))
    callback.on_stage_end(Stage("gptq", 0, "attention"), 1.0, memory(2.0))
    fit(make_trainer([on_cuda(callback)], logger=spy), 1)
    assert spy.memory_lines() == [(0, stage_line("gptq", 4.75) | predicted)]
    callback.on_stage_end(Stage("gptq", 0, "mlp"), 1.0, memory(5.25))
    assert spy.memory_lines()[1][1] == stage_line("gptq", 5.25) | predicted
    callback.on_stage_end(Stage("gptq", 1, "mlp"), 1.0, memory(5.25))
    assert spy.memory_lines()[2][1] == stage_line("gptq", 5.25)


def test_every_logged_name_is_documented(on_cuda, make_trainer, fit):
    spy, callback = SpyLogger(), AllocatorStats(every_n_steps=1)
    callback.plan = Plan()
    fit(make_trainer([on_cuda(callback)], logger=spy), 1)
    callback.on_stage_end(Stage("gptq", 0, "mlp"), 1.0, memory())
    documented = set(re.findall(r"^    - ``(\S+)`` -- \S+", AllocatorStats.__doc__, re.MULTILINE))
    (_, step), (_, stage) = spy.memory_lines()
    # Of a stage the names are the same, with the stage's own part after the first.
    by_stage = {name.replace("memory/stage/gptq/", "memory/") for name in stage} - {"memory/predicted_gib"}
    assert documented == step.keys() | {"memory/stage/<name>/predicted_gib"}
    assert by_stage == step.keys()
    assert "memory/stage/gptq/predicted_gib" in stage
    assert "with ``stage/<name>/`` after ``memory/``" in AllocatorStats.__doc__


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
    with pytest.warns(UserWarning, match=r"tried again 2 time.*6\.00 GiB of 16\.00 GiB.*caches 3\.00 GiB"):
        callback.on_stage_end(Stage("gptq", 0), 1.0, memory(retries=2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        callback.on_stage_end(Stage("gptq", 1), 1.0, memory(retries=9))


def test_a_small_margin_warns_once():
    callback = AllocatorStats()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        callback.on_stage_end(Stage("gptq", 0), 1.0, memory(13.5))  # 0.5 GiB, not less
    # Seen from the peak: at the end of the stage 10 GiB are free again.
    with pytest.warns(UserWarning, match=r"Only 256\.00 MiB .*min_margin_gib=0\.5; 6\.00 GiB of 16\.00 GiB"):
        callback.on_stage_end(Stage("gptq", 1), 1.0, memory(13.75))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        callback.on_stage_end(Stage("gptq", 2), 1.0, memory(13.75))
        callback.on_stage_end(Stage("gptq", 2), 1.0, memory(retries=0))
    with pytest.warns(UserWarning, match="tried again"):
        callback.on_stage_end(Stage("gptq", 3), 1.0, memory(retries=1))


def test_other_processes_shrink_the_margin_of_a_step(cuda, on_cuda, make_trainer, fit):
    cuda.others = 8.75 * GIB  # with 7 GiB reserved at the peak 256 MiB are left of 16
    with pytest.warns(UserWarning, match=r"Only 256\.00 MiB"):
        fit(make_trainer([on_cuda(AllocatorStats(every_n_steps=1))], logger=SpyLogger()), 1)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Only")
        stats = AllocatorStats(every_n_steps=1, min_margin_gib=0.25)
        fit(make_trainer([on_cuda(stats)], logger=SpyLogger()), 1)


@pytest.mark.parametrize("others", [4 * GIB, 16 * GIB])
def test_a_margin_of_zero_never_warns(others):
    callback = AllocatorStats(min_margin_gib=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        callback.on_stage_end(Stage("gptq", 0), 1.0, memory(4.0, device_used=others))


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
