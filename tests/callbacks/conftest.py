"""A CUDA device made of plain numbers, and a way to run a callback on it inside a real CPU fit."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.demos.boring_classes import BoringModel

GIB = 2**30


class FakeCuda:
    """Sizes in bytes; `emptied` counts the calls of empty_cache while the fake device was the current one.

    Lightning calls it as well, at the end of each fit, but on whatever device is current.
    """

    def __init__(self):
        self.device = torch.device("cuda", 3)
        self.current = torch.device("cuda", 0)
        self.allocated, self.reserved, self.peak = 1 * GIB, 4 * GIB, 6 * GIB
        self.others, self.total = 2 * GIB, 16 * GIB
        self.retries = 0
        self.emptied = 0

    @contextmanager
    def use(self, device):
        self.current, before = device, self.current
        yield
        self.current = before

    def empty_cache(self):
        if self.current == self.device:
            self.emptied += 1
            self.reserved = self.allocated

    def mem_get_info(self, device):
        assert device == self.device
        return self.total - self.reserved - self.others, self.total

    def memory_stats(self, device):
        assert device == self.device
        return {
            "allocated_bytes.all.current": self.allocated,
            "reserved_bytes.all.current": self.reserved,
            "allocated_bytes.all.peak": self.peak,
            "num_alloc_retries": self.retries,
        }


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda()
    monkeypatch.setattr(torch.cuda, "device", fake.use)
    monkeypatch.setattr(torch.cuda, "empty_cache", fake.empty_cache)
    monkeypatch.setattr(torch.cuda, "mem_get_info", fake.mem_get_info)
    monkeypatch.setattr(torch.cuda, "memory_stats", fake.memory_stats)
    monkeypatch.setattr(
        torch.cuda, "memory_reserved", lambda device: fake.memory_stats(device)["reserved_bytes.all.current"]
    )
    return fake


class OnCuda(Callback):
    """Passes the hooks of a fit on CPU on to a callback that is shown a Trainer on the fake device."""

    def __init__(self, callback, cuda, after_batch=lambda trainer: None):
        self.callback, self.cuda, self.after_batch = callback, cuda, after_batch

    def _shown(self, trainer):
        return SimpleNamespace(
            global_step=trainer.global_step,
            loggers=trainer.loggers,
            is_global_zero=True,
            strategy=SimpleNamespace(root_device=self.cuda.device),
        )

    def setup(self, trainer, pl_module, stage):
        self.callback.setup(self._shown(trainer), pl_module, stage)

    def on_train_start(self, trainer, pl_module):
        self.callback.on_train_start(self._shown(trainer), pl_module)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.callback.on_train_batch_end(self._shown(trainer), pl_module, outputs, batch, batch_idx)
        self.after_batch(trainer)


@pytest.fixture
def on_cuda(cuda):
    return lambda callback, **kwargs: OnCuda(callback, cuda, **kwargs)


@pytest.fixture
def make_trainer(tmp_path):
    """A CPU Trainer without limits of its own, as the block loop uses one."""

    def make(callbacks, **kwargs):
        options = {"logger": False, "enable_progress_bar": True, "log_every_n_steps": 1} | kwargs
        return Trainer(
            accelerator="cpu",
            max_epochs=-1,
            max_steps=0,
            limit_val_batches=0,
            enable_checkpointing=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
            callbacks=callbacks,
            **options,
        )

    return make


@pytest.fixture
def fit():
    """Fits `steps` more optimizer steps of a new module on a Trainer that may have been fitted before."""

    def fit(trainer, steps, model=None):
        trainer.fit_loop.epoch_loop.max_steps = trainer.global_step + steps
        trainer.fit(model or BoringModel())

    return fit
