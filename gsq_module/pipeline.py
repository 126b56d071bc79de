"""The block loop: one block at a time is captured, quantized, refined, stored, and passed through."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from gsq_module import ranks
from gsq_module.capture import BlockPasses, head_hessian, record_calls
from gsq_module.data.samples import Samples
from gsq_module.geometry import count_blocks, count_stores, export_dtype, find_units, hidden_bytes, store_dtype
from gsq_module.memory.stages import StageClock
from gsq_module.module import GSQModule, UnitProblem
from gsq_module.outer import OuterQuantizer
from gsq_module.quantization.gptq import GPTQResult, gptq
from gsq_module.quantization.grid import QuantizedWeight
from gsq_module.quantization.hessian import Hessian
from gsq_module.quantization.scales import round_to_nearest
from gsq_module.refinement import Outcome
from gsq_module.snapshots import Snapshots
from gsq_module.streaming.activations import Stores, UnitSamples, choose_location, free_device_bytes
from gsq_module.streaming.model import StreamedModel
from gsq_module.streaming.staging import Staging
from gsq_module.streaming.units import Unit
from gsq_module.unit_shards import UnitResult, UnitShards

log = logging.getLogger(__name__)

Refine = Callable[[UnitProblem, UnitSamples, UnitSamples], Outcome]


@dataclass
class BlockLoop:
    """Everything the loop needs; `run` is the loop.

    Attributes:
        recipe: The module, for its settings.
        model: The streamed model.
        samples: Calibration rows of this rank.
        batch_size: Samples that go through a block at once outside the refinement.
        loader_sizes: Batch sizes that the refinement's loaders yield.
        clock: Told of every stage.
        scratch: Folder for stores on disk.
        target: As the recipe's key.
        steps: Optimizer steps a unit.
        on_unit: Called with each finished unit.
        pin_memory: Whether hidden states in host memory go through pinned buffers.
        indices: Blocks to go through, in order; None for all of the recipe. A rehearsal leaves most of them out.
        snapshots: Where hidden states are kept now and then, so that a resumed run need not begin at the first block.
        notes_told: Notes on units that the log has; those of many units are told once.
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
    pin_memory: bool = True
    indices: Sequence[int] | None = None
    snapshots: Snapshots | None = None
    notes_told: set[str] = field(default_factory=set)

    @property
    def num_blocks(self) -> int:
        """Blocks that are quantized."""
        return count_blocks(self.model, self.recipe)

    @property
    def blocks(self) -> Sequence[int]:
        """Blocks that are gone through."""
        return range(self.num_blocks) if self.indices is None else self.indices

    def run(self, shards: UnitShards, refine: Refine) -> list[UnitResult]:
        """Quantize all blocks of the recipe, embedding and head; what `shards` holds already is taken from there."""
        outer = OuterQuantizer(self.model, self.recipe, shards)
        for kind in outer.parts:
            if outer.is_open(kind) and not (kind == "head" and outer.needs_stream):
                with self.clock.stage(kind):
                    outer.round(kind)
        units = [(index, kind) for index in self.blocks for kind in self.recipe.units]
        unfinished = [index for index, kind in units if shards.result(index, kind) is None]
        if unfinished or outer.needs_stream:
            # Behind the last of them nobody needs the streams, unless the head waits for their end.
            indices = [index for index in self.blocks if outer.needs_stream or index <= unfinished[-1]]
            self._run_blocks(indices, shards, refine, outer, unfinished)
        if self.snapshots is not None:
            self.snapshots.clear()
        return [result for unit in units if (result := shards.result(*unit)) is not None]

    def _run_blocks(
        self,
        indices: Sequence[int],
        shards: UnitShards,
        refine: Refine,
        outer: OuterQuantizer,
        unfinished: Sequence[int],
    ) -> None:
        """Go through blocks, from a snapshot at or before the first unfinished one where there is one."""
        samples, staging = self.samples, Staging(self.model.device, self.pin_memory)
        sizes = samples.batch_sizes(self.batch_size) | self.loader_sizes
        with ExitStack() as cleanup:
            with self.clock.stage("embed"):
                calls = record_calls(self.model, sizes, samples.tokens.shape[1])
                stores = self._open_stores()
                cleanup.callback(stores.close)
                streams = [stores["quantized"].data]
                if self.target == "original_stream":
                    streams.append(stores["original"].data)
                first = None
                if self.snapshots is not None:
                    needed = unfinished[0] if unfinished else self.num_blocks
                    first = self.snapshots.restore(streams, needed, lambda block: self._basis(shards, block))
                if first is None:
                    self._embed(stores, outer, with_original=bool(unfinished))

            def passes_of(index: int) -> BlockPasses:
                block = self.model.load_block(index)
                here = {size: calls[size][index] for size in sizes}
                return BlockPasses(
                    self.recipe, self.model, index, block, here, samples, self.batch_size, stores, staging, self.target
                )

            for index in indices:
                if first is not None and index < first:
                    continue
                step = _BlockStep(self, index, passes_of(index))
                is_open = bool(unfinished) and index <= unfinished[-1]
                step.quantize(shards, refine, with_original=is_open)
                # A rehearsal leaves nothing out.
                if index != indices[-1] or self.indices is not None or outer.needs_stream:
                    step.propagate()
                self.model.release_block(index)
                if self.snapshots is not None and index != indices[-1] and self.snapshots.is_due(index + 1):
                    with self.clock.stage("snapshot", index):
                        self.snapshots.save(streams, index + 1, self._basis(shards, index + 1))
            if outer.needs_stream:
                with self.clock.stage("head"):
                    for index in range(self.num_blocks, self.model.num_blocks) if self.indices is None else ():
                        passes_of(index).propagate(samples.gptq)
                        self.model.release_block(index)
                    outer.solve_head(head_hessian(self.model, samples, self.batch_size, stores["quantized"], staging))

    def _embed(self, stores: Stores, outer: OuterQuantizer, with_original: bool) -> None:
        """Fill the streams with the hidden states before the first block."""
        samples = self.samples
        self.model.embed(samples.tokens, stores["quantized"], self.batch_size, outer.weights({}))
        if self.target != "original_stream" or not with_original:
            return
        if "embedding" in outer.parts:
            self.model.embed(samples.tokens[: samples.validation.stop], stores["original"], self.batch_size)
            return
        for rows in samples.batches(*samples.fitted, size=self.batch_size):
            stores["original"].write(rows, stores["quantized"].data[rows])

    def _basis(self, shards: UnitShards, block: int) -> str:
        """What the hidden states before a block come from, beside the fingerprint."""
        return shards.basis([(index, kind) for index in self.blocks if index < block for kind in self.recipe.units])

    def _open_stores(self) -> Stores:
        """Stores of the quantized stream, of what a unit is fitted on, and of the original stream."""
        shape = (*self.samples.tokens.shape, self.model.hidden_size)
        dtype = store_dtype(self.model)
        total = count_stores(self.recipe, self.target) * hidden_bytes(self.model, self.samples.tokens.numel())
        free = free_device_bytes(self.model.device)
        location = choose_location(self.recipe.store, total, free, ranks.processes_of_host())
        return Stores(shape, dtype, location, self.model.device, self.scratch)


class _BlockStep:
    """What happens at one block."""

    def __init__(self, loop: BlockLoop, index: int, passes: BlockPasses) -> None:
        self.loop, self.index, self.passes = loop, index, passes
        self.units = find_units(loop.model, index, loop.recipe)

    def quantize(self, shards: UnitShards, refine: Refine, with_original: bool = True) -> None:
        """Quantize the block's units one after the other; each sees those before it quantized.

        Args:
            with_original: Whether this block or a later one needs the original stream.
        """
        done = {unit.kind: shards.load(self.index, unit.kind) for unit in self.units}
        if self.loop.target == "original_stream" and with_original:
            with self.loop.clock.stage("original", self.index):
                with_goals = any(entry is None for entry in done.values())
                self.passes.advance_original(self.units if with_goals else [])
        for unit in self.units:
            entry = done[unit.kind]
            if entry is None:
                entry = self._quantize_unit(unit, refine)
                # Logged first: a session that is killed in between does the unit again, but does not log it again.
                self.loop.on_unit(entry[0])
                ranks.from_first(partial(shards.save, *entry))
            self._place(unit, entry[1])

    def propagate(self) -> None:
        """Pass the quantized stream through the quantized block."""
        with self.loop.clock.stage("propagate", self.index):
            self.passes.propagate()

    def _quantize_unit(self, unit: Unit, refine: Refine) -> tuple[UnitResult, dict[str, QuantizedWeight]]:
        clock, passes = self.loop.clock, self.passes
        with clock.stage("capture", self.index, unit.kind):
            captured = passes.capture(unit)
            hessians = passes.hessians(unit) if self.loop.recipe.initializer == "gptq" else {}
        if captured.note and captured.note not in self.loop.notes_told and ranks.is_first():
            self.loop.notes_told.add(captured.note)
            log.warning("%s: %s", unit.name, captured.note)
        with clock.stage("initialize", self.index, unit.kind):
            starts = {path: self._initialize(unit, path, hessians) for path in unit.linears}
        initial = {unit.full_name(path): start.weight for path, start in starts.items()}
        with clock.stage("refine", self.index, unit.kind):
            weights = {unit.full_name(path): cast(nn.Parameter, linear.weight) for path, linear in unit.linears.items()}
            student = passes.student(unit, self.loop.loader_sizes)
            prepare = passes.prepare(unit, student)

            def resize(size: int) -> None:
                student.calls[size] = passes.unit_call(unit, size)
                self.loop.loader_sizes.add(size)

            steps = self.loop.steps if self.loop.recipe.refines(unit.kind) else 0
            first_step = None  # in a rehearsal, which does the same block twice
            if self.loop.indices is None:
                first_step = (self.index * len(self.units) + self.units.index(unit)) * self.loop.steps
            problem = UnitProblem(student, weights, initial, captured.power, steps, prepare, resize, first_step)
            samples = self.loop.samples
            train, validation = (
                UnitSamples(captured.sources, part, passes.staging, total)
                for part, total in zip(samples.fitted, samples.totals, strict=True)
            )
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
            notes={unit.full_name(path): start.note for path, start in starts.items() if start.note}
            | ({unit.name: "; ".join(remarks)} if (remarks := [*filter(None, (captured.note, outcome.note))]) else {}),
        )
        return result, outcome.weights

    def _initialize(self, unit: Unit, path: str, hessians: dict[str, Hessian]) -> GPTQResult:
        """Initial codes and scales of one linear, in host memory: the device needs the room for the refinement.

        Rows do not depend on each other: each rank solves its own.
        """
        linear = unit.linears[path]
        rows = linear.out_features
        found = self._initialize_rows(linear.weight.detach()[ranks.row_share(rows)], unit, path, hessians)
        weight = QuantizedWeight(
            ranks.gather_rows(found.weight.codes, rows).to("cpu"),
            ranks.gather_rows(found.weight.scales, rows).to("cpu"),
        )
        return replace(found, weight=weight)

    def _initialize_rows(self, weight: Tensor, unit: Unit, path: str, hessians: dict[str, Hessian]) -> GPTQResult:
        recipe, scale_dtype = self.loop.recipe, export_dtype(self.loop.model)
        grid, group_size, fused = recipe.grid, recipe.group_size, recipe.kernels == "auto"
        hessian = hessians.pop(path, None)
        if not len(weight):
            codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
            scales = torch.empty(0, weight.shape[1] // group_size, dtype=scale_dtype, device=weight.device)
            return GPTQResult(QuantizedWeight(codes, scales), recipe.initializer)
        if recipe.initializer == "rtn":
            rounded = round_to_nearest(weight, grid, group_size, scale_dtype, recipe.signed_scales, fused)
            return GPTQResult(rounded, "rtn")
        # A linear that was never called has no Hessian; an empty one says so.
        hessian = hessian or Hessian(unit.full_name(path), weight.shape[1], weight.device)
        shared = any(other is hessian for other in hessians.values())
        return gptq(
            weight, hessian, grid, group_size, scale_dtype, recipe.signed_scales, recipe.damping, fused, keep=shared
        )

    @torch.no_grad()
    def _place(self, unit: Unit, weights: dict[str, QuantizedWeight]) -> None:
        for path, linear in unit.linears.items():
            linear.weight.copy_(weights[unit.full_name(path)].to(linear.weight.device).dequantize())
            linear.weight.grad = None
