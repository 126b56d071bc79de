"""A report of what a run failed of, where that has to do with memory or looks like it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from gsq_module.memory.allocator import setting_in_force
from gsq_module.memory.failure import Place, ask, read_device_state
from gsq_module.memory.oom import Evidence, Kind, find_cause, remember, remembered
from gsq_module.memory.remedies import MemoryPlan
from gsq_module.memory.report import MemoryReport, build_report
from gsq_module.memory.stages import Stage, StageListener
from gsq_module.memory.statistics import DeviceMemory
from gsq_module.problems import UserError

logger = logging.getLogger(__name__)


class OOMReport(Callback, StageListener):
    r"""Says what a run failed of: which memory ran out, where, how much was asked for and left, and what may help.

    Errors are heard of in three ways, and each is reported once, by the first that hears of it: inside a fit by
    Lightning, inside a stage of a ``StageClock`` that has this callback among its listeners, and anywhere in a
    ``with report.watching():``. The error itself is raised on as it is, for whoever catches it by its type;
    ``gsq_module.memory.oom.exit_code_of`` gives the exit status of its class.

    Errors that have nothing to do with memory, the device or numbers are left alone. The report goes to stderr, to
    ``rank<N>.json`` in a folder, and to a Weights & Biases run that is among the Trainer's loggers, as an alert and as

    **Summary Fields**

    - ``oom/class`` -- the error's class, such as ``device_memory``
    - ``oom/exit_code`` -- the exit status that goes with it
    - ``oom/stage``, ``oom/block``, ``oom/unit``, ``oom/step`` -- where it was met
    - ``oom/asked_bytes``, ``oom/allocated_bytes``, ``oom/reserved_bytes``, ``oom/free_bytes``, ``oom/predicted_bytes``

    Args:
        directory: Folder of the reports (default: ``oom_reports`` in the run directory; without a run, in the Trainer's
            ``default_root_dir``).

    Attributes:
        plan: The memory plan, once there is one.
        retry_follows: Set while whoever runs a fit will try it again with less after a certain out-of-memory error of
            the device: the fit then leaves that error unreported. If it leaves the stage after all, the stage's end
            reports it.

    Example::

        from callbacks import OOMReport
        from lightning.pytorch import Trainer

        report = OOMReport()
        trainer = Trainer(callbacks=[report])
        with report.watching():
            ...
            trainer.fit(model)
    """

    def __init__(self, directory: str | None = None) -> None:
        self.directory = None if directory is None else Path(directory)
        self.plan: MemoryPlan | None = None
        self.retry_follows = False
        self._trainer: Trainer | None = None
        self._stage: Stage | None = None
        self._last_stage: Stage | None = None
        self._batch: tuple[str, ...] = ()

    def attach(self, trainer: Trainer, directory: Path) -> None:
        """Make a run known before its first fit.

        Args:
            trainer: Its rank, device and loggers are the report's.
            directory: Folder of the reports where the recipe names none.
        """
        self._trainer = trainer
        self.directory = self.directory or directory

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Report an error of the `with` block that nothing else has reported, and let it pass."""
        try:
            yield
        except BaseException as error:
            self._report(error)
            raise

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._trainer = trainer
        self._batch = ()

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._batch = _shapes(batch)

    @override
    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._batch = _shapes(batch)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._trainer = trainer
        self._report(exception, in_fit=True)

    @override
    def on_stage_start(self, stage: Stage) -> None:
        self._stage = stage

    @override
    def on_stage_end(self, stage: Stage, seconds: float, memory: DeviceMemory | None) -> None:
        error = sys.exc_info()[1]
        if stage.failed and error is not None:
            self._report(error)
        self._stage, self._last_stage = None, stage

    def _report(self, error: BaseException, in_fit: bool = False) -> None:
        try:
            place = self._place(in_fit)
            state = read_device_state(place.device)
            setting = ask(setting_in_force, None)
            verdict, cause = find_cause(error, Evidence(state.free, state.total, setting))
            # The text of a UserError says all there is to say.
            if verdict.kind is Kind.OTHER or remembered(cause) is not None or isinstance(cause, UserError):
                return
            if in_fit and self.retry_follows and verdict.kind is Kind.DEVICE_MEMORY:
                return
            remember(cause, verdict)
            report = build_report(error, verdict, place, state, setting, self.plan)
            self._publish(report, error)
        except Exception as failure:
            # Whatever goes wrong here must not take the place of the error that ends the run.
            _say(f"the memory report failed ({type(failure).__name__}: {failure}); the error itself follows")

    def _publish(self, report: MemoryReport, error: BaseException) -> None:
        _say(report.text())
        directory = self.directory
        if directory is None and self._trainer is not None:
            directory = Path(self._trainer.default_root_dir) / "oom_reports"
        place = f"exit status {report.verdict.kind.exit_code}"
        if directory is not None:
            try:
                place = f"{report.write(directory)}; {place}"
            except OSError as failure:
                _say(f"the memory report could not be written: {failure}")
        _say(f"Memory report: {place}")
        if hasattr(error, "add_note"):  # Python 3.11; the traceback, which comes after the report, ends with it
            error.add_note(f"Memory report above ({report.verdict.kind.title}): {place}")
        if report.place.rank == 0:
            self._tell_wandb(report)

    def _place(self, in_fit: bool) -> Place:
        trainer, stage = self._trainer, self._stage
        rank, world_size = _rank_and_world_size(trainer)
        device = ask(lambda: trainer.strategy.root_device, torch.device("cpu"))  # type: ignore[union-attr]
        name: str | None
        if stage is not None:
            device, name = stage.device, stage.name
        else:
            name = ask(lambda: str(trainer.state.fn.value), None) if in_fit else None  # type: ignore[union-attr]
        where = stage or (None if in_fit else self._last_stage)
        return Place(
            rank=rank,
            world_size=world_size,
            device=device,
            stage=name,
            block=where.block if where else None,
            unit=where.unit if where else None,
            step=ask(lambda: trainer.global_step, None) if in_fit else None,  # type: ignore[union-attr]
            batch=self._batch if in_fit else (),
            after=where.name if where and not stage else None,
        )

    def _tell_wandb(self, report: MemoryReport) -> None:
        place, state, verdict = report.place, report.state, report.verdict
        fields = {
            "class": verdict.kind.name.lower(),
            "exit_code": verdict.kind.exit_code,
            "stage": place.stage,
            "block": place.block,
            "unit": place.unit,
            "step": place.step,
            "asked_bytes": verdict.asked_bytes,
            "allocated_bytes": state.allocated,
            "reserved_bytes": state.reserved,
            "free_bytes": state.free,
            "predicted_bytes": report.predicted,
        }
        for attached in self._trainer.loggers if self._trainer is not None else ():
            if not isinstance(attached, WandbLogger):
                continue
            try:
                attached.experiment.summary.update({f"oom/{name}": value for name, value in fields.items()})
                attached.experiment.alert(
                    title=f"Run ended: {verdict.kind.title}", text=f"```\n{report.text()}\n```", level="ERROR"
                )
            except Exception:
                logger.debug("W&B was not told of the memory report", exc_info=True)


def _shapes(batch: Any) -> tuple[str, ...]:
    tensors = (leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor))
    return tuple(f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}" for tensor in tensors)


def _rank_and_world_size(trainer: Trainer | None) -> tuple[int, int]:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    if trainer is not None:
        return trainer.global_rank, trainer.world_size
    return getattr(rank_zero_only, "rank", 0), 1


def _say(text: str) -> None:
    """To stderr, at once: the process may end within moments."""
    ask(lambda: print(text, file=sys.stderr, flush=True), None)
