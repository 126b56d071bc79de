"""The block loop: one block at a time is captured, quantized, refined, stored, and passed through."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from gsq_module.data.samples import Samples
from gsq_module.memory.stages import StageClock
from gsq_module.module import GSQModule, UnitProblem
from gsq_module.quantization.gptq import GPTQResult, gptq
from gsq_module.quantization.grid import QuantizedWeight
from gsq_module.quantization.hessian import Hessian
from gsq_module.quantization.scales import round_to_nearest
from gsq_module.refinement import Outcome
from gsq_module.run_directory import UnitResult, UnitShards
from gsq_module.streaming.activations import ActivationStore, Stores, UnitSamples, choose_location
from gsq_module.streaming.calls import BlockCall
from gsq_module.streaming.model import StreamedModel
from gsq_module.streaming.units import Branch, Unit, catch, catch_sums, find_unit, hooks, trace_units

Refine = Callable[[UnitProblem, UnitSamples, UnitSamples], Outcome]


@dataclass
class BlockLoop:
    """Everything the loop needs; `run` is the loop.

    Attributes:
        recipe: The module, for its settings.
        model: The streamed model.
        samples: Calibration rows.
        batch_size: Samples that go through a block at once.
        loader_sizes: Batch sizes that the refinement's loaders yield.
        clock: Told of every stage.
        scratch: Folder for stores on disk.
        target: As the recipe's key.
        steps: Optimizer steps a unit.
        on_unit: Called with each finished unit.
    """

    recipe: GSQModule
    model: StreamedModel
    samples: Samples
    batch_size: int
    loader_sizes: set[int]
    clock: StageClock
    scratch: Path
    target: str
    steps: int
    on_unit: Callable[[UnitResult], None] = field(default=lambda result: None)

    @property
    def num_blocks(self) -> int:
        """Blocks that are quantized."""
        return count_blocks(self.model, self.recipe)

    def run(self, shards: UnitShards, refine: Refine) -> list[UnitResult]:
        """Quantize all blocks of the recipe; units that `shards` holds already are taken from there."""
        units = [(index, kind) for index in range(self.num_blocks) for kind in self.recipe.units]
        unfinished = [index for index, kind in units if shards.result(index, kind) is None]
        if unfinished:
            # Behind the last of them nobody needs the streams.
            self._run_blocks(unfinished[-1] + 1, shards, refine)
        return [result for unit in units if (result := shards.result(*unit)) is not None]

    def _run_blocks(self, num_blocks: int, shards: UnitShards, refine: Refine) -> None:
        sizes = self.samples.batch_sizes(self.batch_size) | self.loader_sizes
        with ExitStack() as cleanup:
            with self.clock.stage("embed"):
                seq_len = self.samples.tokens.shape[1]
                calls = {size: self.model.record_calls(size, seq_len) for size in sorted(sizes)}
                stores = self._open_stores()
                cleanup.callback(stores.close)
                self.model.embed(self.samples.tokens, stores["quantized"], self.batch_size)
                if self.target == "original_stream":
                    for rows in self._batches(*self.samples.fitted):
                        stores["original"].write(rows, stores["quantized"].read(rows, self._device, self._dtype))
            for index in range(num_blocks):
                block = self.model.load_block(index)
                step = _BlockStep(self, index, block, {size: calls[size][index] for size in sizes}, stores)
                step.quantize(shards, refine)
                if index < num_blocks - 1:
                    step.propagate()
                self.model.release_block(index)

    @property
    def _device(self) -> torch.device:
        return self.model.device

    @property
    def _dtype(self) -> torch.dtype:
        return self.model.dtype

    def _batches(self, *parts: range) -> Iterator[slice]:
        return self.samples.batches(*parts, size=self.batch_size)

    def _open_stores(self) -> Stores:
        """Stores of the quantized stream, of a unit's inputs and targets, and of the original stream."""
        # The last unit's goal is the original stream after the block; each unit before it needs a store of its own.
        count = 3 if self.target == "original_unit" else 3 + len(self.recipe.units)
        shape = (*self.samples.tokens.shape, self.model.hidden_size)
        # Stored in the checkpoint's precision where blocks are computed in a higher one (float32 on a CPU).
        dtype = self.model.checkpoint.dtype() if self._dtype == torch.float32 else self._dtype
        total = count * self.samples.tokens.numel() * self.model.hidden_size * (torch.finfo(dtype).bits // 8)
        location = choose_location(self.recipe.store, total, self._device)
        return Stores(shape, dtype, location, self._device, self.scratch)


class _BlockStep:
    """What happens at one block."""

    def __init__(
        self,
        loop: BlockLoop,
        index: int,
        block: nn.Module,
        calls: dict[int, BlockCall],
        stores: Stores,
    ) -> None:
        self.loop, self.index, self.block, self.calls, self.stores = loop, index, block, calls, stores
        self.units = find_units(loop.model, index, loop.recipe)

    def quantize(self, shards: UnitShards, refine: Refine) -> None:
        """Quantize the block's units one after the other; each sees those before it quantized."""
        done = {unit.kind: shards.load(self.index, unit.kind) for unit in self.units}
        if self.loop.target == "original_stream":
            with self.loop.clock.stage("original", self.index):
                self._advance_original(any(entry is None for entry in done.values()))
        for unit in self.units:
            entry = done[unit.kind]
            if entry is None:
                entry = self._quantize_unit(unit, refine)
                shards.save(*entry)
                self.loop.on_unit(entry[0])
            self._place(unit, entry[1])

    @torch.no_grad()
    def propagate(self) -> None:
        """Pass the quantized stream through the quantized block."""
        with self.loop.clock.stage("propagate", self.index):
            for rows, hidden in self._read("quantized"):
                self.stores["quantized"].write(rows, self._call(hidden)(self.block, hidden))

    def _read(self, store: str, *parts: range) -> Iterator[tuple[slice, Tensor]]:
        for rows in self.loop._batches(*parts):
            yield rows, self.stores[store].read(rows, self.loop.model.device, self.loop.model.dtype)

    def _call(self, hidden: Tensor) -> BlockCall:
        return self.calls[hidden.shape[0]]

    def _advance_original(self, with_goals: bool) -> None:
        """Pass the original stream through the untouched block; keep what each unit should bring the stream to."""
        if with_goals:
            _, hidden = next(self._read("original", *self.loop.samples.fitted))
            trace_units(self.block, self._call(hidden), hidden, self.units)
        for rows, hidden in self._read("original", *self.loop.samples.fitted):
            result, sums = catch_sums(self.block, self._call(hidden), hidden, self.units if with_goals else [])
            for unit, total in zip(self.units, sums, strict=False):
                if not unit.ends_block:
                    self._goal(unit).write(rows, total)
            self.stores["original"].write(rows, result)

    def _goal(self, unit: Unit) -> ActivationStore:
        """Where the original stream stands after a unit."""
        return self.stores["original" if unit.ends_block else f"goal_{unit.kind}"]

    def _quantize_unit(self, unit: Unit, refine: Refine) -> tuple[UnitResult, dict[str, QuantizedWeight]]:
        clock, samples = self.loop.clock, self.loop.samples
        with clock.stage("capture", self.index, unit.kind):
            power, token_weights = self._capture(unit)
            hessians = self._gather_hessians(unit) if self.loop.recipe.initializer == "gptq" else {}
        with clock.stage("initialize", self.index, unit.kind):
            starts = {path: self._initialize(unit, path, hessians) for path in unit.linears}
            hessians.clear()
        initial = {unit.full_name(path): start.weight for path, start in starts.items()}
        with clock.stage("refine", self.index, unit.kind):
            weights = {unit.full_name(path): cast(nn.Parameter, linear.weight) for path, linear in unit.linears.items()}
            student = Branch(unit, self._unit_calls(unit))
            problem = UnitProblem(student, weights, initial, power, self.loop.steps)
            inputs, targets = self.stores["inputs"], self.stores["targets"]
            train, validation = (UnitSamples(inputs, targets, part, token_weights) for part in samples.fitted)
            outcome = refine(problem, train, validation)
        result = UnitResult(
            block=self.index,
            unit=unit.kind,
            name=unit.name,
            initial_error=outcome.initial_error,
            refined_error=outcome.refined_error if outcome.improved else outcome.initial_error,  # type: ignore[arg-type]
            kept="refined" if outcome.improved else "initial",
            rejected_error=None if outcome.improved else outcome.refined_error,
            codes_changed=outcome.codes_changed,
            steps=outcome.steps,
            seconds=outcome.seconds,
            notes={unit.full_name(path): start.note for path, start in starts.items() if start.note},
        )
        return result, outcome.weights

    @torch.no_grad()
    def _capture(self, unit: Unit) -> tuple[float, Tensor | None]:
        """Fill the stores of the unit's inputs and targets.

        Returns:
            The weighted mean square of the training targets, and the weights of the tokens' errors if they differ.
        """
        samples = self.loop.samples
        from_stream = self.loop.target == "original_stream"
        weights = None
        if from_stream and self.loop.recipe.token_weights == "inverse_square":
            weights = torch.zeros(self.loop.samples.tokens.shape, device=self.stores["inputs"].device)
        power = torch.zeros((), dtype=torch.float64, device=self.loop.model.device)
        count = 0
        for rows, hidden in self._read("quantized", *samples.fitted):
            caught = catch(self.block, self._call(hidden), hidden, unit, with_branch=not from_stream)
            if from_stream:
                # In float32: the difference is much smaller than its terms.
                goal = self._goal(unit).read(rows, hidden.device, torch.float32)
                target = goal - caught.residual.float()
                if weights is not None:
                    weights[rows] = (
                        goal.square()
                        .mean(-1)
                        .clamp_(min=torch.finfo(torch.float32).tiny)
                        .reciprocal()
                        .to(weights.device)
                    )
            else:
                target = caught.branch  # type: ignore[assignment]
            self.stores["inputs"].write(rows, caught.inputs)
            self.stores["targets"].write(rows, target)
            if rows.start in samples.train or not samples.train:
                squares = target.float().square().mean(-1)
                if weights is not None:
                    squares *= weights[rows].to(squares.device)
                power += squares.mean().double() * len(target)
                count += len(target)
        mean = float(power / count)
        if not mean < float("inf"):
            raise ValueError(
                f"{unit.name}: its target is not finite (mean square {mean}); "
                "where the model computes in float16, use --model.dtype bfloat16 or float32"
            )
        return max(mean, torch.finfo(torch.float32).tiny), weights

    @torch.no_grad()
    def _gather_hessians(self, unit: Unit) -> dict[str, Hessian]:
        """Hessians of the unit's linears by path; linears that are given the same tensor share one."""
        device = self.loop.model.device
        hessians: dict[str, Hessian] = {}
        leader: dict[str, str] = {}
        seen: dict[str, Tensor] = {}

        def watch(path: str, linear: nn.Linear):
            def before(module: nn.Module, args: tuple[Tensor, ...]) -> None:
                first = leader.setdefault(path, next((p for p, given in seen.items() if given is args[0]), path))
                seen[path] = args[0]
                if first == path:
                    if path not in hessians:
                        hessians[path] = Hessian(unit.full_name(path), linear.in_features, device)
                    hessians[path].add(args[0])

            return before

        with hooks([linear.register_forward_pre_hook(watch(path, linear)) for path, linear in unit.linears.items()]):
            for _, hidden in self._read("quantized", self.loop.samples.gptq):
                seen.clear()
                catch(self.block, self._call(hidden), hidden, unit, with_branch=True)
        return {path: hessians[first] for path, first in leader.items()}

    def _initialize(self, unit: Unit, path: str, hessians: dict[str, Hessian]) -> GPTQResult:
        recipe, linear = self.loop.recipe, unit.linears[path]
        scale_dtype = export_dtype(self.loop.model)
        weight = linear.weight.detach()
        if recipe.initializer == "rtn":
            rounded = round_to_nearest(weight, recipe.grid, recipe.group_size, scale_dtype, recipe.signed_scales)
            return GPTQResult(rounded, "rtn")
        # A linear that was never called has no Hessian; an empty one says so.
        hessian = hessians.get(path) or Hessian(unit.full_name(path), linear.in_features, weight.device)
        return gptq(weight, hessian, recipe.grid, recipe.group_size, scale_dtype, recipe.signed_scales, recipe.damping)

    def _unit_calls(self, unit: Unit) -> dict[int, BlockCall]:
        """How the block calls the unit, for each batch size of the refinement."""
        calls = {}
        for size in self.loop.loader_sizes:
            # Rows may repeat: only the shapes matter here.
            rows = [row % len(self.stores["quantized"]) for row in range(size)]
            hidden = self.stores["quantized"].read(rows, self.loop.model.device, self.loop.model.dtype)
            call = catch(self.block, self.calls[size], hidden, unit, with_branch=False).call
            assert call is not None
            calls[size] = call
        return calls

    @torch.no_grad()
    def _place(self, unit: Unit, weights: dict[str, QuantizedWeight]) -> None:
        for path, linear in unit.linears.items():
            linear.weight.copy_(weights[unit.full_name(path)].dequantize())
            linear.weight.grad = None


def count_blocks(model: StreamedModel, recipe: GSQModule) -> int:
    """How many blocks the recipe quantizes."""
    return min(recipe.num_blocks or model.num_blocks, model.num_blocks)


def find_units(model: StreamedModel, index: int, recipe: GSQModule) -> list[Unit]:
    """The units of a block that the recipe quantizes, in its order."""
    return [find_unit(model.blocks[index], model.block_name(index), kind, recipe.ignore) for kind in recipe.units]


def export_dtype(model: StreamedModel) -> torch.dtype:
    """Dtype of the scales: the checkpoint's own, so that hard weights are what consumers compute."""
    return model.checkpoint.dtype()
