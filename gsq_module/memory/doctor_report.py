"""What to make of what the doctor has found: warnings, and a table to read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from gsq_module.memory.statistics import GIB, format_bytes

OTHERS_FRACTION = 0.1
"""Other processes that hold more than this part of a GPU are warned of."""

SMALL_SHM = GIB
"""A smaller /dev/shm is warned of, in bytes. Docker gives a container 64 MiB where nobody says otherwise."""


def find_warnings(report: Mapping[str, Any]) -> list[str]:
    """What is likely to bite, a sentence each.

    Args:
        report: As `doctor.diagnose` makes it.
    """
    found = []
    gpus = report["gpus"]
    if isinstance(gpus, str):
        seen = report["driver"]["gpus_seen"]
        if isinstance(seen, int) and seen > 0:
            found.append(
                f"the driver has {seen} GPU(s) that torch {report['versions']['torch']} cannot use, {gpus}: install a "
                "build of torch for CUDA that this driver can serve (pytorch.org/get-started)"
            )
        gpus = []
    for index, gpu in enumerate(gpus):
        total, used = gpu.get("total_bytes"), gpu.get("used_by_others_bytes")
        if isinstance(total, int) and isinstance(used, int) and used > OTHERS_FRACTION * total:
            names = "; ".join(gpu["processes"]) if isinstance(gpu["processes"], list) else ""
            found.append(
                f"GPU {index}: other processes hold {format_bytes(used)} of {format_bytes(total)}"
                f"{f' ({names})' if names else ''}: end them, or count on what is free"
            )
    if gpus and report["versions"]["triton"] == "not installed":
        found.append(
            "triton is not installed: the optimizer takes the slower path without fused kernels; CUDA builds of torch "
            "bring it, otherwise: pip install triton"
        )
    allocator = report["allocator"]
    if allocator["wsl"] and allocator["expandable_segments"]:
        found.append(
            f"expandable segments are on under WSL2 ({allocator['origin']}): there a lack of memory shows as 'CUDA "
            "driver error: device not ready'; unset the variable, or say expandable_segments:False"
        )
    for key, value in report["pinned_memory"].items():
        if gpus and key.startswith("pinning_") and value != "works":
            found.append(f"{key.replace('_', ' ')} failed, {value}: turn it off with --data.pin_memory false")
    shm = report["disk"]["shm_total_bytes"]
    if isinstance(shm, int) and shm < SMALL_SHM:
        found.append(
            f"/dev/shm has {format_bytes(shm)}: workers of data loaders and NCCL may end in 'Bus error'; in Docker: "
            "--shm-size=2g or --ipc=host"
        )
    return found


def render(report: Mapping[str, Any]) -> Table:
    """The report as a table, without its warnings.

    Args:
        report: As `doctor.diagnose` makes it.
    """
    table = Table.grid(padding=(0, 2))
    for _ in ("section", "label", "text"):
        table.add_column(overflow="fold")  # a value cut short would be no use in a bug report
    for section, content in report.items():
        if section == "warnings":
            continue
        heading = section.replace("_", " ")
        for label, text in _rows("", content) or [("", "none")]:
            table.add_row(Text(heading, style="bold"), label, Text(text))
            heading = ""
    return table


def _rows(label: str, value: Any) -> list[tuple[str, str]]:
    """Label and text of everything in `value`."""
    if isinstance(value, Mapping):
        return [row for key, item in value.items() for row in _rows(f"{label} {key}".strip(), item)]
    if isinstance(value, list):
        return [row for index, item in enumerate(value) for row in _rows(f"{label} {index}".strip(), item)]
    name = label.removesuffix("_bytes").replace("_", " ")
    if label.endswith("_bytes") and isinstance(value, int):
        return [(name, format_bytes(value))]
    if isinstance(value, bool):
        return [(name, "yes" if value else "no")]
    return [(name, str(value) if value != "" else "-")]
