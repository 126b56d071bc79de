from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import DummyLogger

from callbacks import EmptyCache
from gsq_module.memory.stages import Stage

GIB = 2**30


class SpyLogger(DummyLogger):
    def __init__(self):
        super().__init__()
        self.lines = []

    def log_metrics(self, metrics, step=None):
        self.lines += [(step, metrics)] if any(name.startswith("empty_cache/") for name in metrics) else []


@pytest.mark.parametrize("arguments", [{"every_n_steps": -1}, {"min_free_gib": -0.5}])
def test_negative_values_are_refused(arguments):
    (key,) = arguments
    with pytest.raises(ValueError, match=key):
        EmptyCache(**arguments)


def test_every_n_optimizer_steps_under_accumulation_and_over_two_fits(cuda, on_cuda, make_trainer, fit):
    callback = EmptyCache(every_n_steps=2)
    acted = []

    def after_batch(trainer):
        acted.append((trainer.global_step, callback.calls))

    trainer = make_trainer([on_cuda(callback, after_batch=after_batch)], accumulate_grad_batches=3)
    fit(trainer, 4)
    fit(trainer, 3)
    assert trainer.global_step == 7
    assert len(acted) == 7 * 3
    # Steps 2, 4 and 6; not once more at the microbatches that follow them, not at the start of the second fit.
    first_batch_of = {calls: step for step, calls in reversed(acted) if calls}
    assert first_batch_of == {1: 2, 2: 4, 3: 6}
    assert callback.calls == 3
    assert cuda.emptied == 3
    assert cuda.current == torch.device("cuda", 0)


def test_a_resumed_run_starts_at_its_own_step(cuda):
    callback = EmptyCache(every_n_steps=2)
    trainer = SimpleNamespace(global_step=4, strategy=SimpleNamespace(root_device=cuda.device), loggers=[])
    callback.on_train_start(trainer, None)
    callback.on_train_batch_end(trainer, None, None, None, 0)  # a microbatch before the first step of this process
    assert callback.calls == 0
    trainer.global_step = 6
    callback.on_train_batch_end(trainer, None, None, None, 1)
    assert callback.calls == 1


def test_acts_below_the_threshold_only(cuda, on_cuda, make_trainer, fit):
    callback = EmptyCache(min_free_gib=8.0)
    # 16 GiB - 2 of others - reserved: free is 8 GiB (not below) until step 3 reserves one more GiB.
    cuda.reserved = 6 * GIB

    def after_batch(trainer):
        if trainer.global_step == 2:
            cuda.reserved = 7 * GIB

    trainer = make_trainer([on_cuda(callback, after_batch=after_batch)])
    fit(trainer, 2)
    assert callback.calls == 0
    fit(trainer, 3)
    assert callback.calls == 1
    assert callback.freed_bytes == 6 * GIB


def test_both_off_leaves_the_cache_alone_within_a_fit(cuda, on_cuda, make_trainer, fit):
    callback = EmptyCache()
    fit(make_trainer([on_cuda(callback)]), 3)
    assert cuda.emptied == 0


def test_what_it_gave_back_is_logged_each_time_it_acted(cuda, on_cuda, make_trainer, fit):
    def after_batch(trainer):
        cuda.reserved = 4 * GIB

    first, second, callback = SpyLogger(), SpyLogger(), EmptyCache(every_n_steps=3)
    callback.on_stage_end(Stage("gptq", 0, "mlp", device=cuda.device), 1.0, None)  # before any logger is known
    cuda.reserved = 4 * GIB
    # Not only where Lightning's own interval of logging falls on the same step.
    trainer = make_trainer([on_cuda(callback, after_batch=after_batch)], logger=[first, second], log_every_n_steps=50)
    fit(trainer, 7)
    callback.on_stage_end(Stage("refine", 0, "mlp", device=cuda.device), 1.0, None)
    assert first.lines[:2] == [
        (3, {"empty_cache/calls": 2, "empty_cache/freed_gib": 6}),
        (6, {"empty_cache/calls": 3, "empty_cache/freed_gib": 9}),
    ]
    assert [line for _, line in first.lines[2:]] == [{"empty_cache/calls": 4, "empty_cache/freed_gib": 12}]
    assert second.lines == first.lines


def test_last_stage_reaches_the_file_of_the_csv_logger(cuda, on_cuda, make_trainer, fit, tmp_path):
    callback = EmptyCache()
    fit(make_trainer([on_cuda(callback)], logger=CSVLogger(tmp_path)), 1)
    callback.on_stage_end(Stage("evaluate", device=cuda.device), 1.0, None)
    header, row = (tmp_path / "lightning_logs/version_0/metrics.csv").read_text().splitlines()
    values = dict(zip(header.split(","), row.split(","), strict=True))
    assert (values["empty_cache/calls"], values["empty_cache/freed_gib"]) == ("1.0", "3.0")


def test_every_logged_name_is_documented(on_cuda, make_trainer, fit):
    spy = SpyLogger()
    fit(make_trainer([on_cuda(EmptyCache(every_n_steps=1))], logger=spy), 1)
    documented = re.findall(r"^    - ``(\S+)`` -- \S+", EmptyCache.__doc__, re.MULTILINE)
    assert [list(line) for _, line in spy.lines] == [documented]


def test_end_of_a_stage_always_gives_back_on_the_stages_device(cuda):
    callback = EmptyCache()
    callback.on_stage_end(Stage("gptq", 0, "mlp", device=cuda.device), 1.0, None)
    assert cuda.emptied == 1
    assert (callback.calls, callback.freed_bytes) == (1, 3 * GIB)


def test_failed_stage_is_left_as_the_failure_left_it(cuda):
    callback = EmptyCache()
    callback.on_stage_end(Stage("gptq", 0, "mlp", device=cuda.device, failed=True), 1.0, None)
    assert cuda.emptied == 0


def test_cpu_is_left_alone(cuda, make_trainer, fit):
    callback = EmptyCache(every_n_steps=1, min_free_gib=1000.0)
    spy = SpyLogger()
    fit(make_trainer([callback], logger=spy), 3)
    callback.on_stage_end(Stage("refine", 0, "mlp"), 1.0, None)
    assert callback.calls == 0
    assert cuda.emptied == 0
    assert spy.lines == []


@pytest.mark.gpu
def test_gives_back_on_a_device():
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    callback = EmptyCache()
    del_me = torch.empty(256 * 2**20, dtype=torch.uint8, device=device)
    del del_me
    callback.on_stage_end(Stage("gptq", device=device), 1.0, None)
    assert callback.freed_bytes >= 256 * 2**20
    assert torch.cuda.current_device() == 0
