"""Device memory that NCCL takes on each GPU, by setting of the recipe's `nccl` keys, and what an all-reduce then takes.

Run `python benchmarks/nccl_memory.py` on a machine with at least two GPUs that nothing else uses. Each setting has
processes of its own. Variables of NCCL that are set in the environment stay as they are in all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from gsq_module.nccl import NCCL  # noqa: E402

SMALL = NCCL(buffsize=2**20, max_ctas=4)
SETTINGS = {
    "NCCL's own": NCCL(),
    "buffsize 1 MiB": NCCL(buffsize=2**20),
    "max_ctas 8": NCCL(max_ctas=8),
    "max_ctas 4": NCCL(max_ctas=4),
    "max_ctas 1": NCCL(max_ctas=1),
    "nvls false": NCCL(nvls=False),
    "cumem false": NCCL(cumem=False),
    "buffsize 1 MiB, max_ctas 4": SMALL,
    "the same, cumem false": replace(SMALL, cumem=False),
}
"""None turns NVLS on: it is NCCL's choice, or the environment's."""
WEIGHTS = 17408 * 5120
"""Elements in bfloat16 that are reduced: the largest weight of Qwen3.6-27B."""
REPEATS = 10


def measure(rank: int) -> dict[str, float]:
    """In a process of one rank: MiB that its group takes beside context and tensors; milliseconds of an all-reduce."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    tensor = torch.ones(WEIGHTS, dtype=torch.bfloat16, device=device)
    whole = torch.empty(2 * WEIGHTS, dtype=torch.bfloat16, device=device)
    tensor.mul_(1)  # kernels are loaded now, not between the two readings
    torch.cuda.synchronize()
    before, _ = torch.cuda.mem_get_info(device)
    world_size = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("nccl", rank=rank, world_size=world_size)
    # What a run does: gradients are reduced, and weights gathered and their gradients scattered.
    size = WEIGHTS // world_size
    for _ in range(2):
        dist.all_reduce(tensor)
        dist.all_gather_into_tensor(whole[: size * world_size], tensor[:size])
        dist.reduce_scatter_tensor(tensor[:size], whole[: size * world_size])
    torch.cuda.synchronize()
    after, _ = torch.cuda.mem_get_info(device)
    began = time.perf_counter()
    for _ in range(REPEATS):
        dist.all_reduce(tensor)
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - began) / REPEATS
    dist.barrier()
    dist.destroy_process_group()
    return {"mib": (before - after) / 2**20, "ms": seconds * 1e3}


def run(setting: NCCL, devices: int) -> dict[str, Any]:
    """One setting in as many processes as there are devices; the highest figures of all ranks, or the error."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    variables = setting.variables()
    kept = sorted(name for name in variables if name in os.environ)
    environment = variables | os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "--rank", str(rank)],
            env=environment | {"WORLD_SIZE": str(devices)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(devices)
    ]
    figures = []
    failed = ""
    for process in processes:
        try:
            out, err = process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
        if process.returncode:
            failed = (err.strip().splitlines() or [f"exit status {process.returncode}"])[-1]
        else:
            figures.append(json.loads(out.splitlines()[-1]))
    if failed:
        return {"failed": failed, "kept": kept}
    return {name: max(figure[name] for figure in figures) for name in ("mib", "ms")} | {"kept": kept}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--only", nargs="*", choices=list(SETTINGS), default=list(SETTINGS), metavar="SETTING")
    parser.add_argument("--out", default="runs/nccl_memory.json")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        print(json.dumps(measure(options.rank)))
        return
    count = torch.cuda.device_count()
    if options.devices < 2 or count < options.devices:
        sys.exit(f"NCCL takes memory where it connects GPUs: {max(2, options.devices)} are needed, there are {count}")
    version = ".".join(map(str, torch.cuda.nccl.version()))
    exported = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
    print(f"NCCL {version}, {options.devices} GPUs; set in the environment: {exported or 'nothing'}\n")
    print("| nccl keys | MiB on each GPU | all-reduce of 170 MiB |\n|---|---|---|")
    rows = {}
    for name in options.only:
        setting = SETTINGS[name]
        rows[name] = row = run(setting, options.devices) | {"keys": asdict(setting)}
        note = f" ({', '.join(row['kept'])} as in the environment)" if row["kept"] else ""
        figures = row.get("failed") or f"{row['mib']:.0f} | {row['ms']:.2f} ms"
        print(f"| {name}{note} | {figures} |", flush=True)
        Path(options.out).parent.mkdir(parents=True, exist_ok=True)
        Path(options.out).write_text(
            json.dumps({"nccl": version, "devices": options.devices, "exported": exported, "settings": rows}, indent=1)
        )
    print(f"\nwritten: {options.out}")


if __name__ == "__main__":
    main()
