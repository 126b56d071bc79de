from __future__ import annotations

import copy
import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from quantization_helpers import random_start
from torch import nn

from gsq_module.quantization.grid import GRIDS
from gsq_module.quantization.optimizer import RelaxedLion
from gsq_module.quantization.schedule import AnnealingSchedule

KEYS = ("lr", "scale_lr", "temperature", "logit_scale")


def make(total_steps: int, **settings: float) -> tuple[RelaxedLion, AnnealingSchedule]:
    weights = [nn.Parameter(torch.zeros(2, 8)) for _ in range(2)]
    groups: list[dict[str, Any]] = [{"params": weights[:1]}, {"params": weights[1:], "lr": 4e-4, "scale_lr": 0.0}]
    optimizer = RelaxedLion(groups, GRIDS[2], lr=2e-4, scale_lr=1e-4, temperature=2.0, logit_scale=100.0)
    for index, weight in enumerate(weights):
        optimizer.relax(weight, random_start(GRIDS[2], 2, 8, 8), f"w{index}")
    return optimizer, AnnealingSchedule(optimizer, total_steps, **settings)


def values(optimizer: RelaxedLion, steps: int, schedule: AnnealingSchedule) -> list[list[dict[str, float]]]:
    """What each of the steps is done with, by group."""
    found = []
    for _ in range(steps):
        found.append([{key: group[key] for key in KEYS} for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    return found


def test_the_papers_defaults_from_the_first_step_to_the_last() -> None:
    optimizer, schedule = make(21)
    steps = values(optimizer, 21, schedule)
    first, last = steps[0], steps[-1]
    assert first[0] == {"lr": 2e-4, "scale_lr": 1e-4, "temperature": 2.0, "logit_scale": 100.0}
    assert last[0] == pytest.approx({"lr": 2e-5, "scale_lr": 1e-5, "temperature": 0.05, "logit_scale": 500.0})
    assert (first[1]["lr"], first[1]["scale_lr"]) == (4e-4, 0.0)
    assert last[1]["lr"] == pytest.approx(4e-5)
    assert {step[1]["scale_lr"] for step in steps} == {0.0}
    middle = steps[10][0]
    assert middle == pytest.approx({"lr": 1.1e-4, "scale_lr": 5.5e-5, "temperature": 1.025, "logit_scale": 300.0})
    quarter = 0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2
    assert steps[5][0]["lr"] == pytest.approx(2e-4 * quarter)
    for before, after in pairwise(steps):
        assert after[0]["temperature"] < before[0]["temperature"]
        assert after[0]["logit_scale"] > before[0]["logit_scale"]
        assert after[0]["lr"] < before[0]["lr"]
        assert after[0]["scale_lr"] < before[0]["scale_lr"]
    for evenly in ("temperature", "logit_scale"):
        gaps = [after[0][evenly] - before[0][evenly] for before, after in pairwise(steps)]
        assert gaps == pytest.approx([gaps[0]] * 20)


def test_other_ends() -> None:
    optimizer, schedule = make(5, final_temperature=0.3, final_logit_scale=50.0, final_lr_fraction=1.0)
    steps = values(optimizer, 5, schedule)
    assert steps[-1][0] == pytest.approx({"lr": 2e-4, "scale_lr": 1e-4, "temperature": 0.3, "logit_scale": 50.0})


@pytest.mark.parametrize("total_steps", [1, 2])
def test_short_schedules(total_steps: int) -> None:
    optimizer, schedule = make(total_steps)
    steps = values(optimizer, total_steps, schedule)
    assert steps[0][0]["temperature"] == 2.0
    assert all(math.isfinite(value) for step in steps for value in step[0].values())
    assert schedule.progress == 1.0


def test_steps_beyond_the_end_stay_there() -> None:
    optimizer, schedule = make(3)
    steps = values(optimizer, 6, schedule)
    assert steps[3] == steps[4] == steps[5] == steps[2]


def test_a_saved_schedule_continues() -> None:
    optimizer, schedule = make(10)
    values(optimizer, 4, schedule)
    saved = copy.deepcopy((optimizer.state_dict(), schedule.state_dict()))
    expected = values(optimizer, 6, schedule)
    other, resumed = make(10)
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    assert values(other, 6, resumed) == expected
