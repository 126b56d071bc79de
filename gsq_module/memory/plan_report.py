"""The memory plan for people and as JSON: stages against the device, numbers of GPUs, verdict, remedies."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any

from rich.console import Group
from rich.table import Table

from gsq_module.memory.plan import CONTEXT_BYTES, MemoryPlan, StagePlan
from gsq_module.memory.statistics import format_bytes

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
MEANT = {"GiB": 2**10, "MiB": 2**20}
"""Numbers without unit below these are likely to be meant in it."""
DEVICES = (1, 2, 4, 8)
"""Numbers of GPUs that the plan compares."""


def parse_bytes(text: str) -> int:
    """`12GiB`, `11.94 GiB`, `12G`, `8192MiB` or a plain number of bytes; units are binary.

    Raises:
        ValueError: Anything else; or a number without unit that is no memory of a device in bytes.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(i?B)?\s*", text, re.IGNORECASE)
    if match is None:
        raise ValueError(f"--memory={text!r}: give a size such as 12GiB or 11.94GiB")
    number = float(match[1])
    if not match[2] and not match[3] and number < CONTEXT_BYTES:
        meant = next((unit for unit, limit in MEANT.items() if number < limit), "KiB")
        raise ValueError(
            f"--memory={text!r}: without a unit these are bytes, and fewer than a CUDA context takes. "
            f"Give the unit: {match[1]}{meant} (or {match[1]}B, if bytes are meant)"
        )
    return int(number * UNITS[match[2].upper()])


def label(stage: StagePlan) -> str:
    """`refine, block 3, mlp`."""
    block = "" if stage.block is None else f", block {stage.block}"
    return f"{stage.stage}{block}{'' if stage.unit is None else f', {stage.unit}'}"


def verdict(plan: MemoryPlan, free: int) -> tuple[bool, str]:
    """Whether the run fits a device with this much free memory, and that in words.

    Args:
        plan: The plan.
        free: Bytes that are free before this process has touched the device.
    """
    tightest, needed = plan.tightest, plan.needed
    rest = "context, NCCL and fragments" if plan.job.world_size > 1 else "context and fragments"
    what = (
        f"{format_bytes(needed)} of device memory at its tightest "
        f"({label(tightest)}: {format_bytes(tightest.allocated)} of tensors, the rest {rest})"
    )
    if needed <= free:
        return True, f"fits: needs {what}, {format_bytes(free - needed)} less than there is"
    return False, f"does not fit: needs {what}, {format_bytes(needed - free)} more than there is"


def remedies(plan: MemoryPlan) -> list[str]:
    """Recipe changes for the tightest stage, each with what it saves."""
    return [f"{text}: {format_bytes(saved)} less" for text, saved in plan.remedies(plan.tightest.stage)]


def compare_devices(plan: MemoryPlan) -> list[dict[str, Any]]:
    """What each rank needs with other numbers of GPUs and other strategies."""
    rows = []
    whole = plan.job.microbatch * plan.job.world_size
    for devices in DEVICES:
        for strategy in ("single",) if devices == 1 else ("ddp", "sharded"):
            # A recipe without microbatch_size shares its batch; one with it keeps it.
            share = max(1, whole // devices) if plan.job.shares_batch else plan.job.microbatch
            other = plan.changed(world_size=devices, strategy=strategy, microbatch=share)
            tightest = other.tightest
            rows.append(
                {
                    "devices": devices,
                    "strategy": strategy,
                    "needed": other.needed,
                    "tensors": tightest.allocated,
                    "tightest": label(tightest),
                }
            )
    return rows


def as_dict(plan: MemoryPlan, free: int) -> dict[str, Any]:
    """Everything of the plan, in bytes."""
    fits, text = verdict(plan, free)
    return {
        "fits": fits,
        "verdict": text,
        "free": free,
        "needed": plan.needed,
        "overhead": plan.overhead,
        "host": plan.host_bytes,
        "disk": plan.disk_bytes,
        "checkpoint": plan.checkpoint_bytes,
        "stages": [
            {"stage": s.stage, "block": s.block, "unit": s.unit, "allocated": s.allocated, "terms": s.terms}
            for s in plan.stages
        ],
        "devices": compare_devices(plan),
        "remedies": [{"change": text, "saves": saved} for text, saved in plan.remedies(plan.tightest.stage)],
        "job": asdict(plan.job),
    }


def render(plan: MemoryPlan, free: int) -> Group:
    """Tables for the terminal."""
    stages = Table(title=f"Peak device memory by stage ({plan.job.strategy}, {plan.job.world_size} device(s))")
    for name in ("stage", "tensors", "on the device", "largest terms"):
        stages.add_column(name, justify="left" if name in ("stage", "largest terms") else "right")
    for stage in plan.stages:
        terms = sorted(stage.terms.items(), key=lambda term: -term[1])
        shown = ", ".join(f"{name} {format_bytes(size)}" for name, size in terms[:3] if size)
        needed = plan.device_bytes(stage.allocated)
        style = "bold red" if needed > free else "bold" if stage is plan.tightest else ""
        stages.add_row(label(stage), format_bytes(stage.allocated), format_bytes(needed), shown, style=style)
    ranks = Table(title="Needed on each device, by number of devices and strategy")
    for name in ("devices", "strategy", "needed", "tightest stage"):
        ranks.add_column(name)
    for row in compare_devices(plan):
        style = "red" if row["needed"] > free else ""
        ranks.add_row(str(row["devices"]), row["strategy"], format_bytes(row["needed"]), row["tightest"], style=style)
    others = Table(title="Elsewhere", show_header=False)
    others.add_row("host memory of a rank, beside Python and torch", format_bytes(plan.host_bytes))
    others.add_row(
        "exported checkpoint", f"{format_bytes(plan.checkpoint_bytes)} ({plan.checkpoint_bytes / 1e9:.1f} GB)"
    )
    others.add_row("disk under run_dir", format_bytes(plan.disk_bytes))
    others.add_row(f"hidden states ({plan.job.store})", format_bytes(plan.store_bytes))
    others.add_row("context, NCCL (not tensors)", format_bytes(plan.overhead))
    return Group(stages, ranks, others)
