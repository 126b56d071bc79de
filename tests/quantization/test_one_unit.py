"""The LightningModule on one unit: a plain Trainer, a student of two linears, hard codes in and out."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from quantization_helpers import correlated_inputs
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from gsq_module.module import GSQModule, Refinement, UnitProblem
from gsq_module.quantization.grid import GRIDS, QuantizedWeight
from gsq_module.quantization.scales import round_to_nearest

HIDDEN, WIDE, GROUP = 16, 32, 8


class TwoLinears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, WIDE, bias=False)
        self.down = nn.Linear(WIDE, HIDDEN, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.up(self.norm(inputs))))


def make_problem(
    bits: int | str = 2, steps: int = 60, scale_dtype: torch.dtype = torch.bfloat16, dtype: torch.dtype = torch.float32
) -> tuple[UnitProblem, TensorDataset, TensorDataset]:
    """Weights rounded to nearest, to be refined towards the float unit's output; training and validation samples."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        student = TwoLinears().to(dtype)
    inputs = correlated_inputs(96 * 4, HIDDEN).view(96, 4, HIDDEN).to(dtype)
    with torch.no_grad():
        targets = student(inputs)
    weights = {f"mlp.{name}": getattr(student, name).weight for name in ("up", "down")}
    initial = {
        name: round_to_nearest(weight.detach(), GRIDS[bits], GROUP, scale_dtype) for name, weight in weights.items()
    }
    power = float(targets[:64].square().mean())
    problem = UnitProblem(student, weights, initial, power, steps)
    return problem, TensorDataset(inputs[:64], targets[:64]), TensorDataset(inputs[64:], targets[64:])


def make_module(bits: int | str = 2, **refinement: Any) -> GSQModule:
    settings = {"lr": 2e-3, "scale_lr": 3e-4} | refinement
    return GSQModule(path="unused", bits=bits, group_size=GROUP, refinement=Refinement(**settings))  # type: ignore[arg-type]


def fit(
    module: GSQModule,
    problem: UnitProblem,
    train: TensorDataset,
    validation: TensorDataset | None = None,
    batch_size: int = 16,
    **trainer_settings: Any,
) -> Trainer:
    module.bind(problem, step_offset=0)
    trainer = Trainer(
        accelerator="cpu",
        max_steps=problem.total_steps,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **trainer_settings,
    )
    trainer.fit(
        module, DataLoader(train, batch_size), DataLoader(validation, batch_size) if validation is not None else None
    )
    assert trainer.global_step == problem.total_steps
    return trainer


def error(module: GSQModule, problem: UnitProblem, weights: dict[str, QuantizedWeight], data: TensorDataset) -> float:
    module.bind(problem, step_offset=0)
    return module.hard_error(weights, DataLoader(data, 16), torch.device("cpu"))


@pytest.mark.parametrize("bits", list(GRIDS))
def test_refinement_lowers_the_error_of_hard_codes(bits: int | str) -> None:
    problem, train, validation = make_problem(bits)
    module = make_module(bits)
    initial = error(module, problem, problem.initial, validation)
    fit(module, problem, train, validation)
    refined = module.refined
    assert error(module, problem, refined, validation) < 0.8 * initial
    grid = GRIDS[bits]
    for name, start in problem.initial.items():
        assert refined[name].scales.dtype == start.scales.dtype == torch.bfloat16
        assert (refined[name].codes != start.codes).any()
        assert torch.equal(grid.nearest(refined[name].codes.float()), refined[name].codes.float())


@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float32])
def test_the_initial_weights_survive_the_fit(scale_dtype: torch.dtype) -> None:
    """They are what the unit falls back to."""
    problem, train, validation = make_problem(scale_dtype=scale_dtype, steps=8)
    before = copy.deepcopy(problem.initial)
    module = make_module()
    fit(module, problem, train, validation)
    for name, start in problem.initial.items():
        assert torch.equal(start.codes, before[name].codes)
        assert torch.equal(start.scales, before[name].scales)
        assert module.refined[name].scales.dtype == scale_dtype


class WeightsSeen(Callback):
    """Checks what stands in the student while it trains and validates."""

    def __init__(self, problem: UnitProblem) -> None:
        self.problem = problem
        self.validations = 0
        self.sample: dict[str, Tensor] = {}

    def weights(self) -> dict[str, Tensor]:
        return {name: weight.detach().clone() for name, weight in self.problem.weights.items()}

    def on_train_batch_end(self, *args: Any) -> None:
        self.sample = self.weights()

    def on_validation_batch_start(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        hard = {name: pl_module.hard_weight(name) for name in self.problem.weights}
        for name, weight in self.weights().items():
            assert torch.equal(weight, hard[name].dequantize().float())
        self.validations += 1

    def on_train_batch_start(self, *args: Any) -> None:
        for name, sample in self.sample.items():
            assert torch.equal(self.problem.weights[name], sample), "the sample that the optimizer drew is back"
            assert not torch.equal(self.problem.weights[name], self.problem.initial[name].dequantize().float())


def test_validation_sees_hard_codes_and_training_its_sample() -> None:
    problem, train, validation = make_problem(steps=12)
    seen = WeightsSeen(problem)
    fit(make_module(), problem, train, validation, callbacks=[seen], val_check_interval=2)
    assert seen.validations >= 12


class Settings(Callback):
    """The optimizer's settings at each of its steps."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Optimizer) -> None:
        keys = ("lr", "scale_lr", "temperature", "logit_scale")
        self.seen.append({key: optimizer.param_groups[0][key] for key in keys})


@pytest.mark.parametrize("accumulate", [1, 2])
def test_settings_are_annealed_by_optimizer_steps(accumulate: int) -> None:
    problem, train, _ = make_problem(steps=9)
    settings = Settings()
    module = make_module(lr=1e-3, scale_lr=2e-4, temperature=(1.5, 0.2), logit_scale=(50.0, 300.0))
    fit(module, problem, train, callbacks=[settings], accumulate_grad_batches=accumulate)
    assert len(settings.seen) == 9
    start, end = settings.seen[0], settings.seen[-1]
    assert start == {"lr": 1e-3, "scale_lr": 2e-4, "temperature": 1.5, "logit_scale": 50.0}
    assert end == pytest.approx({"lr": 1e-4, "scale_lr": 2e-5, "temperature": 0.2, "logit_scale": 300.0})


def test_accumulated_microbatches_are_one_batch() -> None:
    found = []
    for batch_size, accumulate in ((16, 1), (4, 4)):
        problem, train, _ = make_problem(steps=10, dtype=torch.float64)
        module = make_module(logit_dtype="float32")
        fit(module, problem, train, batch_size=batch_size, accumulate_grad_batches=accumulate)
        found.append(module.refined)
    for name in found[0]:
        assert (found[0][name].codes == found[1][name].codes).double().mean() > 0.99
        torch.testing.assert_close(found[0][name].scales, found[1][name].scales, rtol=0.02, atol=1e-4)


def test_only_the_units_weights_are_trained() -> None:
    problem, train, _ = make_problem(steps=3)
    norm = copy.deepcopy(problem.student.norm.state_dict())  # type: ignore[union-attr]
    module = make_module()
    module.bind(problem, step_offset=0)
    trainable = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    assert trainable == {"student.up.weight", "student.down.weight"}
    fit(module, problem, train)
    for name, value in problem.student.norm.state_dict().items():  # type: ignore[union-attr]
        assert torch.equal(value, norm[name])


def test_a_finished_unit_leaves_nothing_behind() -> None:
    problem, train, _ = make_problem(steps=3)
    module = make_module()
    trainer = fit(module, problem, train)
    assert not trainer.optimizers[0].state, "teardown would move it"
    assert module.student is None
    module.release()
    assert module.total_steps == 0
    assert not any(parameter.requires_grad for parameter in problem.student.parameters())
    with pytest.raises(AssertionError, match="bind"):
        module.problem  # noqa: B018


def test_the_seed_decides_the_result() -> None:
    found = []
    for seed in (5, 5, 6):
        problem, train, _ = make_problem(steps=10)
        module = make_module()
        module.seed = seed
        fit(module, problem, train)
        found.append(torch.cat([weight.codes.flatten() for weight in module.refined.values()]))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_errors_are_relative_to_the_targets_power() -> None:
    problem, _, validation = make_problem()
    module = make_module()
    zeros = {
        name: QuantizedWeight(torch.zeros_like(start.codes), start.scales) for name, start in problem.initial.items()
    }
    inputs, targets = validation.tensors
    expected = float(targets.square().mean()) / problem.target_power
    assert error(module, problem, zeros, validation) == pytest.approx(expected, rel=1e-5)
    # 32 samples in batches of 20 and 12: each counts once.
    module.bind(problem, step_offset=0)
    uneven = module.hard_error(problem.initial, DataLoader(validation, 20), torch.device("cpu"))
    with torch.no_grad():
        output = problem.student(inputs)
    for name, start in problem.initial.items():
        assert torch.equal(problem.weights[name], start.dequantize().float()), "they stay in the student"
    expected = float((output - targets).square().mean()) / problem.target_power
    assert uneven == pytest.approx(expected, rel=1e-5)
