"""State split by rows comes to what whole state does, with one reduction and one gather an optimizer step."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from gsq_module import ranks
from gsq_module.quantization.grid import GRIDS
from gsq_module.quantization.optimizer import RelaxedLion
from gsq_module.quantization.scales import round_to_nearest

GRID = GRIDS[3]
MICROBATCHES, STEPS = 4, 3
EMPTY = (slice(6, 7), slice(2, 2))


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


def whole_run() -> tuple[dict[str, torch.Tensor], dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    """Samples, and codes and scales, of one process."""
    student, weights, data = made()
    optimizer = optimizer_of(weights, {name: weight.detach().clone() for name, weight in weights.items()})
    for step in data:
        (student(step.flatten(0, 1)).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    hard = {name: optimizer.harden(weight, torch.float32) for name, weight in weights.items()}
    samples = {name: weight.detach() for name, weight in weights.items()}
    return samples, {name: (weight.codes, weight.scales) for name, weight in hard.items()}


def split_run(rank: int, world_size: int, group: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{group}", rank=rank, world_size=world_size)
    student, weights, data = made()
    optimizer = RelaxedLion(weights.values(), GRID, lr=0.05, logit_dtype=torch.float64)
    own = {name: ranks.row_share(len(weight)) for name, weight in weights.items()}
    assert (own["first"], own["parts.0"]) == ((slice(0, 3), slice(0, 1)), (slice(3, 6), slice(1, 2)), EMPTY)[rank]
    for name, weight in weights.items():
        start = round_to_nearest(weight.detach().clone(), GRID, 8, torch.float32)
        optimizer.relax(weight, start, name, rows=own[name])
        held = own[name].stop - own[name].start
        assert optimizer.state[weight]["logits"].shape == (GRID.num_candidates, held, 8)
        ranks.gather_rows_(weight.data)
    share = slice(rank * 2, rank * 2 + 2)
    for step in data:
        for microbatch in step:
            (student(microbatch[share]).square().mean() / MICROBATCHES).backward()
        with Sent() as sent:
            for weight in weights.values():
                ranks.average_rows_(weight.grad)
            optimizer.step()
            for weight in weights.values():
                ranks.gather_rows_(weight.data)
        assert sorted(sent.counts.values()) == [2, 2], ("one reduction and one gather a weight", sent.counts)
        optimizer.zero_grad()
    samples, hard = whole_run()
    for name, (codes, scales) in hard.items():
        found = optimizer.harden(weights[name], torch.float32)
        assert torch.equal(found.codes, codes[own[name]])
        assert torch.equal(found.scales, scales[own[name]])
        assert torch.equal(weights[name], samples[name])
    dist.barrier()
    dist.destroy_process_group()


def test_three_ranks_with_ragged_rows():
    before = [(weight.detach() * 0).to(torch.int8) for weight in made()[1].values()]
    assert not torch.equal(whole_run()[1]["first"][0], before[0])
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(split_run, (3, str(Path(folder) / "group")), nprocs=3)
