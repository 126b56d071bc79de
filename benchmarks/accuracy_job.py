"""One run of benchmarks/accuracy.py, in a process of its own: a recipe fitted by one method, its figures as JSON."""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import sys
from pathlib import Path
from typing import Any

from published import PublishedRefiner

from gsq_module import cli
from gsq_module.data.module import CalibrationData
from gsq_module.module import GSQModule
from gsq_module.recipe_checks import check_recipe
from gsq_module.recipe_run import Run
from gsq_module.run_directory import RunDirectory
from gsq_module.strategies import register_strategies

ALONE = {"model.measure_initial": False, "model.final_pass.epochs": 0}
UNSIGNED = ALONE | {"model.signed_scales": False, "model.target": "original_unit"}
METHODS: dict[str, dict[str, Any]] = {
    "rtn": UNSIGNED | {"model.initializer": "rtn", "model.refinement.epochs": 0},
    "gptq": UNSIGNED | {"model.refinement.epochs": 0},
    **{
        f"published-{batch}-{short}": UNSIGNED
        | {
            "data.batch_size": batch,
            "model.refinement.logit_dtype": dtype,
            "model.refinement.lr": 2e-4,
            "model.refinement.scale_lr": 1e-4,
            "model.refinement.betas": "[0.9, 0.95]",
            "model.refinement.weight_decay": 1.0,
            "model.refinement.temperature": "[2.0, 0.05]",
            "model.refinement.logit_scale": "[100.0, 500.0]",
            "model.refinement.final_lr_fraction": 0.1,
            "model.refinement.init_std": 0.01,
            "model.refinement.init_strength": 6.0,
        }
        for batch in (64, 16)
        for short, dtype in (("bf16", "bfloat16"), ("fp32", "float32"))
    },
    "gptq-signed": ALONE | {"model.refinement.epochs": 0},
    "ours": {"model.measure_initial": False},
}
"""Changes of the recipe by method. `ours` is the recipe as it is, `gptq-signed` where it starts; the others do not
profit from what it adds, the final pass included."""


class PublishedCLI(cli.GSQCLI):
    """The product's commands with the published algorithm as refinement."""

    def _run(self, *args: Any) -> Run:
        run = super()._run(*args)
        run.refine = PublishedRefiner(run)
        return run


class CheckCLI(cli.GSQCLI):
    """The product's command line as far as the checks that need neither texts nor weights."""

    def fit(self, model: GSQModule, datamodule: CalibrationData) -> None:
        with cli.user_errors():
            directory = RunDirectory(self._run_dir, None)
            check_recipe(self.trainer, model, datamodule, directory, texts=False)


def check_job(method: str, options: list[str], run_dir: Path) -> None:
    """Refuse keys and values of the recipe that a job would be refused for; nothing is loaded or written.

    Args:
        method: One of METHODS.
        options: As those of `run_job`.
        run_dir: Likewise.

    Raises:
        SystemExit: With status 2, the message is on stderr.
    """
    register_strategies()
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)  # a line a device
    quiet = ("--trainer.logger=false", "--seed_everything=false")
    CheckCLI(["fit", *options, *_changes(method), f"--run_dir={run_dir}", *quiet])


def _changes(method: str) -> list[str]:
    return [f"--{key}={value}" for key, value in METHODS[method].items()]


def run_job(method: str, options: list[str], run_dir: Path) -> dict[str, Any]:
    """Fit, and take the figures from the summary.

    Args:
        method: One of METHODS.
        options: The command line after `fit`; the method's changes come behind it.
        run_dir: Folder of the run, which is resumed where it is there.
    """
    resumed = any(run_dir.glob("units/*.safetensors"))
    if method.startswith("published"):
        cli.GSQCLI = PublishedCLI  # type: ignore[misc]
    cli.main(["fit", *options, *_changes(method), f"--run_dir={run_dir}", "--reload_max_gib=0"])
    summary = json.loads((run_dir / "summary.json").read_text())
    figures = {
        name: {text: {model: values[model] for model in values} for text, values in summary[f"{name}_by_text"].items()}
        for name in ("perplexity", "kl_divergence", "top1_agreement")
    }
    peaks = summary["peak_memory"]
    return {
        **figures,
        "bits_per_weight": summary["bits_per_weight"],
        "units": len(summary["units"]),
        "units_kept": sum(unit["kept"] == "initial" for unit in summary["units"]),
        "seconds": summary["seconds"],
        "resumed": resumed,  # then `seconds` are those of the last part alone
        "peak_device_bytes": max(peaks["device_bytes_by_stage"].values(), default=0),
        "peak_host_bytes": peaks["host_bytes"],
        "device": summary["device"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", choices=METHODS, required=True)
    parser.add_argument("--run_dir", type=Path, required=True)
    parser.add_argument("--result", type=Path, required=True, help="JSON file to write")
    arguments, options = parser.parse_known_args()
    sys.argv = sys.argv[:1]  # LightningCLI warns of arguments beside its own
    result = run_job(arguments.method, options, arguments.run_dir)
    partial = arguments.result.with_suffix(".partial")
    partial.write_text(json.dumps(result))
    partial.rename(arguments.result)
    shutil.rmtree(arguments.run_dir)


if __name__ == "__main__":
    main()
