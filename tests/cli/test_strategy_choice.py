"""`trainer.strategy: auto` on several GPUs is the strategy that fits best, the same in every process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.accelerators import CUDAAccelerator

from gsq_module import cli, forecasts, ranks, strategy_choice
from gsq_module.memory.plan import MemoryPlan
from gsq_module.memory.statistics import format_bytes

MIB = 2**20
GEOMETRY = Path(__file__).parents[2] / "recipes" / "geometry" / "qwen3-8b"
LARGE = ("--model.path", GEOMETRY, "--model.num_blocks", "1", "--reload_max_gib", "0")
"""A model whose logits are what takes memory; of it only a config.json is read."""
ROOMY = 100 * 1024


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Arguments of the Trainer that a command would make; it ends there."""
    arguments: list[dict[str, Any]] = []

    really = cli.GSQCLI._instantiate_trainer

    def instantiate(self: cli.GSQCLI, config: dict[str, Any], callbacks: Any) -> Any:
        if self.subcommand == "plan":
            return really(self, config, callbacks)
        arguments.append(config)
        raise ValueError("a Trainer would be made now")

    monkeypatch.setattr(cli.GSQCLI, "_instantiate_trainer", instantiate)
    return arguments


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let there be GPUs with so many MiB free; asking torch for it, which costs memory on each, fails."""
    for name in (strategy_choice.CHOICE, ranks.LAUNCHER):
        monkeypatch.setenv(name, "")  # so that what the choice sets is taken back
        monkeypatch.delenv(name)

    def have(*free: int) -> None:
        def asked(*args: Any) -> None:
            raise AssertionError("CUDA would start on another rank's device")

        monkeypatch.setattr(CUDAAccelerator, "is_available", lambda: True)
        monkeypatch.setattr(CUDAAccelerator, "auto_device_count", lambda: len(free))
        monkeypatch.setattr(CUDAAccelerator, "parse_devices", lambda devices: list(range(int(devices))))
        monkeypatch.setattr(torch.cuda, "mem_get_info", asked)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda n: SimpleNamespace(uuid=f"{n}"))
        monkeypatch.setattr(
            strategy_choice, "nvidia_smi", lambda query: [[f"GPU-{n}", str(mib)] for n, mib in enumerate(free)]
        )

    return have


@pytest.fixture
def start(toy, run_cli, made, tmp_path: Path) -> Callable[..., tuple[str, str]]:
    """Start a fit of two devices as far as its Trainer: the strategy that it gets, and what was printed."""

    def run(*options: str, command: str = "fit") -> tuple[str, str]:
        outcome = run_cli(
            *(command, "--config", toy.recipe, "--run_dir", tmp_path / "run"),
            *(*LARGE, "--trainer.accelerator", "gpu", "--trainer.devices", "2", *options),
        )
        assert "a Trainer would be made now" in outcome.err, outcome.err
        return made[-1]["strategy"], outcome.out

    return run


@pytest.fixture
def plan(toy, run_cli, tmp_path: Path) -> Callable[..., Any]:
    def run(*options: str) -> Any:
        arguments = ("--config", toy.recipe, "--run_dir", tmp_path / "run", *LARGE)
        return run_cli("plan", *arguments, "--trainer.devices", "2", *options)

    return run


@pytest.fixture
def needed(plan) -> dict[str, int]:
    """Bytes that the toy needs on each of two GPUs, by strategy."""
    found = {}
    for name in ("ddp", "sharded"):
        outcome = plan("--memory", "80GiB", "--trainer.strategy", name)
        assert outcome.status == 0, outcome.err
        found[name] = outcome.cli.memory_plan.needed
    assert found["sharded"] < found["ddp"]
    return found


@pytest.mark.usefixtures("no_model")
class TestOneLauncher:
    def test_where_there_is_room_it_is_ddp(self, gpus, start) -> None:
        gpus(ROOMY, ROOMY)
        strategy, said = start()
        assert strategy == "ddp"
        (line,) = [line for line in said.splitlines() if line.startswith("trainer.strategy=auto: ddp, for it needs")]
        assert "100.00 GiB free" in line

    def test_the_fullest_gpu_decides(self, gpus, start, needed) -> None:
        tight = int(needed["ddp"] / strategy_choice.COMFORT / MIB)
        for free in ((ROOMY, tight), (tight, ROOMY)):
            gpus(*free)
            strategy, said = start()
            assert strategy == "sharded"
            assert f"ddp would need {format_bytes(needed['ddp'])}" in said
        gpus(tight + 2, ROOMY)
        assert start()[0] == "ddp"

    def test_a_rehearsal_chooses_too(self, gpus, start) -> None:
        gpus(100, 100)
        assert start(command="rehearse")[0] == "sharded"

    @pytest.mark.parametrize("name", ["ddp", "sharded"])
    def test_what_the_recipe_names_stays(self, gpus, start, name: str) -> None:
        gpus(100, 100)
        strategy, said = start("--trainer.strategy", name)
        assert strategy == name
        assert "trainer.strategy" not in said

    def test_without_a_plan_it_is_sharded(self, gpus, start, monkeypatch: pytest.MonkeyPatch) -> None:
        gpus(ROOMY, ROOMY)

        def fails(*args: Any, **kwargs: Any) -> None:
            raise RuntimeError("data-dependent")

        monkeypatch.setattr(forecasts, "plan_run", fails)
        strategy, said = start()
        assert strategy == "sharded"
        assert "no memory plan can be made (RuntimeError)" in said

    def test_without_nvidia_smi_it_is_sharded(self, gpus, start, monkeypatch: pytest.MonkeyPatch) -> None:
        gpus(ROOMY, ROOMY)

        def missing(query: str) -> None:
            raise FileNotFoundError(2, "No such file or directory", "nvidia-smi")

        monkeypatch.setattr(strategy_choice, "nvidia_smi", missing)
        assert start()[0] == "sharded"

    def test_one_gpu_needs_no_choice(self, gpus, start) -> None:
        gpus(100, 100)
        strategy, said = start("--trainer.devices", "1")
        assert strategy == "auto"
        assert "trainer.strategy" not in said

    def test_cpu_processes_have_no_memory_to_compare(self, gpus, start) -> None:
        gpus(100, 100)
        assert start("--trainer.accelerator", "cpu")[0] == "auto"


@pytest.mark.usefixtures("no_model")
class TestOtherProcesses:
    def test_what_rank_0_has_started_does_as_rank_0(self, gpus, start, monkeypatch: pytest.MonkeyPatch) -> None:
        gpus(100, 100)  # what is free has changed since: rank 0 holds some of it
        monkeypatch.setenv(strategy_choice.CHOICE, "ddp")
        monkeypatch.setenv(ranks.LAUNCHER, str(os.getppid()))
        strategy, said = start()
        assert strategy == "ddp"
        assert "trainer.strategy" not in said

    def test_rank_0_tells_those_it_starts(self, gpus, start) -> None:
        gpus(100, 100)
        start()
        assert os.environ[strategy_choice.CHOICE] == "sharded"

    def test_an_earlier_command_of_this_process_does_not_decide(self, gpus, start) -> None:
        gpus(100, 100)
        start()
        gpus(ROOMY, ROOMY)
        assert start()[0] == "ddp"

    @pytest.mark.parametrize("rank", ["0", "1"])
    def test_under_torchrun_memory_is_not_asked(self, gpus, start, monkeypatch: pytest.MonkeyPatch, rank: str) -> None:
        gpus(ROOMY, ROOMY)
        for name, value in {"TORCHELASTIC_RUN_ID": "1", "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}.items():
            monkeypatch.setenv(name, value)
        assert start()[0] == "sharded"

    def test_machines_do_not_compare_memory(self, gpus, start) -> None:
        gpus(ROOMY, ROOMY)
        assert start("--trainer.num_nodes", "2")[0] == "sharded"


@pytest.mark.usefixtures("no_model")
def test_a_plan_is_made_for_the_strategy_that_a_fit_would_take(plan, needed) -> None:
    tight = format_bytes(0.95 * needed["ddp"] / strategy_choice.COMFORT).replace(" ", "")
    for memory, name in (("80GiB", "ddp"), (tight, "sharded")):
        outcome = plan("--memory", memory)
        made = outcome.cli.memory_plan
        assert isinstance(made, MemoryPlan)
        assert made.job.strategy == name
        assert made.needed == needed[name]
        assert f"trainer.strategy=auto: {name}, for it needs" in outcome.out
