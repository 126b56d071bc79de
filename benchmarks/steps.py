"""Parts `floor`, `step` and `optimizer`: the refinement step three ways, beside what its matrix products take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from context import GRID, Bench, bound_module, empty_student, initial_weights, logit_dtype
from logit_space import LogitSpaceStep
from measure import Figure, Measurements, PeakMemory, Row, milliseconds
from shapes import Batch

from gsq_module.module import GSQModule
from gsq_module.quantization.optimizer import RelaxedLion
from gsq_module.quantization.schedule import AnnealingSchedule
from gsq_module.quantization.training_ops import accumulating_in_place

Step = tuple[Callable[[], None], GSQModule | None]
"""A call that takes one optimizer step, and the product's module if that is in it."""
MakeStep = Callable[[Bench, Batch], Step]


def floor(bench: Bench) -> Measurements:
    """The matmul floor of each batch."""
    for batch in bench.shape.batches:
        yield str(batch), partial(_floor_row, bench, batch)


def _floor_row(bench: Bench, batch: Batch, row: Row) -> None:
    row.figures["time"] = milliseconds(bench.floor_seconds(batch))
    for purpose, rate in bench.matmul_rates(batch.microbatch_tokens).items():
        row.figures[purpose] = Figure(rate / 1e12, "TFLOP/s")


def step(bench: Bench) -> Measurements:
    """The step, fused, eager and in logit space, on each batch."""
    kinds: dict[str, MakeStep] = {
        "fused": _fused_step,
        "eager": _eager_step,
        "logit-space autograd": _logit_space_step,
    }
    for batch in bench.shape.batches:
        for kind, make in kinds.items():
            yield f"{kind}, {batch}", partial(_step_row, bench, batch, make)


def _step_row(bench: Bench, batch: Batch, make: MakeStep, row: Row) -> None:
    floor_seconds = bench.floor_seconds(batch)
    call, module = make(bench, batch)
    peak = PeakMemory(bench.device)
    with as_in_a_fit(module) if module else nullcontext():
        seconds = bench.seconds_of(call)
    row.figures["time"] = milliseconds(seconds)
    peak.note(row)
    row.figures["ratio_to_floor"] = Figure(seconds / floor_seconds, "x")


def _fused_step(bench: Bench, batch: Batch) -> Step:
    bench.require_kernels()
    module = bound_module(bench.shape, bench.device, bench.dtype)
    configured = module.configure_optimizers()
    schedule = configured["lr_scheduler"]["scheduler"]
    batches = [bench.microbatch(batch)] * batch.accumulate
    return partial(take_step, module, configured["optimizer"], schedule, batches), module


def _eager_step(bench: Bench, batch: Batch) -> Step:
    module = bound_module(bench.shape, bench.device, bench.dtype)
    optimizer = eager_optimizer(module)
    schedule = AnnealingSchedule(optimizer, module.problem.total_steps)
    batches = [bench.microbatch(batch)] * batch.accumulate
    return partial(take_step, module, optimizer, schedule, batches), module


def _logit_space_step(bench: Bench, batch: Batch) -> Step:
    settings = GSQModule(path="unused").refinement
    student = empty_student(bench.shape, "meta", bench.dtype)
    unit = LogitSpaceStep(student, initial_weights(bench.shape, bench.device), bench.device, GRID, settings)
    return partial(unit, [bench.microbatch(batch)] * batch.accumulate), None


def eager_optimizer(module: GSQModule) -> RelaxedLion:
    """As `GSQModule.configure_optimizers` makes it, but off the fused kernels."""
    optimizer = RelaxedLion(module.problem.weights.values(), module.grid, logit_dtype=logit_dtype(module), fused=False)
    for name, weight in module.problem.weights.items():
        optimizer.relax(weight, module.problem.initial[name].to(weight.device), name)
    return optimizer


def as_in_a_fit(module: GSQModule) -> AbstractContextManager[None]:
    """What gsq_module/refinement.py puts around a fit on one device."""
    return accumulating_in_place(module.problem.student.modules())


def take_step(
    module: GSQModule, optimizer: torch.optim.Optimizer, schedule: Any, batches: Sequence[tuple[torch.Tensor, ...]]
) -> None:
    """One optimizer step over accumulated microbatches, in Lightning's order."""
    for index, batch in enumerate(batches):
        loss = module.relative_error(batch) / len(batches)
        if index == 0:
            optimizer.zero_grad()
        loss.backward()
    optimizer.step()
    schedule.step()


def optimizer_part(bench: Bench) -> Measurements:
    """The optimizer's part of a step alone, the next sample included."""
    yield "fused", partial(_optimizer_row, bench, True)
    yield "eager", partial(_optimizer_row, bench, False)


def _optimizer_row(bench: Bench, fused: bool, row: Row) -> None:
    if fused:
        bench.require_kernels()
    module = bound_module(bench.shape, bench.device, bench.dtype)
    lion = module.configure_optimizers()["optimizer"] if fused else eager_optimizer(module)
    random = bench.generator()
    for weight in module.problem.weights.values():
        weight.grad = torch.empty_like(weight).normal_(generator=random)
    peak = PeakMemory(bench.device)
    seconds = bench.seconds_of(lion.step)
    row.figures["time"] = milliseconds(seconds)
    peak.note(row)
    if fused:
        moved = sum(_bytes_moved(weight, lion.state[weight]) for weight in module.problem.weights.values())
        row.figures["bytes_moved"] = Figure(moved / bench.shape.weights, "bytes a weight")
        row.figures["bandwidth"] = Figure(moved / seconds / 1e12, "TB/s")


def _bytes_moved(weight: torch.Tensor, state: dict[str, Any]) -> int:
    """In one pass: the gradient is read, the sample written, floating state read and written, other state read."""
    assert weight.grad is not None
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
    # A storage and not the tensor: the lowest candidate is one number seen as a whole matrix.
    held = [(2 if tensor.is_floating_point() else 1) * tensor.untyped_storage().nbytes() for tensor in tensors]
    return weight.grad.nbytes + weight.nbytes + sum(held)
