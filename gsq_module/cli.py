"""The command line: LightningCLI with the subcommands fit, export and evaluate."""

from __future__ import annotations

import logging
import sys
import time
from contextlib import contextmanager
from typing import Any

import transformers
import yaml
from jsonargparse.typing import NonNegativeFloat
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import CSVLogger, Logger
from typing_extensions import override

import gsq_module
from callbacks import RunProgress
from gsq_module import commands
from gsq_module.data.module import CalibrationData
from gsq_module.module import GSQModule
from gsq_module.run_directory import RunDirectory

USER_ERROR = 2
"""Exit status of what a user can mend, as jsonargparse's own."""

FREE_FIELDS = ("data.evaluation", "data.microbatch_size", "data.pin_memory", "model.measure_initial", "model.store")
"""Fields of `model` and `data` that may change when a run is resumed: they do not shape the result."""


class RecipeTrainer(Trainer):
    """Lightning's Trainer; the methods below exist for their signatures, which become command line arguments."""

    def export(self, model: GSQModule, datamodule: CalibrationData) -> None:
        """Write the units of a finished run as a checkpoint again."""
        raise NotImplementedError("GSQCLI.export does this")

    def evaluate(
        self,
        model: GSQModule,
        datamodule: CalibrationData,
        checkpoint: str | None = None,
        whole_model: bool = False,
    ) -> None:
        """Measure the perplexity of a checkpoint, original or exported.

        Args:
            checkpoint: Folder of the checkpoint; `original` for the recipe's own model; null for the run's export.
            whole_model: Load it whole with plain transformers instead of block by block.
        """
        raise NotImplementedError("GSQCLI.evaluate does this")


class GSQCLI(LightningCLI):
    """`run.py {fit,export,evaluate} --config RECIPE`; every key of a recipe is also an option."""

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
            parser_kwargs={"description": "Quantize large language models to 1-4 bits with GSQ."},
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
        }

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--run_dir", type=str, default="runs/gsq", help="Folder of the run; the same command resumes what is in it."
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

    @override
    def instantiate_classes(self) -> None:
        with user_errors():
            super().instantiate_classes()

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        section = self._get(self.config_init, "trainer")
        for key, unset in (("max_epochs", -1), ("max_steps", -1), ("max_time", None), ("min_steps", None)):
            if section.get(key) not in (unset, None):
                raise ValueError(
                    f"trainer.{key}={section.get(key)}: the length of a unit's refinement is model.refinement.epochs"
                )
        kwargs["logger"] = self._loggers(section.get("logger"))
        section["callbacks"] = [RunProgress(), *(section.get("callbacks") or [])]
        return super().instantiate_trainer(**kwargs)

    def _loggers(self, configured: Logger | list[Logger] | bool | None) -> list[Logger]:
        """CSV always; what the recipe names beside it."""
        others = configured if isinstance(configured, list) else [configured] if isinstance(configured, Logger) else []
        return [CSVLogger(self._run_dir, name="metrics"), *others]

    @property
    def _run_dir(self) -> str:
        return self._get(self.config, "run_dir")

    # --- subcommands ---------------------------------------------------------------------------------------------

    def fit(self, model: GSQModule, datamodule: CalibrationData) -> None:
        """Quantize, export, evaluate."""
        with user_errors():
            run = self._run(model, datamodule)
            run.directory.prepare(self._resolved_config(), self._fingerprint())
            run.start_loggers()
        self.summary = commands.fit(run, self.began)

    def export(self, model: GSQModule, datamodule: CalibrationData) -> None:
        """Write the units of a finished run as a checkpoint again."""
        with user_errors():
            commands.export(self._run(model, datamodule))

    def evaluate(
        self, model: GSQModule, datamodule: CalibrationData, checkpoint: str | None, whole_model: bool
    ) -> None:
        """Measure a checkpoint."""
        with user_errors():
            run = self._run(model, datamodule)
            self.perplexity = commands.evaluate(run, checkpoint, whole_model)

    def _run(self, model: GSQModule, datamodule: CalibrationData) -> commands.Run:
        model.seed = int(self._get(self.config, "seed_everything"))
        directory = RunDirectory(self._run_dir, self._get(self.config, "export_dir"))
        run = commands.Run(self.trainer, model, datamodule, directory, self._get(self.config, "reload_max_gib"))
        run.check_recipe()
        return run

    def _resolved_config(self) -> str:
        return self._parser(self.subcommand).dump(self.config[self.subcommand], skip_link_targets=False)

    def _fingerprint(self) -> dict[str, Any]:
        """Everything that shapes the result, flat."""
        flat: dict[str, Any] = {"gsq_module": gsq_module.__version__}

        def visit(prefix: str, value: Any) -> None:
            if prefix in FREE_FIELDS:
                return
            if isinstance(value, dict):
                for key, item in value.items():
                    visit(f"{prefix}.{key}" if prefix else key, item)
            else:
                flat[prefix] = value

        config = yaml.safe_load(self._resolved_config())
        visit("", {key: config[key] for key in ("seed_everything", "model", "data")})
        return flat


@contextmanager
def user_errors():
    """Show what a user can mend as a message, not a traceback, and exit with status 2."""
    try:
        yield
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(USER_ERROR) from error


def main(args: Any = None) -> GSQCLI:
    """Entry point of recipes/run.py."""
    transformers.logging.set_verbosity_warning()
    # One line a fit on limits and devices would be one a unit.
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.seed"):
        logging.getLogger(name).setLevel(logging.WARNING)
    return GSQCLI(args)
