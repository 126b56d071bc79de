"""Linears split by rows compute what whole ones do, with one gather and one reduce-scatter an optimizer step."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from gsq_module.quantization.grid import GRIDS
from gsq_module.quantization.optimizer import RelaxedLion, local_rows
from gsq_module.quantization.scales import round_to_nearest
from gsq_module.sharding import RowShards

GRID = GRIDS[3]
MICROBATCHES, STEPS = 4, 3


class Sent(TorchDispatchMode):
    """Counts collectives by their name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.counts[func.__name__] += 1
        return func(*args, **kwargs or {})


class Student(nn.Module):
    """A weight of 2 rows, fewer than there are ranks, beside one of 7; a frozen bias; a linear that is left alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 7)
        self.parts = nn.ModuleList([nn.Linear(8, 2, bias=False)])
        self.other = nn.Linear(9, 8, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.other(torch.cat([self.first(inputs), self.parts[0](inputs)], -1))


def made() -> tuple[Student, dict[str, nn.Parameter], torch.Tensor]:
    torch.manual_seed(0)
    student = Student().double().requires_grad_(False)
    weights = {name: student.get_parameter(f"{name}.weight") for name in ("first", "parts.0")}
    for weight in weights.values():
        weight.requires_grad_(True)
    return student, weights, torch.randn(STEPS, MICROBATCHES, 6, 8, dtype=torch.float64)


def optimizer_of(weights: dict[str, nn.Parameter], starts: dict[str, torch.Tensor]) -> RelaxedLion:
    optimizer = RelaxedLion(weights.values(), GRID, lr=0.05, logit_dtype=torch.float64)
    for name, weight in weights.items():
        optimizer.relax(weight, round_to_nearest(starts[name], GRID, 8, torch.float32), name)
    return optimizer


def whole_run() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    student, weights, data = made()
    optimizer = optimizer_of(weights, {name: weight.detach().clone() for name, weight in weights.items()})
    for step in data:
        (student(step.flatten(0, 1)).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    hard = {name: optimizer.harden(weight, torch.float32) for name, weight in weights.items()}
    return {name: (weight.codes, weight.scales) for name, weight in hard.items()}


def split_run(rank: int, world_size: int, group: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{group}", rank=rank, world_size=world_size)
    student, weights, data = made()
    originals = [student.first, student.parts[0]]
    starts = {name: weight.detach().clone() for name, weight in weights.items()}
    shards = RowShards(student, weights, init_device_mesh("cpu", (world_size,)))
    assert all(weight.numel() == 0 for weight in weights.values()), "no rank holds whole weights between steps"
    assert student.first.bias is originals[0].bias
    optimizer = optimizer_of(shards.weights, starts)
    held = {name: local_rows(weight)[0].shape[0] for name, weight in shards.weights.items()}
    assert held == {"first": (3, 3, 1)[rank], "parts.0": (1, 1, 0)[rank]}
    for name, weight in shards.weights.items():
        assert optimizer.state[weight]["logits"].shape == (GRID.num_candidates, held[name], 8)
    share = slice(rank * 2, rank * 2 + 2)
    for step in data:
        with Sent() as sent:
            with shards.accumulating():
                for microbatch in step[:-1]:
                    (student(microbatch[share]).square().mean() / MICROBATCHES).backward()
            (student(step[-1][share]).square().mean() / MICROBATCHES).backward()
        assert sorted(sent.counts.values()) == [2, 2], ("one gather and one reduce-scatter a weight", sent.counts)
        optimizer.step()
        optimizer.zero_grad()
    for name, (codes, scales) in whole_run().items():
        hard = optimizer.harden(shards.weights[name], torch.float32)
        first = local_rows(shards.weights[name])[1]
        assert torch.equal(hard.codes, codes[first : first + held[name]])
        assert torch.equal(hard.scales, scales[first : first + held[name]])
    joined = shards.join()
    assert [student.first, student.parts[0]] == originals
    assert joined["first"] is student.first.weight
    assert joined["first"].shape == (7, 8)
    dist.barrier()
    dist.destroy_process_group()


def test_three_ranks_with_ragged_rows():
    before = [(weight.detach() * 0).to(torch.int8) for weight in made()[1].values()]
    assert not torch.equal(whole_run()["first"][0], before[0])
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(split_run, (3, str(Path(folder) / "group")), nprocs=3)
