"""One unit on one GPU, and on several with `ddp` and `sharded`: memory of each rank beside the plan, time of a step.

    python benchmarks/many_gpus.py                      # two GPUs; what is free on them is what there is
    python benchmarks/many_gpus.py --share_gpu          # one GPU, two processes that talk through the host (gloo)
    python benchmarks/many_gpus.py --only 'single 4 x 1024' 'sharded 4 x 1024' --out runs/some.json

Every row is a real `run.py rehearse` of one block of Qwen3.6-27B with made-up weights, its MLP refined. "used" is what
is in use on the whole device at the highest moment, less what was before the run. With --share_gpu each process
measures its own tensors rightly; times, and what is used on the device that both share, mean nothing and are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))

from gsq_module.memory.doctor import nvidia_smi  # noqa: E402

GIB = 2**30
BATCHES = {"4 x 1024": (4, 1024, 1), "8 x 1024": (8, 1024, 1), "64 x 4096": (64, 4096, 2)}
"""Sequences of a step, tokens of a sequence, sequences of a microbatch, by name."""
STRATEGIES = ("single", "ddp", "sharded")
ROWS = [f"{strategy} {batch}" for batch in BATCHES for strategy in STRATEGIES]
GLOO = {
    "ddp": ["--trainer.strategy=gsq_module.strategies.RelaxedDDPStrategy"],
    "sharded": ["--trainer.strategy=gsq_module.strategies.ShardedStrategy"],
}
"""The registered strategies again, for another backend: NCCL refuses two ranks on one GPU."""


def arguments(row: str, options: argparse.Namespace, folder: Path) -> list[str]:
    """The command of a row, without what depends on how its processes are started."""
    batch_size, seq_len, microbatch = BATCHES[row.partition(" ")[2]]
    return [
        *(sys.executable, str(ROOT / "recipes" / "run.py"), "rehearse", f"--config={options.config}"),
        *(f"--run_dir={folder}", f"--json={folder / 'rehearsal.json'}", "--check_memory=false"),
        *(f"--data.batch_size={batch_size}", f"--data.seq_len={seq_len}", f"--data.microbatch_size={microbatch}"),
        *("--data.forward_batch_size=1", "--model.units=[mlp]", "--model.num_blocks=1"),
        *("--trainer.callbacks+=rank_peaks.RankPeaks", f"--trainer.callbacks.directory={folder}"),
        *options.overrides,
    ]


def commands(row: str, options: argparse.Namespace, folder: Path) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Command and environment of each process that this script has to start."""
    strategy = row.partition(" ")[0]
    command = arguments(row, options, folder)
    if strategy == "single":
        yield [*command, "--trainer.devices=1"], {}
    elif not options.share_gpu:
        yield [*command, f"--trainer.devices={options.devices}", f"--trainer.strategy={strategy}"], {}
    else:
        # As torchrun would start them on several machines, so that to Lightning each has a GPU of its own.
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        count = str(options.devices)
        shared = {"TORCHELASTIC_RUN_ID": "shared", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        shared |= {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "LOCAL_RANK": "0"}
        gloo = [*GLOO[strategy], "--trainer.strategy.process_group_backend=gloo"]
        for rank in range(options.devices):
            environment = shared | {"RANK": str(rank), "GROUP_RANK": str(rank)}
            yield [*command, "--trainer.devices=1", f"--trainer.num_nodes={count}", *gloo], environment


def used_bytes() -> list[int]:
    """In use on each GPU now, in nvidia-smi's order; nothing where that does not answer."""
    try:
        return [int(used) * 2**20 for (used,) in nvidia_smi("gpu=memory.used")]
    except (OSError, ValueError):
        return []


def measure(row: str, options: argparse.Namespace) -> dict[str, Any]:
    """The stage `refine` of each rank, or how the run ended; killed after `--timeout` seconds."""
    folder = Path(options.run_dir) / row.replace(" ", "")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    before = used_bytes()
    python_path = os.pathsep.join((str(ROOT), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])))
    with (folder / "output.txt").open("w") as output:
        processes = [
            subprocess.Popen(
                command,
                env=os.environ | environment | {"PYTHONPATH": python_path},
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                start_new_session=True,
            )
            for command, environment in commands(row, options, folder)
        ]
        statuses: list[int | None] = []
        for process in processes:
            try:
                # When one has failed the others end by themselves, or hang for want of it.
                statuses.append(process.wait(timeout=30 if any(statuses) else options.timeout))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                statuses.append(None)
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]
    # The last: the first one only warms up.
    stages = [next((row for row in reversed(rows) if row["stage"] == "refine"), None) for rows in found]
    result: dict[str, Any] = {"statuses": statuses, "before": before, "stages": found}
    if any(statuses) or None in statuses:
        lines = (folder / "output.txt").read_text().strip().splitlines()
        result["failed"] = "\n".join(lines[-15:])
    else:
        rehearsed = json.loads((folder / "rehearsal.json").read_text())["stages"]
        refined = next(stage for stage in rehearsed if stage["stage"] == "refine")
        result |= {"predicted": refined["predicted"], "step_seconds": refined["step_seconds"]}
        result["ranks"] = stages
    return result


def cells(row: str, found: dict[str, Any], single: float | None, options: argparse.Namespace) -> list[str]:
    """A row of the table."""
    if "failed" in found:
        return [row, f"failed ({', '.join(map(str, found['statuses']))})", *["-"] * 6]
    stages = found["ranks"]
    if any("allocated" not in stage for stage in stages):
        return [row, "no CUDA device", *["-"] * 6]

    def each(name: str) -> str:
        return " / ".join(f"{stage[name] / GIB:.2f}" for stage in stages)

    count = 1 if row.startswith("single") else options.devices
    meaningful = count == 1 or not options.share_gpu
    used = "-"
    if meaningful and len(found["before"]) >= count:
        used = " / ".join(
            f"{(stage['device_used'] - before) / GIB:.2f}"
            for stage, before in zip(stages, found["before"], strict=False)
        )
    highest = max(stage["allocated"] for stage in stages)
    step = found["step_seconds"]
    timed = [f"{step * 1e3:.1f}" if meaningful else "-"]
    timed.append(f"{single / (count * step):.2f}" if meaningful and single else "-")
    plan = [f"{found['predicted'] / GIB:.2f}", f"{found['predicted'] / highest:.3f}"]
    return [row, each("allocated"), each("reserved"), used, *plan, *timed]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2, help="GPUs, or with --share_gpu processes.")
    parser.add_argument("--share_gpu", action="store_true", help="All processes on one GPU, through gloo.")
    parser.add_argument("--only", nargs="*", choices=ROWS, default=ROWS, metavar="ROW", help=f"Of {ROWS}.")
    parser.add_argument("--config", default=str(HERE / "memory.yaml"), help="A recipe; of its model only config.json.")
    parser.add_argument("--run_dir", default="runs/many_gpus")
    parser.add_argument("--out", default="runs/many_gpus.json")
    parser.add_argument("--timeout", type=float, default=180, help="Seconds a row may take.")
    options, overrides = parser.parse_known_args()
    options.overrides = overrides
    options.run_dir = str(Path(options.run_dir).absolute())
    count, needed = torch.cuda.device_count(), 1 if options.share_gpu else options.devices
    if count < needed:
        sys.exit(f"{needed} GPU(s) are needed, there are {count}" + ("; with one: --share_gpu" if count else ""))
    heads = ("", "allocated", "reserved", "used", "planned", "planned / allocated", "ms a step", "efficiency")
    print(f"{options.devices} processes, GiB by rank, stage refine of the MLP\n")
    print("| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|")
    results: dict[str, Any] = {}
    single: dict[str, float] = {}
    for row in options.only:
        strategy, _, batch = row.partition(" ")
        results[row] = found = measure(row, options)
        if strategy == "single" and "ranks" in found:
            single[batch] = found["step_seconds"]
        print("| " + " | ".join(cells(row, found, single.get(batch), options)) + " |", flush=True)
        Path(options.out).parent.mkdir(parents=True, exist_ok=True)
        Path(options.out).write_text(
            json.dumps({"devices": options.devices, "share_gpu": options.share_gpu, "rows": results}, indent=1)
        )
    for row, found in results.items():
        if "failed" in found:
            print(f"\n{row}: its output ended with\n{found['failed']}")
            if options.share_gpu:
                print("(gloo may lack a collective for CUDA tensors in this torch: then only several GPUs will tell)")
    print(f"\nwritten: {options.out}")


if __name__ == "__main__":
    main()
