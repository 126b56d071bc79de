"""The subcommands as the command line shows them: their arguments and help, and the parser of recipes."""

from __future__ import annotations

from typing import Any, NoReturn

from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser
from typing_extensions import override

from gsq_module.data.module import CalibrationData
from gsq_module.module import GSQModule

USAGE = "python recipes/run.py {} --config RECIPE [--KEY VALUE ...]"
"""Lightning's own lists every key, which would push an error's text far down."""


class RecipeTrainer(Trainer):
    """Lightning's Trainer: of its keys, those for devices, loggers and callbacks are of use here."""

    # These methods exist for their signatures and docstrings, which become the subcommands' arguments and help.

    @override
    def fit(self, *args: Any, **kwargs: Any) -> None:
        """Quantize a model, export it and measure it."""
        super().fit(*args, **kwargs)

    def export(self, model: GSQModule, datamodule: CalibrationData) -> None:
        """Write the units of a finished run as a checkpoint again."""
        raise NotImplementedError("GSQCLI.export does this")

    def evaluate(
        self,
        model: GSQModule,
        datamodule: CalibrationData,
        checkpoint: str | None = None,
        whole_model: bool = False,
        compare: bool = True,
        tasks: str | None = None,
        check: bool = False,
    ) -> None:
        """Measure a checkpoint, original or exported: perplexity, KL divergence to the original, top-token agreement.

        Args:
            checkpoint: Folder of the checkpoint; `original` for the recipe's own model; null for the run's export.
            whole_model: Load it whole with plain transformers instead of block by block: its perplexity alone.
            compare: Also pass the texts through the recipe's own model, for KL divergence and agreement of the top
                token. Takes as long again; without it the recipe's model need not be there.
            tasks: Also run these tasks of lm-evaluation-harness (the extra `eval`), such as `arc_easy,piqa`. Loads the
                model whole; most tasks download their data.
            check: Instead of measuring, say which engines can load the exported checkpoint, and why not.
        """
        raise NotImplementedError("GSQCLI.evaluate does this")

    def plan(
        self, model: GSQModule, datamodule: CalibrationData, memory: str | None = None, json: str | None = None
    ) -> None:
        """Predict the memory of every stage from config.json alone, and say whether the run fits.

        Args:
            memory: Free memory of the device to plan for, such as 12GiB (default: what this machine's GPU has free).
            json: Also write the plan to this file.
        """
        raise NotImplementedError("GSQCLI.plan does this")

    def rehearse(self, model: GSQModule, datamodule: CalibrationData, json: str | None = None) -> None:
        """Run one block of each kind with made-up weights through every stage: measured memory beside the plan, time.

        Args:
            json: Also write the result to this file.
        """
        raise NotImplementedError("GSQCLI.rehearse does this")


class RecipeParser(LightningArgumentParser):
    """Lightning's parser, with a word more on a recipe that is empty."""

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if message.startswith("Unexpected config:"):
            message = (
                "--config: the file is empty, or no mapping of keys to values. A recipe has model.path, "
                "data.calibration and data.evaluation at least: see recipes/smollm2_quickstart.yaml"
            )
        super().error(message, ex)
