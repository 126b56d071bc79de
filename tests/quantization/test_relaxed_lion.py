"""The optimizer against a plain Lion on autograd's logits, and its conduct as a torch optimizer."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from quantization_helpers import ALL_GRIDS, candidate_values, generator, random_start, relaxed_weight
from torch import Tensor, nn
from torch.nn.functional import linear, mse_loss

from gsq_module.quantization import optimizer as optimizer_module
from gsq_module.quantization.grid import GRIDS, Grid, QuantizedWeight
from gsq_module.quantization.noise import noise_key
from gsq_module.quantization.optimizer import RelaxedLion
from gsq_module.quantization.relaxation import hard_codes

ROWS, COLS, GROUP = 6, 40, 8


def make(
    grid: Grid, logit_dtype: torch.dtype = torch.float32, weight_dtype: torch.dtype = torch.float32, **settings: Any
) -> tuple[RelaxedLion, nn.Parameter, QuantizedWeight]:
    start = random_start(grid, ROWS, COLS, GROUP)
    weight = nn.Parameter(torch.zeros(ROWS, COLS, dtype=weight_dtype))
    optimizer = RelaxedLion([weight], grid, logit_dtype=logit_dtype, fused=False, **settings)
    optimizer.relax(weight, start, "w")
    return optimizer, weight, start


def give_gradient(weight: Tensor, step: int) -> None:
    weight.grad = torch.randn(ROWS, COLS, generator=generator(100 + step)).to(weight.dtype)


def snapshot(optimizer: RelaxedLion, weight: Tensor) -> dict[str, Tensor]:
    state = optimizer.state[weight]
    names = ("logits", "momentum", "scales", "scale_momentum")
    return {name: state[name].clone() for name in names} | {"sample": weight.detach().clone()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@ALL_GRIDS
def test_five_steps_are_those_of_lion_on_autograd_logits(grid: Grid) -> None:
    rates, (beta_update, beta_momentum), decays = (0.02, 1e-3), (0.8, 0.6), (0.5, 0.0)
    optimizer, weight, start = make(
        grid, torch.float64, torch.float64, seed=11, betas=(beta_update, beta_momentum), weight_decay=decays[0]
    )
    inputs = torch.randn(32, COLS, generator=generator(2), dtype=torch.float64)
    targets = torch.randn(32, ROWS, generator=generator(3), dtype=torch.float64)

    logits = optimizer.state[weight]["logits"].clone().requires_grad_()
    scales = start.scales.double().requires_grad_()
    first = grid.first_candidate(start.codes)
    values = candidate_values(grid, first)
    moments = [torch.zeros_like(logits), torch.zeros_like(scales)]
    temperature, logit_scale = 2.0, 100.0
    for step in range(5):
        key = noise_key(11, "w", step, "gumbel")
        oracle = relaxed_weight(logits, scales, values, key, temperature, logit_scale)
        torch.testing.assert_close(weight, oracle, rtol=1e-11, atol=1e-13)
        lr, scale_lr = (rate / (1 + step) for rate in rates)
        temperature, logit_scale = 1.5 / (1 + step), 120.0 + 80 * step
        optimizer.param_groups[0].update(lr=lr, scale_lr=scale_lr, temperature=temperature, logit_scale=logit_scale)

        grads = torch.autograd.grad(mse_loss(linear(inputs, oracle), targets), (logits, scales))
        with torch.no_grad():
            for leaf, grad, moment, rate, decay in zip(
                (logits, scales), grads, moments, (lr, scale_lr), decays, strict=True
            ):
                direction = (beta_update * moment + (1 - beta_update) * grad).sign()
                leaf.copy_(leaf * (1 - rate * decay) - rate * direction)
                moment.copy_(beta_momentum * moment + (1 - beta_momentum) * grad)

        optimizer.zero_grad()
        mse_loss(linear(inputs, weight), targets).backward()
        optimizer.step()
        torch.testing.assert_close(optimizer.state[weight]["logits"], logits.detach(), rtol=0, atol=1e-12)
        torch.testing.assert_close(optimizer.state[weight]["scales"], scales.detach(), rtol=0, atol=1e-12)
    hard = optimizer.harden(weight, torch.bfloat16)
    assert torch.equal(hard.codes.double(), values.gather(0, logits.argmax(0, keepdim=True))[0])
    assert torch.equal(hard.scales, scales.detach().to(torch.bfloat16))
    assert (hard.codes != start.codes).any(), "the steps were large enough to change codes"


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@ALL_GRIDS
def test_redraw_brings_the_sample_back_bit_for_bit(grid: Grid, weight_dtype: torch.dtype) -> None:
    optimizer, weight, _ = make(grid, torch.bfloat16, weight_dtype)
    for step in range(3):
        sample = weight.detach().clone()
        with torch.no_grad():
            weight.copy_(optimizer.harden(weight, torch.bfloat16).dequantize())
        assert not torch.equal(weight, sample)
        optimizer.redraw(weight)
        assert torch.equal(weight, sample)
        give_gradient(weight, step)
        optimizer.step()
        optimizer.param_groups[0]["temperature"] = 0.5  # of the next draw, not of the one at hand


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_hardening_rounds_the_scales_to_the_exports_dtype(dtype: torch.dtype) -> None:
    optimizer, weight, _ = make(GRIDS[2], scale_lr=1.234e-5)
    give_gradient(weight, 0)
    optimizer.step()
    hard = optimizer.harden(weight, dtype)
    state = optimizer.state[weight]
    assert hard.scales.dtype == hard.dequantize().dtype == dtype
    assert torch.equal(hard.scales, state["scales"].to(dtype))
    assert torch.equal(hard.codes, hard_codes(state["logits"], state["first"], GRIDS[2]))


def test_neither_the_start_nor_hard_weights_move_with_the_optimizer() -> None:
    """A unit that did not improve keeps its start, which float32 scales must not share with the state."""
    start = random_start(GRIDS[2], ROWS, COLS, GROUP)
    start.scales = start.scales.float()
    before = copy.deepcopy(start)
    weight = nn.Parameter(torch.zeros(ROWS, COLS))
    optimizer = RelaxedLion([weight], GRIDS[2], fused=False)
    optimizer.relax(weight, start, "w")
    hard = optimizer.harden(weight, torch.float32)
    hard_before = copy.deepcopy(hard)
    give_gradient(weight, 0)
    optimizer.step()
    assert not torch.equal(optimizer.state[weight]["scales"], before.scales)
    assert torch.equal(start.scales, before.scales)
    assert torch.equal(start.codes, before.codes)
    assert torch.equal(hard.scales, hard_before.scales)


def test_a_closure_runs_once_with_gradients_on_and_its_loss_comes_back() -> None:
    optimizer, weight, _ = make(GRIDS[2])
    calls: list[bool] = []

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    before = weight.detach().clone()
    with torch.no_grad():
        loss = optimizer.step(closure)
    assert calls == [True]
    assert loss == before.square().sum()
    assert not torch.equal(weight, before), "the gradient that the closure made was used"
    assert optimizer.step() is None


def test_a_weight_without_gradient_keeps_everything() -> None:
    grid = GRIDS[2]
    weights = [nn.Parameter(torch.zeros(ROWS, COLS)) for _ in range(2)]
    groups: list[dict[str, Any]] = [{"params": weights[:1], "lr": 1e-3}, {"params": weights[1:]}]
    optimizer = RelaxedLion(groups, grid, fused=False)
    for index, weight in enumerate(weights):
        optimizer.relax(weight, random_start(grid, ROWS, COLS, GROUP), f"w{index}")
    assert not torch.equal(*weights), "the name is part of the noise's key"
    give_gradient(weights[0], 0)
    before = [snapshot(optimizer, weight) for weight in weights]
    optimizer.step()
    assert_same(snapshot(optimizer, weights[1]), before[1])
    assert optimizer.state[weights[1]]["step"] == 0
    after = snapshot(optimizer, weights[0])
    assert all(not torch.equal(after[name], before[0][name]) for name in after)


def test_a_step_before_relax_is_refused() -> None:
    weight = nn.Parameter(torch.zeros(ROWS, COLS))
    weight.grad = torch.ones_like(weight)
    with pytest.raises(AssertionError, match="relax"):
        RelaxedLion([weight], GRIDS[2]).step()


def test_other_logit_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"logit_dtype=torch.float16.*bfloat16 or torch.float32"):
        RelaxedLion([nn.Parameter(torch.zeros(2, 2))], GRIDS[2], logit_dtype=torch.float16)


def test_the_seed_the_name_and_the_step_make_the_noise() -> None:
    samples: dict[tuple[int, str], Tensor] = {}
    for seed, name in ((0, "w"), (1, "w"), (0, "v"), (0, "w")):
        weight = nn.Parameter(torch.zeros(ROWS, COLS))
        optimizer = RelaxedLion([weight], GRIDS[2], seed=seed, fused=False)
        optimizer.relax(weight, random_start(GRIDS[2], ROWS, COLS, GROUP), name)
        sample = weight.detach().clone()
        assert torch.equal(samples.setdefault((seed, name), sample), sample)
    assert len({tuple(sample.flatten().tolist()) for sample in samples.values()}) == 3
    weight.grad = torch.zeros_like(weight)
    optimizer.param_groups[0].update(weight_decay=0.0)
    optimizer.step()
    assert not torch.equal(weight, samples[0, "w"]), "a zero gradient moves nothing, but the next sample is another"


@ALL_GRIDS
@pytest.mark.parametrize("logit_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_a_saved_state_continues_bit_for_bit(grid: Grid, logit_dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    optimizer, weight, _ = make(grid, logit_dtype, weight_dtype, lr=1e-3)
    for step in range(3):
        give_gradient(weight, step)
        optimizer.step()
        optimizer.param_groups[0]["temperature"] *= 0.7
    file = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "weight": weight.detach()}, file)
    middle = snapshot(optimizer, weight)
    for step in range(3, 6):
        give_gradient(weight, step)
        optimizer.step()

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other = nn.Parameter(saved["weight"])
    resumed = RelaxedLion([other], grid, lr=9.0, logit_dtype=logit_dtype, fused=False)
    resumed.load_state_dict(saved["optimizer"])
    assert_same(snapshot(resumed, other), middle)
    for name, value in optimizer.state[weight].items():
        restored = resumed.state[other][name]
        assert type(restored) is type(value), name
        assert not isinstance(value, Tensor) or restored.dtype == value.dtype, name
    with torch.no_grad():
        other.zero_()
    resumed.redraw(other)
    assert torch.equal(other, middle["sample"])
    for step in range(3, 6):
        give_gradient(other, step)
        resumed.step()
    assert_same(snapshot(resumed, other), snapshot(optimizer, weight))


def test_a_state_of_other_groups_is_refused() -> None:
    optimizer, _, _ = make(GRIDS[2])
    weights = [nn.Parameter(torch.zeros(ROWS, COLS)) for _ in range(2)]
    with pytest.raises(ValueError, match="size of optimizer's group"):
        RelaxedLion(weights, GRIDS[2]).load_state_dict(optimizer.state_dict())


def late_steps(logit_dtype: torch.dtype, lr: float, steps: int, noise: float) -> tuple[Tensor, Tensor, Tensor]:
    """Logits before and after steps with a steady and a random part of the gradient, and the hard codes after."""
    rows, cols = 64, 128
    start = random_start(GRIDS[2], rows, cols, 64)
    weight = nn.Parameter(torch.zeros(rows, cols))
    optimizer = RelaxedLion([weight], GRIDS[2], lr=lr, scale_lr=0.0, weight_decay=0.0, logit_dtype=logit_dtype)
    optimizer.relax(weight, start, "w")
    state = optimizer.state[weight]
    state["logits"].copy_(state["logits"].to(torch.bfloat16))
    before = state["logits"].float().clone()
    steady = state["scales"].sign().repeat_interleave(64, dim=1)
    for step in range(steps):
        weight.grad = steady + noise * torch.randn(rows, cols, generator=generator(step))
        optimizer.step()
    return before, state["logits"].float(), optimizer.harden(weight, torch.bfloat16).codes


def test_late_updates_vanish_without_stochastic_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a tenth of the learning rate a step is less than half the distance of the bfloat16 numbers around a logit."""
    lr, steps = 2e-5, 40
    before, after, _ = late_steps(torch.bfloat16, lr, steps, noise=0.0)
    # The steady gradient favours the lowest candidate of every weight at every step.
    travel = (after - before)[0]
    assert travel.mean() == pytest.approx(lr * steps, rel=0.03)
    assert travel.std() < lr * steps, (
        "each step rounds afresh; with the same bits some would go all the way, some nowhere"
    )

    monkeypatch.setattr(optimizer_module, "round_to_bfloat16", lambda values, bits: values.to(torch.bfloat16))
    before, after, _ = late_steps(torch.bfloat16, lr, steps, noise=0.0)
    far_from_zero = before[0].abs() > 2.0**-6
    assert far_from_zero.double().mean() > 0.5
    assert torch.equal(after[0][far_from_zero], before[0][far_from_zero]), "nothing moved at all"


def test_bfloat16_logits_follow_float32_logits() -> None:
    lr, steps = 1e-4, 100
    before, single, codes = late_steps(torch.float32, lr, steps, noise=1.0)
    start, half, half_codes = late_steps(torch.bfloat16, lr, steps, noise=1.0)
    assert torch.equal(before, start)
    assert (single - before).abs().mean() > 20 * lr, "they travelled"
    difference = half - single
    for level in range(4):
        # Standard error of a level's mean over 8192 weights: some 1e-5; the travel is hundreds of times as long.
        assert difference[level].mean().abs() < 1e-4, level
    travels = torch.stack([(half - before).flatten(), (single - before).flatten()])
    assert torch.corrcoef(travels)[0, 1] > 0.95
    assert (codes == half_codes).double().mean() > 0.93
