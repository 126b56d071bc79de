"""The commands that look ahead: `plan`, `rehearse`, and the check that `fit` makes before it loads anything."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
from rich import get_console

from gsq_module import ranks, rehearsal, storage
from gsq_module.atomic import write_atomically
from gsq_module.coverage import check_geometry, serving_problems
from gsq_module.memory.plan import CONTEXT_BYTES, MemoryPlan
from gsq_module.memory.plan_report import as_dict, parse_bytes, remedies, render, verdict
from gsq_module.memory.statistics import format_bytes
from gsq_module.planning import plan_run, strategy_name
from gsq_module.problems import raise_collected
from gsq_module.recipe_run import Run
from gsq_module.rehearsal import Rehearsed
from gsq_module.streaming import source
from gsq_module.streaming.activations import available_host_bytes
from gsq_module.streaming.fast_paths import planned_path
from gsq_module.streaming.model import StreamedModel
from gsq_module.streaming.synthetic import SyntheticCheckpoint
from gsq_module.streaming.tree import meta_model

logger = logging.getLogger(__name__)


def _config_folder(run: Run) -> Path:
    return source.fetch_config(run.recipe.path, run.recipe.gguf_file, run.directory.source)


def _free_bytes(device: torch.device) -> int:
    """What is free for a process that has not touched the device yet."""
    free, _ = torch.cuda.mem_get_info(device)
    # The question itself has made this process's context.
    return free + CONTEXT_BYTES + torch.cuda.memory_reserved(device)


def _model(run: Run, device: torch.device) -> StreamedModel:
    """The recipe's model, with made-up weights in the place of its own."""
    folder = _config_folder(run)
    tree = meta_model(folder)
    return StreamedModel(tree, SyntheticCheckpoint(folder, tree, device), device, run.dtype)


def make_plan(run: Run, device: torch.device, free_bytes: int | None) -> MemoryPlan:
    """The plan of a run on a device with this much free memory.

    Raises:
        ValueError: The model's geometry refuses the recipe; lists every problem.
    """
    raise_collected(check_geometry(_model(run, torch.device("cpu")), run.recipe))
    return plan_run(
        _config_folder(run), run.recipe, run.data, device, free_bytes, run.trainer.world_size,
        strategy_name(run.trainer), run.reload_max_gib,
    )  # fmt: skip


def plan(run: Run, memory: str | None, json_file: str | None) -> MemoryPlan:
    """Print the plan and its verdict.

    Args:
        run: Checked by `check_recipe`.
        memory: Free memory to plan for; None for that of this machine's GPU.
        json_file: Where to write the plan, too.

    Raises:
        ValueError: No memory is given, and there is no GPU to ask.
    """
    device = run.device if run.device.type == "cuda" else torch.device("cuda")
    if memory is not None:
        free = parse_bytes(memory)
    elif torch.cuda.is_available():
        free = _free_bytes(device)
    else:
        raise ValueError("--memory: there is no GPU here to ask; say what the card has free, such as --memory 12GiB")
    made = make_plan(run, device, free)
    get_console().print(render(made, free))
    print(f"{format_bytes(free)} free: {verdict(made, free)[1]}")
    for remedy in remedies(made):
        print(f"  {remedy}")
    model = _model(run, torch.device("cpu"))
    for note in (planned_path(model.model), *serving_problems(model, run.recipe)):
        if note is not None:
            print(note)
    if json_file is not None:
        write_atomically(Path(json_file), json.dumps(as_dict(made, free), indent=1).encode())
    return made


def check_memory(run: Run, refuse: bool) -> None:
    """Plan a run on a GPU, let reports know the plan, and refuse what cannot fit.

    Args:
        run: Checked by `check_recipe`.
        refuse: Whether to; otherwise it is only said.

    Raises:
        ValueError: It does not fit.
    """
    if run.device.type != "cuda":
        return
    free = _free_bytes(run.device)
    try:
        made = make_plan(run, run.device, free)
    except Exception as error:
        if refuse and isinstance(error, (ValueError, FileNotFoundError)):
            raise
        # A model whose blocks cannot be run on tensors without data is quantized all the same.
        logger.warning("no memory plan can be made for this model", exc_info=True)
        return
    run.follow(made)
    fits, text = verdict(made, free)
    if fits:
        run.say(f"memory plan: {text}")
        return
    advice = "".join(f"\n  {remedy}" for remedy in remedies(made))
    message = f"the run {text} ({format_bytes(free)} are free on {run.device})."
    message += f" What would lower it:{advice}" if advice else ""
    if refuse:
        raise ValueError(f"{message}\nTo try all the same: --check_memory false")
    logger.warning("%s", message)


def rehearse(run: Run, json_file: str | None) -> list[Rehearsed]:
    """Rehearse and print what came of it.

    Args:
        run: Checked by `check_recipe`.
        json_file: Where to write the result, too.
    """
    free = _free_bytes(run.device) if run.device.type == "cuda" else None
    made = make_plan(run, run.device, free)
    model = _model(run, run.device)
    run.progress.begin_run(len(made.blocks) * len(run.recipe.units), 0)
    try:
        found = rehearsal.rehearse(
            run.trainer, run.recipe, run.data, model, made, list(run.clock.listeners), run.directory.path / "rehearsal"
        )
    finally:
        run.progress.end_run()
    if not ranks.is_first():
        return found
    get_console().print(rehearsal.render(found))
    result = {**rehearsal.as_dict(found), **_verdict(run, made, found)}
    print(f"whole run, estimated: {result['hours']:.1f} hours; host peak here: {format_bytes(result['host_peak'])}")
    for line in result["verdict"]:
        print(line)
    if json_file is not None:
        write_atomically(Path(json_file), json.dumps(result, indent=1).encode())
    return found


def _verdict(run: Run, plan: MemoryPlan, found: list[Rehearsed]) -> dict[str, Any]:
    """Whether device, host and disk have room for the whole run, in numbers and words."""
    lines, fits = [], True
    margins = [row.margin for row in found if row.margin is not None]
    if margins:
        lines.append(f"device: fits, with {format_bytes(min(margins))} left free at the tightest moment")
    disk_free = storage.free_bytes(run.directory.path)
    checks = (
        ("disk under run_dir", plan.disk_bytes, disk_free, "--run_dir on a larger disk, or --model.store memory"),
        ("host memory", plan.host_bytes * ranks.processes_of_host(), available_host_bytes(), "--model.store disk"),
    )
    for name, needed, free, remedy in checks:
        enough = needed <= free
        fits = fits and enough
        lines.append(
            f"{name}: {format_bytes(needed)} needed, {format_bytes(free)} free"
            + ("" if enough else f": NOT ENOUGH; {remedy}, or fewer data.train_samples")
        )
    lines.append("verdict: the run fits this machine" if fits else "verdict: the run does NOT fit this machine")
    return {"fits": fits, "verdict": lines, "disk": plan.disk_bytes, "disk_free": disk_free, "host": plan.host_bytes}
