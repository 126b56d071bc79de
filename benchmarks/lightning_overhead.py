"""Part `lightning`: what `Trainer.fit` adds to a step of a unit so small that it shows."""

from __future__ import annotations

import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from context import Bench, make_problem
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from measure import Figure, Measurements, Row, SkippedError, milliseconds, synchronize
from shapes import SHAPES, Shape
from steps import as_in_a_fit, take_step

from callbacks import AllocatorStats, EmptyCache, RunProgress
from gsq_module.data.module import CalibrationData
from gsq_module.data.sources import TextFiles
from gsq_module.module import GSQModule, UnitProblem
from gsq_module.refinement import UnitRefiner
from gsq_module.streaming.activations import ActivationStore, UnitSamples
from gsq_module.streaming.staging import Staging

BATCH_SIZE = 4
STEPS_PER_EPOCH = 64
LOOP, BARE, RECIPE = "a plain loop", "Trainer.fit, no logger, no callbacks", "Trainer.fit as a recipe has it"


@dataclass(frozen=True)
class Job:
    """A small unit's refinement: the MLP's shape, tokens of a sample, epochs."""

    shape: Shape
    seq_len: int
    epochs: int

    @property
    def steps(self) -> int:
        return self.epochs * STEPS_PER_EPOCH


JOBS = {
    "cuda": Job(SHAPES["smollm2-135m"], seq_len=128, epochs=4),
    # A CPU computes that one so slowly that the difference would drown.
    "cpu": Job(replace(SHAPES["tiny"], hidden=32, intermediate=32), seq_len=16, epochs=1),
}


class Stopwatch(Callback):
    """Seconds of all steps of a fit together."""

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        synchronize(trainer.strategy.root_device)
        self._began = time.perf_counter()

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        synchronize(trainer.strategy.root_device)
        self.seconds = time.perf_counter() - self._began


class WarnOfSynchronization(Callback):
    """Makes torch warn of every operation of a fit's steps that waits for the CUDA device."""

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        torch.cuda.set_sync_debug_mode("warn")

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")


@dataclass
class Times:
    """Seconds of a fit's steps, and of the rest of the unit's refinement around them."""

    steps: float
    rest: float


class Overhead:
    """Refines one small unit over and over, in a plain loop and with Lightning."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.job = JOBS[bench.device.type]
        self.module = GSQModule(path="unused", group_size=self.job.shape.group_size)
        size = (BATCH_SIZE * STEPS_PER_EPOCH, self.job.seq_len, self.job.shape.hidden)
        stores = [ActivationStore(size, bench.dtype, "device", bench.device, Path()) for _ in ("inputs", "targets")]
        for store in stores:
            store.write(slice(None), torch.randn(size, generator=bench.generator(), device=bench.device))
        staging = Staging(bench.device)
        self.train = UnitSamples(stores, range(size[0]), staging)
        self.validation = UnitSamples(stores, range(BATCH_SIZE), staging)

    @cached_property
    def times(self) -> dict[str, Times]:
        """The least of each kind, for noise only adds to it; the kinds take turns."""
        kinds: dict[str, Callable[[], Times]] = {
            LOOP: self._loop,
            BARE: lambda: self._fit(self._bare),
            RECIPE: lambda: self._fit(self._recipe),
        }
        rounds = [{kind: run() for kind, run in kinds.items()} for _ in range(self.bench.shape.rounds)]
        return {
            kind: Times(min(times[kind].steps for times in rounds), min(times[kind].rest for times in rounds))
            for kind in kinds
        }

    @cached_property
    def synchronizations(self) -> Counter[str]:
        """Where the steps of a fit as a recipe has it wait for the device, and how often."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                self._fit(self._recipe, WarnOfSynchronization())
            finally:
                torch.cuda.set_sync_debug_mode("default")
        waits = (warning for warning in caught if "synchronizing" in str(warning.message))
        return Counter(f"{Path(warning.filename).name}:{warning.lineno}" for warning in waits)

    def _data(self) -> CalibrationData:
        return CalibrationData(TextFiles([]), {}, batch_size=BATCH_SIZE)

    def _problem(self) -> UnitProblem:
        return make_problem(self.job.shape, self.bench.device, self.bench.dtype, self.job.steps)

    def _loop(self) -> Times:
        """The steps alone, over the same loader."""
        self.module.bind(self._problem(), step_offset=0)
        configured = self.module.configure_optimizers()
        data = self._data()
        data.bind(self.train, self.validation)
        loader = data.train_dataloader()
        synchronize(self.bench.device)
        began = time.perf_counter()
        with as_in_a_fit(self.module):
            for _ in range(self.job.epochs):
                for batch in loader:
                    take_step(self.module, configured["optimizer"], configured["lr_scheduler"]["scheduler"], [batch])
        synchronize(self.bench.device)
        steps = time.perf_counter() - began
        self.module.release()
        return Times(steps, rest=0.0)

    def _fit(self, make_trainer: Callable[[str, list[Callback]], Trainer], *callbacks: Callback) -> Times:
        watch = Stopwatch()
        with tempfile.TemporaryDirectory() as folder:
            trainer = make_trainer(folder, [watch, *callbacks])
            progress = trainer.progress_bar_callback
            if isinstance(progress, RunProgress):
                progress.begin_run(num_units=1)
            try:
                refine = UnitRefiner(trainer, self.module, self._data())
                problem = self._problem()
                synchronize(self.bench.device)
                began = time.perf_counter()
                refine(problem, self.train, self.validation)
                synchronize(self.bench.device)
                seconds = time.perf_counter() - began
            finally:
                if isinstance(progress, RunProgress):
                    progress.end_run()
        return Times(watch.seconds, seconds - watch.seconds)

    def _recipe(self, folder: str, callbacks: list[Callback]) -> Trainer:
        callbacks = [RunProgress(), EmptyCache(), AllocatorStats(), *callbacks]
        return self._trainer(logger=CSVLogger(folder, name="metrics"), callbacks=callbacks)

    def _bare(self, folder: str, callbacks: list[Callback]) -> Trainer:
        return self._trainer(logger=False, callbacks=callbacks, enable_progress_bar=False)

    def _trainer(self, **settings: Any) -> Trainer:
        """With the defaults of the command line (gsq_module/cli.py) and of the recipes."""
        return Trainer(
            accelerator="gpu" if self.bench.device.type == "cuda" else "cpu",
            devices=1,
            max_epochs=-1,
            enable_checkpointing=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            use_distributed_sampler=False,
            limit_val_batches=0,
            **settings,
        )


def lightning(bench: Bench) -> Measurements:
    """A step in a plain loop, in a bare Trainer, and in a recipe's; where the last waits for the device."""
    made: list[Overhead] = []

    def overhead() -> Overhead:
        bench.refuse_interpreter()
        if not made:
            made.append(Overhead(bench))
        return made[0]

    for kind in (LOOP, BARE, RECIPE):
        yield kind, partial(_kind_row, overhead, kind)
    yield "synchronizations", partial(_synchronizations_row, overhead)


def _kind_row(overhead: Callable[[], Overhead], kind: str, row: Row) -> None:
    times, job = overhead().times, overhead().job
    row.figures["time"] = milliseconds(times[kind].steps / job.steps)
    if kind == LOOP:
        row.notes.append(f"MLP of {job.shape.hidden} x {job.shape.intermediate}, {BATCH_SIZE} x {job.seq_len} tokens")
        return
    row.figures["overhead"] = Figure((times[kind].steps - times[LOOP].steps) / job.steps * 1e6, "us a step")
    row.figures["around_the_steps"] = Figure(times[kind].rest * 1e3, "ms a unit")


def _synchronizations_row(overhead: Callable[[], Overhead], row: Row) -> None:
    if overhead().bench.device.type != "cuda":
        raise SkippedError("a CPU has nothing to wait for")
    places, steps = overhead().synchronizations, overhead().job.steps
    row.figures["synchronizations"] = Figure(sum(places.values()) / steps, "a step")
    row.notes += [f"{place}: {count / steps:.2f} a step" for place, count in places.most_common()]
