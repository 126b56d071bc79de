"""The command line: LightningCLI with fit, export, evaluate, plan and rehearse; doctor and verify beside it."""

from __future__ import annotations

import logging
import sys
import time
import traceback
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import transformers
import yaml
from jsonargparse.typing import NonNegativeFloat
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from gsq_module import (
    commands,
    doctor,
    fingerprint,
    forecasts,
    ranks,
    space,
    trainer_section,
    verification,
)
from gsq_module.data.module import CalibrationData
from gsq_module.memory.allocator import apply_policy
from gsq_module.memory.oom import exit_code_of
from gsq_module.memory.stages import StageClock
from gsq_module.module import GSQModule
from gsq_module.nccl import NCCL
from gsq_module.problems import NumericalError, UserError
from gsq_module.recipe_checks import check_recipe, start_loggers
from gsq_module.recipe_run import Run
from gsq_module.run_directory import RunDirectory
from gsq_module.run_lock import locked
from gsq_module.storage import FULL, storing
from gsq_module.strategies import register_strategies
from gsq_module.subcommands import USAGE, RecipeParser, RecipeTrainer
from gsq_module.tasks import check_tasks

USER_ERROR = 2
"""Exit status of what a user can mend, as jsonargparse's own."""


class GSQCLI(LightningCLI):
    """`run.py {fit,export,evaluate,plan,rehearse} --config RECIPE`; every key of a recipe is also an option."""

    def __init__(self, args: Any = None) -> None:
        self.began = time.perf_counter()
        super().__init__(
            GSQModule,
            CalibrationData,
            trainer_class=RecipeTrainer,
            save_config_callback=None,  # the run directory keeps the configuration, of resumed runs too
            seed_everything_default=0,
            trainer_defaults={
                # refinement.py moves the limits from unit to unit; the shards of a run are its checkpoints
                "max_epochs": -1,
                "enable_checkpointing": False,
                "enable_model_summary": False,
                "num_sanity_val_steps": 0,
                "use_distributed_sampler": False,
                "devices": 1,
            },
            auto_configure_optimizers=False,
            parser_class=RecipeParser,
            parser_kwargs={
                "description": "Quantize large language models to 1-4 bits with GSQ. `run.py doctor` needs no recipe: "
                "it shows what is installed, what the GPUs have free, and what is likely to go wrong. Nor does "
                "`run.py verify RUN_OR_EXPORT`, which looks for damage in a run directory or an export.",
                **{name: {"usage": USAGE.format(name)} for name in self.subcommands()},
            },
            args=args,
        )

    @staticmethod
    @override
    def subcommands() -> dict[str, set[str]]:
        both = {"model", "datamodule"}
        return {
            "fit": {*both, "train_dataloaders", "val_dataloaders", "ckpt_path", "weights_only"},
            "export": both,
            "evaluate": both,
            "plan": both,
            "rehearse": both,
        }

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--run_dir",
            type=str,
            default=doctor.RUN_DIR,
            help="Folder of the run; the same command resumes what is in it.",
        )
        parser.add_argument(
            "--export_dir",
            type=str | None,
            default=None,
            help="Folder of the exported checkpoint (default: run_dir/export).",
        )
        parser.add_argument(
            "--reload_max_gib",
            type=NonNegativeFloat,
            default=4.0,
            help="After a fit the export is also loaded whole with plain transformers and measured, where its dense "
            "weights take at most this many GiB.",
        )
        parser.add_argument(
            "--check_memory",
            type=bool,
            default=True,
            help="Refuse a fit or a rehearsal whose planned memory is more than the GPU has free.",
        )
        parser.add_class_arguments(NCCL, "nccl")

    @override
    def before_instantiate_classes(self) -> None:
        if self.subcommand == "fit" and ranks.is_first():
            trainer_section.settle_wandb(self._get(self.config, "trainer").get("logger"), self._run_dir)

    @override
    def instantiate_classes(self) -> None:
        with user_errors():
            super().instantiate_classes()

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        section = self._get(self.config_init, "trainer")
        trainer_section.settle_devices(section, self.subcommand == "plan")
        self._get(self.config_init, "nccl").export()
        trainer_section.check_keys(section)
        # Plans and rehearsals are no runs.
        is_run = self.subcommand not in ("plan", "rehearse")
        kwargs["logger"] = trainer_section.loggers_of_run(section.get("logger"), self._run_dir) if is_run else []
        trainer_section.settle_callbacks(section)
        return super().instantiate_trainer(**kwargs)

    @property
    def _run_dir(self) -> str:
        return self._get(self.config, "run_dir")

    # --- subcommands ---------------------------------------------------------------------------------------------

    def fit(self, model: GSQModule, datamodule: CalibrationData) -> None:
        """Quantize, export, evaluate."""
        with ExitStack() as held:
            with user_errors():
                run = self._run(model, datamodule)
                fields = self._fingerprint()
                if ranks.is_first():
                    run.directory.check(fields)  # what is refused is left as it is
                    run.directory.make()
                    held.enter_context(locked(run.directory.path))
                    run.directory.prepare(self._resolved_config())
                forecasts.check_memory(run, self._get(self.config, "check_memory"))
                start_loggers(self.trainer.loggers)
                ranks.start(self.trainer, model)
                opened = run.open_model()
                with ranks.first_alone():  # what it downloads, the others find
                    datamodule.tokenize(run.tokenizer(opened.checkpoint.directory))
                    if ranks.is_first():
                        fields[fingerprint.MODEL] = fingerprint.model_identity(opened.checkpoint)
                        rows = (datamodule.train, datamodule.validation, datamodule.gptq)
                        fields[fingerprint.DATA] = fingerprint.data_identity(*rows)
                        run.directory.identify(fields)
                        space.check_space(run, opened)
            # Of other ValueErrors, a library's or a slip of ours, the traceback is wanted.
            known = (UserError, FileNotFoundError, MisconfigurationException)
            with user_errors(*known, clock=run.clock), storing(run.directory.path, of=FULL), run.report.watching():
                self.summary = commands.fit(run, opened, self.began)

    def export(self, model: GSQModule, datamodule: CalibrationData) -> None:
        """Write the units of a finished run as a checkpoint again."""
        with user_errors():
            run = self._run(model, datamodule)
            # With other settings the codes would be read wrongly without a word: as another number of bits, say.
            fields = self._fingerprint()
            run.directory.check(fields)
            if not run.directory.path.is_dir():
                raise FileNotFoundError(f"run_dir={str(run.directory.path)!r}: there is no run yet. Run fit first")
            if not ranks.is_first():
                return
            with locked(run.directory.path), run.report.watching():
                opened = run.open_model()
                fields[fingerprint.MODEL] = fingerprint.model_identity(opened.checkpoint)
                run.directory.check(fields)
                commands.export(run, opened)

    def evaluate(
        self,
        model: GSQModule,
        datamodule: CalibrationData,
        checkpoint: str | None,
        whole_model: bool,
        compare: bool,
        tasks: str | None,
        check: bool,
    ) -> None:
        """Measure a checkpoint, or check what can load it."""
        with user_errors():
            names = check_tasks(tasks) if tasks is not None else []
            run = self._run(model, datamodule)
            if check:
                self.engines = commands.check(run, checkpoint) if ranks.is_first() else []
                return
            if not whole_model:
                ranks.start(self.trainer, model)
            with run.report.watching():
                self.measured = commands.evaluate(run, checkpoint, whole_model, compare)
        ranks.finish()
        if names and ranks.is_first():
            self.task_results = commands.evaluate_tasks(run, checkpoint, names)

    def plan(self, model: GSQModule, datamodule: CalibrationData, memory: str | None, json: str | None) -> None:
        """Predict."""
        with user_errors():
            self.memory_plan = forecasts.plan(self._run(model, datamodule), memory, json)

    def rehearse(self, model: GSQModule, datamodule: CalibrationData, json: str | None) -> None:
        """Run one block of each kind."""
        with user_errors():
            run = self._run(model, datamodule)
            forecasts.check_memory(run, self._get(self.config, "check_memory"))
            ranks.start(self.trainer, model)
            with run.report.watching():
                self.rehearsed = forecasts.rehearse(run, json)
        ranks.finish()

    def _run(self, model: GSQModule, datamodule: CalibrationData) -> Run:
        model.seed = int(self._get(self.config, "seed_everything"))
        directory = RunDirectory(self._run_dir, self._get(self.config, "export_dir"))
        run = Run(self.trainer, model, datamodule, directory, self._get(self.config, "reload_max_gib"))
        check_recipe(self.trainer, model, datamodule, directory, texts=self.subcommand not in ("plan", "rehearse"))
        return run

    def _resolved_config(self) -> str:
        return self._parser(self.subcommand).dump(self.config[self.subcommand], skip_link_targets=False)

    def _fingerprint(self) -> dict[str, Any]:
        return fingerprint.settings_fields(yaml.safe_load(self._resolved_config()))


@contextmanager
def user_errors(*types: type[Exception], clock: StageClock | None = None):
    """Show what a user can mend as a message, not a traceback, and exit with status 2, or that of numerical errors.

    Args:
        types: Exceptions that mean such; without any, those of checks before a run.
        clock: Of the run, which knows the stage that it happened in.
    """
    types = types or (ValueError, FileNotFoundError, MisconfigurationException)
    try:
        yield
    except types as error:
        place = f"{clock.failed}: " if clock is not None and clock.failed is not None else ""
        print(f"error: {place}{error}", file=sys.stderr)
        raise SystemExit(exit_code_of(error) if isinstance(error, NumericalError) else USER_ERROR) from error


def _exit_status(error: BaseException) -> int:
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    return exit_code_of(error)


def main(args: Any = None) -> GSQCLI | None:
    """Entry point of recipes/run.py. `doctor` and `verify` return nothing."""
    apply_policy()  # before anything can start CUDA, which reads the setting only then
    words = sys.argv[1:] if args is None else args
    if isinstance(words, list) and words[:1] == ["doctor"]:
        doctor.main(words[1:])
        return None
    if isinstance(words, list) and words[:1] == ["verify"]:
        verification.main(words[1:])
        return None
    transformers.logging.set_verbosity_warning()
    # At low temperatures most probabilities are denormal numbers, which cost a CPU many times an ordinary one. Threads
    # inherit the mode, so it is set before torch starts any.
    torch.set_flush_denormal(True)
    # One line a fit on limits and devices would be one a unit.
    quiet = ("pytorch.utilities.rank_zero", "pytorch.accelerators.cuda", "fabric.utilities.seed")
    for name in (f"lightning.{module}" for module in quiet):
        logging.getLogger(name).setLevel(logging.WARNING)
    register_strategies()
    try:
        with ranks.leaving(_exit_status):
            return GSQCLI(args)
    except Exception as error:
        code = exit_code_of(error)
        if code == 1:
            raise
        traceback.print_exception(error)
        raise SystemExit(code) from error
