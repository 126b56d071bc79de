"""torchrun, on one machine and on several, and SLURM start the processes of a run as Lightning does."""

from __future__ import annotations

import os
import signal
import socket
import sys

import pytest
from processes import LIMIT, started
from toy_runs import contents

TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def torchrun() -> list[dict]:
    return [{"starter": (*TORCHRUN, "--nproc_per_node=2", f"--master_port={free_port()}")}]


def two_machines() -> list[dict]:
    """Both of them this one, with a process each."""
    common = (*TORCHRUN, "--nnodes=2", "--nproc_per_node=1", "--master_addr=127.0.0.1", f"--master_port={free_port()}")
    return [{"starter": (*common, f"--node_rank={rank}")} for rank in range(2)]


def slurm() -> list[dict]:
    """What `srun --ntasks 2 python recipes/run.py ...` sets."""
    job = {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_NAME": "gsq", "SLURM_JOB_ID": free_port()}
    job |= {"SLURM_NODELIST": "localhost", "SLURM_STEP_NODELIST": "localhost", "SLURM_NODEID": "0"}
    return [{"variables": job | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}} for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("starts", "options"),
    [
        (torchrun, ["--trainer.devices=2"]),
        (two_machines, ["--trainer.devices=1", "--trainer.num_nodes=2"]),
        (slurm, ["--trainer.devices=2"]),
    ],
)
def test_the_processes_do_what_one_does(starts, options, recipe, alone, tmp_path):
    processes = [started(recipe, tmp_path / "run", *options, **start) for start in starts()]
    try:
        outputs = [process.communicate(timeout=LIMIT)[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert [process.returncode for process in processes] == [0] * len(processes), outputs
    assert sum("perplexity (lower is better)" in output for output in outputs) == 1
    assert contents(tmp_path / "run" / "export") == contents(alone.run_dir / "export")
