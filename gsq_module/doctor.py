"""`run.py doctor`: it needs no recipe, and neither Lightning nor transformers, which may be what is broken."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from rich import get_console

from gsq_module.memory.allocator import apply_policy
from gsq_module.memory.doctor import diagnose
from gsq_module.memory.doctor_report import render

RUN_DIR = "runs/gsq"
"""Default run directory of every command."""


def main(args: Sequence[str]) -> None:
    """Print what is installed, what the GPUs have free, and what is likely to go wrong."""
    parser = argparse.ArgumentParser(
        prog="run.py doctor",
        description="Show versions, GPUs, memory, allocator setting and disk, and warn of what is likely to go wrong.",
    )
    parser.add_argument("--run_dir", default=RUN_DIR, help="folder of the run, for the space on its disk")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table; sizes are in bytes")
    options = parser.parse_args(args)
    apply_policy()  # so that the setting shown is the one that a run would have
    report = diagnose(options.run_dir)
    if options.json:
        print(json.dumps(report, indent=2))
        return
    get_console().print(render(report))
    for warning in report["warnings"]:
        print(f"warning: {warning}")
