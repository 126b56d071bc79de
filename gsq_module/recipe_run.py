"""A recipe with all it needs to be carried out: trainer, data, run directory, clock, and what its sessions come to."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from lightning.pytorch import Trainer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from callbacks import AllocatorStats, OOMReport, RunProgress
from gsq_module import ranks
from gsq_module.coverage import check_geometry, serving_problems
from gsq_module.data.module import CalibrationData
from gsq_module.export.reader import open_checkpoint
from gsq_module.final_pass import TunedScales, load_outcome
from gsq_module.memory.plan import MemoryPlan
from gsq_module.memory.stages import StageClock, StageListener
from gsq_module.module import GSQModule
from gsq_module.outer import OuterQuantizer
from gsq_module.pipeline import Refine
from gsq_module.problems import raise_collected
from gsq_module.recipe_checks import check_places
from gsq_module.run_directory import Progress, RunDirectory
from gsq_module.streaming import source
from gsq_module.streaming.model import StreamedModel
from gsq_module.unit_shards import UnitResult, UnitShards

logger = logging.getLogger(__name__)


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
        return sum(result.steps for result in results) + self.recipe.final_pass.epochs * self.data.steps_per_epoch

    def keep_progress(self, state: str = "running") -> None:
        """Write down what the sessions have come to so far."""
        if ranks.is_first():
            seconds = {"total": self.total_seconds, **self.clock.seconds}
            self.directory.write_progress(Progress(state, self.sessions, seconds, dict(self.clock.peak_memory)))

    # --- what the parts of a run need --------------------------------------------------------------------------------

    def open_model(self) -> StreamedModel:
        """The recipe's checkpoint, on the meta device, its geometry checked against the recipe."""
        with ranks.first_alone():
            folder = source.fetch(self.recipe.path, self.recipe.gguf_file, self.directory.source)
        check_places(self.recipe, self.directory, folder)  # of a model from the hub, check_recipe could not
        model = StreamedModel.from_checkpoint(open_checkpoint(folder), self.device, self.dtype)
        raise_collected(check_geometry(model, self.recipe))
        if ranks.is_first():
            for problem in serving_problems(model, self.recipe):
                logger.warning("%s", problem)
        return model

    def tokenizer(self, folder: Path) -> PreTrainedTokenizerBase:
        """The tokenizer of a checkpoint folder.

        Raises:
            ValueError: It does not load, or is not there.
        """
        remedy = "The model's tokenizer.json and tokenizer_config.json belong into that folder"
        try:
            found = AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError) as error:
            raise ValueError(f"the tokenizer of {folder} does not load ({error}). {remedy}") from error
        # Of some families (Qwen, Gemma) transformers makes one of special tokens alone where the files are missing.
        if not found.get_vocab().keys() - found.get_added_vocab().keys():
            raise ValueError(
                f"the tokenizer of {folder} is missing: its {type(found).__name__} knows no token but special ones. "
                f"{remedy}. Next: hf download <repository> --include 'tokenizer*' --local-dir {folder}"
            )
        return found

    def say(self, part: str) -> None:
        """Name the part of the command that begins, for those who watch."""
        if self.trainer.is_global_zero and self.progress.is_enabled:
            print(part, flush=True)

    def final_outcome(self) -> TunedScales | None:
        """What the recipe's final pass came to, where it is finished."""
        grid = self.recipe.grid
        return load_outcome(self.directory.units(grid), self.directory.tuned_units(grid), self.recipe.final_pass)

    @property
    def final_units(self) -> UnitShards:
        """The units that are exported and measured."""
        return self.directory.final_units(self.recipe.grid, self.recipe.final_pass.epochs > 0)

    @property
    def scratch(self) -> Path:
        """Folder of this rank's hidden states."""
        folder = self.directory.activations
        return folder / f"rank{ranks.rank()}" if ranks.world_size() > 1 else folder

    def outer(self, model: StreamedModel, shards: UnitShards) -> OuterQuantizer:
        """Embedding and head beside a run's units."""
        return OuterQuantizer(model, self.recipe, shards)
