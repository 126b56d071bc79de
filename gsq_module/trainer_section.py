"""The recipe's `trainer` section: what it may not say, and what a run fills in before its Trainer is made."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.loggers import Logger

from callbacks import OOMReport, RunProgress
from gsq_module.metrics_log import RunCSVLogger
from gsq_module.problems import raise_collected
from gsq_module.run_directory import RunDirectory

UNSET_LIMITS = {
    "max_epochs": -1,
    "min_epochs": None,
    "max_steps": -1,
    "min_steps": None,
    "max_time": None,
    "limit_train_batches": None,
    "overfit_batches": 0.0,
    "fast_dev_run": False,
}
"""Keys of the Trainer that would change the length of a refinement, and what they are where nobody has set them."""


def check_keys(section: Any) -> None:
    """Refuse keys whose place in a recipe is another section.

    Raises:
        ValueError: Lists every problem.
    """
    problems = [
        f"trainer.{key}={section[key]}: the length of a unit's refinement is model.refinement.epochs; "
        "for a short trial: --model.num_blocks 1"
        for key, unset in UNSET_LIMITS.items()
        if section.get(key) not in (unset, None)
    ]
    if section.get("precision") not in (None, "32-true"):
        problems.append(f"trainer.precision={section['precision']}: what blocks are computed in is model.dtype")
    raise_collected(problems)


def settle_devices(section: Any, planned: bool) -> None:
    """Choose the strategy of several processes where the recipe names none.

    Args:
        section: The section; it is changed.
        planned: Whether only a plan is made, which computes nothing on the devices: they need not be here, and only
            their number counts.
    """
    if planned:
        section["accelerator"] = "cpu"
        section["devices"] = _count(section.get("devices"))
    if section.get("strategy") == "auto" and _processes(section) > 1:
        # What the plan says fits best, whatever the model: it needs least, and no more time (docs/experiments.md).
        section["strategy"] = "sharded"


def _processes(section: Any) -> int:
    """How many processes a Trainer with these keys would have."""
    devices = section.get("devices")
    if str(devices) in ("auto", "-1") and section.get("accelerator") != "cpu":
        devices = torch.cuda.device_count()
    return int(section.get("num_nodes") or 1) * _count(devices)


def _count(devices: Any) -> int:
    """How many devices a value of `trainer.devices` means; one where that depends on the machine."""
    if isinstance(devices, str):
        devices = [part for part in devices.split(",") if part.strip()] if "," in devices else devices
    if isinstance(devices, list):
        return max(1, len(devices))
    return int(devices) if str(devices).isdigit() and int(devices) > 0 else 1


def settle_callbacks(section: Any) -> None:
    """Add the callbacks that every run has, RunProgress and OOMReport, where the recipe does not."""
    configured = section.get("callbacks") or []
    callbacks = list(configured) if isinstance(configured, list) else [configured]
    progress = next((callback for callback in callbacks if isinstance(callback, RunProgress)), None)
    if progress is None:
        progress = RunProgress()
        callbacks.insert(0, progress)
    if section.get("enable_progress_bar") is False:
        # Lightning refuses the key beside a progress bar; the run tells its progress to one even if it is silent.
        progress.disable()
        section["enable_progress_bar"] = None
    if not any(isinstance(callback, OOMReport) for callback in callbacks):
        callbacks.append(OOMReport())  # behind the progress bar, which gives the terminal back first
    section["callbacks"] = callbacks


def settle_wandb(configured: Any, run_dir: str) -> None:
    """A W&B logger without an id of its own gets the run's, and writes into the run directory.

    Args:
        configured: `trainer.logger`, before it is instantiated; it is changed.
        run_dir: The run directory.
    """
    for logger in configured if isinstance(configured, list) else [configured]:
        if not getattr(logger, "class_path", "").endswith("WandbLogger"):
            continue
        arguments = logger.init_args
        if arguments.get("id") is None and arguments.get("version") is None:
            arguments["id"] = RunDirectory(run_dir).wandb_id()
        if arguments.get("resume") is None:
            # The parser passes wandb.init's default on, which would begin the known run anew, and empty it.
            arguments["resume"] = "allow"
        if arguments.get("save_dir") in (None, "."):
            arguments["save_dir"] = run_dir


def loggers_of_run(configured: Logger | list[Logger] | bool | None, run_dir: str) -> list[Logger]:
    """CSV always; what the recipe names beside it."""
    others = configured if isinstance(configured, list) else [configured] if isinstance(configured, Logger) else []
    return [RunCSVLogger(run_dir, flush_logs_every_n_steps=1), *others]
