"""A recipe with all it needs to be carried out: checks before anything heavy is loaded, and the parts of a run."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from callbacks import AllocatorStats, OOMReport, RunProgress
from gsq_module import ranks
from gsq_module.continuations import choose_prompts, continue_greedily
from gsq_module.coverage import Coverage, check_geometry, serving_problems
from gsq_module.data.module import CalibrationData
from gsq_module.data.samples import Samples
from gsq_module.evaluation import HiddenStates, hidden_states, measure, whole_model_perplexity
from gsq_module.export.folder import check_destination
from gsq_module.export.reader import open_checkpoint
from gsq_module.export.writer import ExportReport, export_checkpoint
from gsq_module.final_pass import TunedScales, load_outcome, save_tuned, train_scales
from gsq_module.measures import Measured
from gsq_module.memory.plan import MemoryPlan
from gsq_module.memory.stages import StageClock, StageListener
from gsq_module.metrics_log import log_once
from gsq_module.module import GSQModule
from gsq_module.outer import OuterQuantizer
from gsq_module.pipeline import BlockLoop, Refine
from gsq_module.refinement import UnitRefiner
from gsq_module.run_directory import Progress, RunDirectory
from gsq_module.snapshots import Snapshots
from gsq_module.storage import StorageError
from gsq_module.streaming import source
from gsq_module.streaming.model import StreamedModel
from gsq_module.unit_shards import UnitResult, UnitShards
from gsq_module.verification import verify_export

logger = logging.getLogger(__name__)

STRATEGIES = (SingleDeviceStrategy, DDPStrategy)
"""Of Lightning's, those whose fits leave every rank with the same relaxed weights."""


def raise_collected(problems: Iterable[str]) -> None:
    """Raise one ValueError that lists all problems, if there are any."""
    problems = list(problems)
    if problems:
        raise ValueError("\n".join(problems))


@dataclass
class Run:
    """A recipe with everything it needs to be carried out.

    Attributes:
        trainer: The one Trainer.
        recipe: The `model` section.
        data: The `data` section.
        directory: The run directory.
        reload_max_gib: Exports whose dense weights are at most this large are also loaded whole with transformers.
        plan: The memory plan, once one is followed.
        refine: What refines each unit in the place of UnitRefiner, if anything: a benchmark's other algorithm.
    """

    trainer: Trainer
    recipe: GSQModule
    data: CalibrationData
    directory: RunDirectory
    reload_max_gib: float
    plan: MemoryPlan | None = field(default=None, init=False)
    refine: Refine | None = field(default=None, init=False)
    began: float = field(default_factory=time.perf_counter, init=False)
    seconds_before: float = field(default=0.0, init=False)
    sessions: int = field(default=1, init=False)

    def __post_init__(self) -> None:
        self.device: torch.device = self.trainer.strategy.root_device
        self.dtype = self.recipe.torch_dtype(self.device)
        listeners = [callback for callback in self.trainer.callbacks if isinstance(callback, StageListener)]  # type: ignore[attr-defined]
        self.clock = StageClock(self.device, listeners)
        self.progress = next(callback for callback in self.trainer.callbacks if isinstance(callback, RunProgress))  # type: ignore[attr-defined]
        self.report = next(callback for callback in self.trainer.callbacks if isinstance(callback, OOMReport))  # type: ignore[attr-defined]
        self.report.attach(self.trainer, self.directory.path / "oom_reports")

    def follow(self, plan: MemoryPlan) -> None:
        """Let the summary and every callback that compares or reports know the memory plan."""
        self.plan = plan
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, (AllocatorStats, OOMReport)):
                callback.plan = plan

    # --- checks ------------------------------------------------------------------------------------------------------

    def check_recipe(self, texts: bool = True) -> None:
        """Checks that need no weights, no network but for texts from the hub, and no tokenizer.

        Args:
            texts: Whether texts will be read; plans and rehearsals make up theirs.

        Raises:
            ValueError: Lists every problem.
        """
        problems: list[str] = []
        try:
            folder = source.locate(self.recipe.path, self.recipe.gguf_file)
            if folder is not None:
                self._check_places(folder)
        except (ValueError, FileNotFoundError) as error:
            problems.append(str(error))
        try:
            self.data.check(texts)
        except ValueError as error:
            problems.append(str(error))
        problems += self._share_batch()
        problems += self.data.check_ranks(self.trainer.world_size)
        strategy = self.trainer.strategy
        # Processes that are forked or spawned for one fit would end with it.
        if not isinstance(strategy, STRATEGIES) or isinstance(strategy.launcher, _MultiProcessingLauncher):
            problems.append(
                f"trainer.strategy: a run of blocks cannot be done by {type(strategy).__name__} as it is set up; "
                "leave it out, or name ddp or sharded"
            )
        raise_collected(problems)

    def _check_places(self, source_folder: Path) -> None:
        """Refuse an export over, and a run directory in, the folder of the model."""
        check_destination(source_folder, self.directory.export)
        source_folder, run_dir = source_folder.resolve(), self.directory.path.resolve()
        if self.recipe.gguf_file is None and source_folder in (run_dir, *run_dir.parents):
            raise ValueError(
                f"run_dir={str(run_dir)!r} lies in the folder of the model {source_folder}: choose another"
            )

    def _share_batch(self) -> list[str]:
        """Settle accumulate_grad_batches and microbatch_size: both only divide the batch of one optimizer step."""
        wished = self.trainer.accumulate_grad_batches
        world_size = self.trainer.world_size
        if wished > 1 and self.data.microbatch_size is None:
            if self.data.batch_size % (wished * world_size):
                return [
                    f"trainer.accumulate_grad_batches={wished} does not divide data.batch_size={self.data.batch_size} "
                    f"over {world_size} device(s)"
                ]
            self.data.microbatch_size = self.data.batch_size // (wished * world_size)
        try:
            needed = self.data.accumulate_grad_batches(world_size)
        except ValueError as error:
            return [str(error)]
        if wished not in (1, needed):
            return [
                f"trainer.accumulate_grad_batches={wished}, but data.batch_size={self.data.batch_size} in "
                f"microbatches of {self.data.microbatch_size} takes {needed}: leave one of them out"
            ]
        self.trainer.accumulate_grad_batches = needed
        return []

    def start_loggers(self) -> None:
        """Make every logger connect now: a missing key or network must not show after hours. No row is logged twice."""
        for logger in self.trainer.loggers:
            try:
                _ = logger.experiment  # type: ignore[attr-defined]
            except Exception as error:
                raise ValueError(
                    f"trainer.logger: {type(logger).__name__} cannot start ({type(error).__name__}: {error}). "
                    "For W&B: wandb login, or work offline with --trainer.logger.init_args.offline true"
                ) from error
        log_once(self.trainer.loggers)

    # --- what the sessions of a run come to together -----------------------------------------------------------------

    def take_up(self, began: float) -> None:
        """Go on with the time and the peaks of earlier sessions. Rank 0 keeps them.

        Args:
            began: `time.perf_counter()` at the start of the command.
        """
        self.began = began
        if not ranks.is_first():
            return
        before = self.directory.progress()
        self.seconds_before = before.seconds.pop("total", 0.0)
        self.sessions = before.sessions + 1
        self.clock.seconds.update(before.seconds)
        self.clock.peak_memory.update(before.peak_memory)
        self.keep_progress()

    @property
    def total_seconds(self) -> float:
        """Of all sessions. Of one that was killed, up to its last finished unit."""
        return self.seconds_before + time.perf_counter() - self.began

    def last_step(self, results: Sequence[UnitResult]) -> int:
        """Optimizer steps of the whole run, which is where its last metrics stand."""
        per_epoch = self.data.train_samples // self.data.batch_size
        return sum(result.steps for result in results) + self.recipe.final_pass.epochs * per_epoch

    def keep_progress(self, state: str = "running") -> None:
        """Write down what the sessions have come to so far."""
        if ranks.is_first():
            seconds = {"total": self.total_seconds, **self.clock.seconds}
            self.directory.write_progress(Progress(state, self.sessions, seconds, dict(self.clock.peak_memory)))

    # --- the parts of a run ------------------------------------------------------------------------------------------

    def open_model(self) -> StreamedModel:
        """The recipe's checkpoint, on the meta device, its geometry checked against the recipe."""
        with ranks.first_alone():
            folder = source.fetch(self.recipe.path, self.recipe.gguf_file, self.directory.source)
        self._check_places(folder)  # of a model from the hub, check_recipe could not
        model = StreamedModel.from_checkpoint(open_checkpoint(folder), self.device, self.dtype)
        raise_collected(check_geometry(model, self.recipe))
        if ranks.is_first():
            for problem in serving_problems(model, self.recipe):
                logger.warning("%s", problem)
        return model

    def tokenizer(self, folder: Path) -> PreTrainedTokenizerBase:
        """The tokenizer of a checkpoint folder."""
        try:
            return AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"the tokenizer of {folder} does not load ({error}). The model's tokenizer.json and "
                "tokenizer_config.json belong into that folder"
            ) from error

    def say(self, part: str) -> None:
        """Name the part of the command that begins, for those who watch."""
        if self.trainer.is_global_zero and self.progress.is_enabled:
            print(part, flush=True)

    def quantize(self, model: StreamedModel) -> list[UnitResult]:
        """The block loop of the recipe."""
        steps = self.recipe.refinement.epochs * (self.data.train_samples // self.data.batch_size)
        samples = self._samples(self.data.train if steps else self.data.train[:0])
        return self._loop(model, samples, self.recipe.target, steps, self.directory.units(self.recipe.grid))

    def quantize_initially(self, model: StreamedModel) -> UnitShards:
        """The same loop without refinement: what the initializer alone comes to."""
        samples = self._samples(self.data.train[:0])
        shards = self.directory.initial_units(self.recipe.grid)
        self._loop(model, samples, "original_unit", 0, shards)
        return shards

    def train_scales(self, model: StreamedModel) -> TunedScales | None:
        """The final pass, unless it is done; None where the recipe has none."""
        if not self.recipe.final_pass.epochs:
            return None
        units, tuned = self.directory.units(self.recipe.grid), self.directory.tuned_units(self.recipe.grid)
        outcome = load_outcome(units, tuned)
        if outcome is None:
            self.say("quantized: scales of the whole model")
            samples = self._samples(self.data.train)
            with self.clock.stage("final_pass"):
                outcome, weights = train_scales(
                    self.trainer, self.recipe.final_pass, self.data, samples, model, units.weights(),
                    self.outer(model, units).weights({}),
                )  # fmt: skip
            ranks.from_first(partial(save_tuned, outcome, weights, units, tuned))
        return outcome

    @property
    def final_units(self) -> UnitShards:
        """The units that are exported and measured."""
        return self.directory.final_units(self.recipe.grid, self.recipe.final_pass.epochs > 0)

    def _samples(self, train: Tensor) -> Samples:
        data = self.data
        return Samples.of(train, data.validation, data.gptq, data.batch_size, ranks.rank(), ranks.world_size())

    @property
    def _scratch(self) -> Path:
        """Folder of this rank's hidden states."""
        folder = self.directory.activations
        return folder / f"rank{ranks.rank()}" if ranks.world_size() > 1 else folder

    def _loop(
        self, model: StreamedModel, samples: Samples, target: str, steps: int, shards: UnitShards
    ) -> list[UnitResult]:
        loop = BlockLoop(
            recipe=self.recipe,
            model=model,
            samples=samples,
            batch_size=self.data.sequences_at_once(self.data.seq_len),
            loader_sizes=self.data.microbatch_sizes(ranks.rank(), ranks.world_size()),
            clock=self.clock,
            scratch=self._scratch,
            target=target,
            steps=steps,
            on_unit=self._log_refined if steps else self._tell,
            pin_memory=self.data.pin_memory,
            snapshots=Snapshots(
                self.directory.snapshots / shards.directory.name, self.recipe.snapshot_every, samples.tokens
            ),
        )
        units = [(index, kind) for index in range(loop.num_blocks) for kind in self.recipe.units]
        finished = [shards.result(*unit) is not None for unit in units]
        refiner = UnitRefiner(self.trainer, self.recipe, self.data)
        refiner.count_from(finished.index(False) * steps if False in finished else len(units) * steps)
        self.clock.num_blocks = loop.num_blocks
        self.progress.begin_run(len(units), sum(finished))
        try:
            return loop.run(shards, self.refine or refiner)
        finally:
            self.progress.end_run()

    def _tell(self, result: UnitResult) -> None:
        text = f"error {result.initial_error:.4f}"
        if result.steps:
            text += f" -> {result.refined_error:.4f}" if result.kept == "refined" else ", initial codes kept"
        self.progress.end_unit(text)
        self.keep_progress()

    def _log_refined(self, result: UnitResult) -> None:
        self._tell(result)
        metrics = {
            "unit/block": float(result.block),
            "unit/initial_error": result.initial_error,
            "unit/refined_error": result.refined_error,
            "unit/codes_changed": result.codes_changed,
        }
        for logger in self.trainer.loggers:
            logger.log_metrics(metrics, step=self.trainer.global_step)

    def outer(self, model: StreamedModel, shards: UnitShards) -> OuterQuantizer:
        """Embedding and head beside a run's units."""
        return OuterQuantizer(model, self.recipe, shards)

    def export(self, model: StreamedModel, coverage: Coverage) -> ExportReport:
        """Write the finished units, embedding and head as a checkpoint, and read it back.

        Raises:
            ValueError: Units are missing, or the destination is refused.
            StorageError: The disk is full, or gives back something else than was written.
        """
        outer = self.outer(model, self.directory.units(self.recipe.grid))
        weights = outer.weights(self.final_units.weights())
        missing = [name for name in coverage.quantized if name not in weights]
        if missing:
            raise ValueError(
                f"run_dir={str(self.directory.path)!r} lacks {len(missing)} of {len(coverage.quantized)} quantized "
                f"layers ({', '.join(missing[:3])} ...): the run is not finished. Start fit again, same --config"
            )
        with self.clock.stage("export"):
            report = export_checkpoint(
                model.checkpoint,
                self.directory.export,
                weights,
                self.recipe.grid,
                self.recipe.group_size,
                ignore=coverage.float_linears,
                tied=[f"{model.head_path}.weight"] if model.is_tied else [],
                outer=list(outer.parts.values()),
            )
            problems = verify_export(self.directory.export, self.final_units.weights())
            if problems:
                listed = "\n  ".join(problems)
                raise StorageError(
                    f"the export does not read back as it was written:\n  {listed}\nIs the disk failing?"
                )
            return report

    def original(self, model: StreamedModel) -> tuple[HiddenStates, dict[str, Measured]]:
        """The original's figures, and its hidden states, for others to be compared with; the caller closes them."""
        with self.clock.stage("evaluate"):
            states = self._hidden_states(model, self._scratch / "original")
            measured = measure(states)
            states.leave_device()
            return states, measured

    def measure(
        self, model: StreamedModel, weights: Mapping[str, Any] | None = None, original: HiddenStates | None = None
    ) -> dict[str, Measured]:
        """Figures by text.

        Args:
            model: The model.
            weights: Hard weights that stand in for its own.
            original: What it is compared with.
        """
        with self.clock.stage("evaluate"), closing(self._hidden_states(model, self._scratch, weights)) as states:
            return measure(states, original)

    def _hidden_states(
        self, model: StreamedModel, scratch: Path, weights: Mapping[str, Any] | None = None
    ) -> HiddenStates:
        return hidden_states(
            model,
            self.data.evaluation_tokens,
            self.data.sequences_at_once(self.data.evaluation_seq_len),
            scratch,
            weights,
            self.data.pin_memory,
            location=self.recipe.store,
        )

    def measure_reloaded(self) -> dict[str, Measured]:
        """Figures of the export, loaded whole by plain transformers."""
        with self.clock.stage("reload"):
            perplexities = whole_model_perplexity(
                self.directory.export, self.data.evaluation_tokens, self.device, self.dtype
            )
        return {text: Measured(value) for text, value in perplexities.items()}

    def continuations(self, original: Path) -> list[dict[str, str]]:
        """What the original (its folder) and the export make of the beginnings of evaluation texts."""
        names, prompts = zip(*choose_prompts(self.data.evaluation_tokens), strict=True)
        tokenizer = self.tokenizer(original)
        rows = torch.stack(prompts)
        with self.clock.stage("reload"):
            both = [
                continue_greedily(folder, rows, tokenizer, self.device, self.dtype)
                for folder in (original, self.directory.export)
            ]
        columns = names, tokenizer.batch_decode(rows, skip_special_tokens=True), *both
        keys = ("text", "prompt", "original", "quantized")
        return [dict(zip(keys, row, strict=True)) for row in zip(*columns, strict=True)]
