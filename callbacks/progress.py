"""One progress display for a whole run: the fits of its units and the stages between them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any, TextIO

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from lightning.pytorch.utilities.types import STEP_OUTPUT
from rich import get_console
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar as Bar
from rich.table import Table
from rich.text import Text
from typing_extensions import override

from gsq_module.memory.stages import Stage, StageListener
from gsq_module.memory.statistics import DeviceMemory

REFRESH_SECONDS = 0.5


class RemainingTime:
    """Time left of a run: mean seconds of the units finished in this process times the units left.

    Between the ends of two units the time spent in the current one is taken off, up to that mean.

    Args:
        num_units: Units of the whole run.
        finished_units: Units that an earlier process finished; they count as done and tell nothing of the time.
        now: The clock, in seconds.
    """

    def __init__(self, num_units: int, finished_units: int = 0, now: Callable[[], float] = perf_counter) -> None:
        assert 0 <= finished_units <= num_units, (finished_units, num_units)
        self.num_units = num_units
        self.finished_units = finished_units
        self._finished_before = finished_units
        self._now = now
        self._start = self._unit_start = now()

    def unit_done(self) -> None:
        """One more unit is finished."""
        assert self.finished_units < self.num_units, f"more than {self.num_units} units finished"
        self.finished_units += 1
        self._unit_start = self._now()

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return self._now() - self._start

    @property
    def remaining(self) -> float | None:
        """Seconds left; `None` before this process has finished a unit."""
        timed = self.finished_units - self._finished_before
        if not timed:
            return None
        mean = (self._unit_start - self._start) / timed
        in_this_unit = min(self._now() - self._unit_start, mean)
        return max(0.0, mean * (self.num_units - self.finished_units) - in_this_unit)


class RunProgress(ProgressBar, StageListener):
    """Shows where a whole run is: block, unit, stage, step, epoch, loss, elapsed and remaining time.

    On a terminal it draws one bar over the units of the run and one over the optimizer steps of the fit under way.
    Where the output is no terminal (CI, a log file) it prints one line for each change of stage and each finished unit.
    Between ``begin_run`` and ``end_run`` it is active, on rank zero; at other times it shows nothing.

    The loss is that of the last microbatch, read at most twice a second, because reading it waits for the device. The
    steps of a fit come from two attributes of the LightningModule where it has them: ``total_steps`` (of this fit) and
    ``step_offset`` (``trainer.global_step`` when this fit began).

    Example::

        progress = RunProgress()
        trainer = Trainer(callbacks=[progress])
        progress.begin_run(num_units=60, finished_units=0)
        ...  # stages of a StageClock that has `progress` among its listeners, and fits
        progress.end_unit("refined 0.0123 -> 0.0045")
        progress.end_run()
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_enabled = True
        self._live: Live | None = None
        self._log_handlers: list[logging.StreamHandler] = []
        self._time: RemainingTime | None = None
        self._stage: Stage | None = None
        self._unit_stage: Stage | None = None
        self._fitting = False
        self._step_offset = 0
        self._step = 0
        self._total_steps = 0
        self._epoch = 0
        self._loss: float | None = None
        self._loss_read_at = float("-inf")

    @override
    def enable(self) -> None:
        self.is_enabled = True

    @override
    def disable(self) -> None:
        self.is_enabled = False
        self._close()

    def begin_run(self, num_units: int, finished_units: int = 0) -> None:
        """The run begins.

        Args:
            num_units: Units of the whole run.
            finished_units: Those that an earlier process finished.
        """
        assert self._time is None, "begin_run inside a run"
        # The stages before the first fit come before Lightning's setup, which disables the bars of the other ranks.
        if getattr(rank_zero_only, "rank", 0) != 0:
            self.disable()
        self._time = RemainingTime(num_units, finished_units, now=perf_counter)
        self._stage = self._unit_stage = None
        if self.is_enabled and get_console().is_interactive:
            self._open()

    def end_unit(self, summary: str = "") -> None:
        """The unit under way is finished.

        Args:
            summary: What came of it, for its line: ``refined 0.0123 -> 0.0045``.
        """
        assert self._time is not None, "end_unit outside a run"
        self._time.unit_done()
        place = _place(self._unit_stage) if self._unit_stage else ""
        self._print(place, summary, self._times())

    def end_run(self) -> None:
        """The run is over. Call it in a `finally`, for it gives the terminal back; twice does no harm."""
        self._close()
        self._time = None

    @override
    def on_stage_start(self, stage: Stage) -> None:
        changed, self._stage = stage != self._stage, stage
        if stage.unit is not None:
            self._unit_stage = stage
        if changed and self._time is not None and self._live is None:
            self._print(_place(stage), stage.name, f"elapsed {_clock_text(self._time.elapsed)}")

    @override
    def on_stage_end(self, stage: Stage, seconds: float, memory: DeviceMemory | None) -> None:
        self._fitting = False
        if stage.failed:
            self._close()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._step_offset = int(getattr(pl_module, "step_offset", trainer.global_step))
        self._total_steps = int(getattr(pl_module, "total_steps", 0))
        self._step = self._epoch = 0
        self._loss = None
        self._fitting = True

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # trainer.current_epoch counts on over the fits of one Trainer.
        self._epoch += 1

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        self._step = trainer.global_step - self._step_offset
        if self._live is None or perf_counter() - self._loss_read_at < REFRESH_SECONDS:
            return
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if loss is not None:
            # Lightning divides a microbatch's loss by the number of microbatches.
            self._loss = float(loss) * trainer.accumulate_grad_batches
            self._loss_read_at = perf_counter()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._fitting = False

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()

    def _open(self) -> None:
        stderr = sys.stderr
        self._live = Live(
            get_renderable=self._render,
            console=get_console(),
            refresh_per_second=1 / REFRESH_SECONDS,
            transient=True,
            # Errors that go to a file (2> log) stay there.
            redirect_stderr=stderr.isatty(),
        )
        self._live.start()
        # Lightning's and transformers' log handlers hold the terminal itself: what they write would tear the bars.
        self._log_handlers = _handlers_on(stderr) if sys.stderr is not stderr else []
        for handler in self._log_handlers:
            handler.setStream(sys.stderr)

    def _close(self) -> None:
        """Gives the terminal back, so that what follows (a traceback, say) is printed as usual."""
        if self._live is not None:
            self._live.stop()
            self._live = None
            for handler in self._log_handlers:
                handler.setStream(sys.stderr)

    def _print(self, *parts: str) -> None:
        if not self.is_enabled or self._time is None:
            return
        count = f"[{self._time.finished_units}/{self._time.num_units}]"
        text = "  ".join(part for part in parts if part)
        get_console().print(f"{count} {text}", markup=False, highlight=False, emoji=False, soft_wrap=True)

    def _times(self) -> str:
        assert self._time is not None
        remaining = self._time.remaining
        left = "-" if remaining is None else _clock_text(remaining)
        return f"elapsed {_clock_text(self._time.elapsed)}  remaining {left}"

    def _render(self) -> RenderableType:
        """The bars; called by rich's thread, so it reads numbers only and never a tensor."""
        assert self._time is not None
        done, units = self._time.finished_units, self._time.num_units
        bars = Table.grid(padding=(0, 1))
        bars.add_row("units", Bar(units, done, width=24), f"{done}/{units}", self._times())
        if self._fitting:
            bar = Bar(self._total_steps or None, self._step, width=24)
            loss = "" if self._loss is None else f"  loss {self._loss:.4g}"
            bars.add_row("steps", bar, f"{self._step}/{self._total_steps or '?'}", f"epoch {self._epoch}{loss}")
        if self._stage is None:
            return bars
        where = f"{_place(self._stage, of=True)}  {self._stage.name}".strip()
        return Group(Text(where, no_wrap=True, overflow="ellipsis"), bars)


def _handlers_on(stream: TextIO) -> list[logging.StreamHandler]:
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    handlers = {handler for logger in loggers for handler in getattr(logger, "handlers", ())}
    return [h for h in handlers if isinstance(h, logging.StreamHandler) and h.stream is stream]


def _place(stage: Stage, of: bool = False) -> str:
    """`block 2 mlp`, with `of` also which of how many the block is: `block 2 (3 of 30) mlp`."""
    words = []
    if stage.block is not None:
        words.append(f"block {stage.block}")
        if of and stage.num_blocks:
            words.append(f"({stage.block + 1} of {stage.num_blocks})")
    if stage.unit is not None:
        words.append(stage.unit)
    return " ".join(words)


def _clock_text(seconds: float) -> str:
    """`1:23`, and `1:02:03` from an hour on."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
