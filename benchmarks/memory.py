"""Predicted beside measured memory: rehearsals of one recipe under several settings, on the GPU at hand.

Run `python benchmarks/memory.py`. Every process on the GPU counts in what is left free, none in what is allocated.
Takes some three minutes on an H200.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from gsq_module.cli import main as run_command  # noqa: E402
from gsq_module.memory.allocator import apply_policy  # noqa: E402

SETTINGS: dict[str, list[str]] = {
    "2 bits, microbatch 1 x 1024": [],
    "4 bits": ["--model.bits=4"],
    "3 bits, microbatch 2": ["--model.bits=3", "--data.microbatch_size=2"],
    "1 bit": ["--model.bits=1"],
    "microbatch 4": ["--data.microbatch_size=4"],
    "1 x 4096 tokens": ["--data.seq_len=4096", "--data.forward_batch_size=1"],
    "targets recomputed": ["--model.targets=recomputed"],
    "original unit, recomputed": ["--model.target=original_unit", "--model.targets=recomputed"],
    "float32 logits": ["--model.refinement.logit_dtype=float32"],
    "eager kernels": ["--model.kernels=eager"],
}
"""Overrides of the recipe, by name."""


def measure(config: str, options: list[str], run_dir: str) -> list[dict[str, Any]]:
    """Stages of one rehearsal, as its JSON has them."""
    out = Path(run_dir) / "rehearsal.json"
    run_command(["rehearse", f"--config={config}", f"--run_dir={run_dir}", f"--json={out}", *options])
    return json.loads(out.read_text())["stages"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--config", default=str(HERE / "memory.yaml"), help="A recipe; its model needs no weights, only config.json."
    )
    parser.add_argument("--only", nargs="*", choices=list(SETTINGS), help="Settings to measure (default: all).")
    parser.add_argument("--run_dir", default="runs/memory")
    parser.add_argument("--out", default="runs/memory.json")
    options, overrides = parser.parse_known_args()
    apply_policy()
    if not torch.cuda.is_available():
        sys.exit("memory is measured by CUDA's allocator: there is no GPU here")
    sys.argv = sys.argv[:1]  # LightningCLI warns of arguments beside its own
    table = Table(title=f"Peak allocated, predicted and measured, on {torch.cuda.get_device_name()}")
    for name in ("settings", "stage", "predicted GiB", "measured GiB", "predicted / measured"):
        table.add_column(name, justify="left" if name in ("settings", "stage") else "right")
    found: dict[str, Any] = {}
    for name in options.only or SETTINGS:
        gc.collect()  # the Trainer of the last one holds its last unit
        torch.cuda.empty_cache()
        try:
            found[name] = measure(options.config, [*SETTINGS[name], *overrides], options.run_dir)
        except SystemExit as error:
            found[name] = f"failed with exit status {error.code}"
            table.add_row(name, str(found[name]))
            continue
        for row in found[name]:
            where = " ".join(str(part) for part in (row["stage"], row["block"], row["unit"]) if part is not None)
            ratio = row["predicted"] / row["allocated"] if row["predicted"] else float("nan")
            table.add_row(
                name, where, f"{(row['predicted'] or 0) / 2**30:.3f}", f"{row['allocated'] / 2**30:.3f}", f"{ratio:.3f}"
            )
        # After each, so that nothing is lost where time runs out.
        Path(options.out).parent.mkdir(parents=True, exist_ok=True)
        Path(options.out).write_text(json.dumps({"device": torch.cuda.get_device_name(), "settings": found}, indent=1))
    Console(width=120).print(table)
    print(f"written: {options.out}")


if __name__ == "__main__":
    main()
