"""The samples' passes through one block: the streams go on, and each unit gets what it is fitted on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, is_tensor, nn

from gsq_module import ranks
from gsq_module.data.samples import Samples
from gsq_module.module import GSQModule
from gsq_module.problems import NumericalError
from gsq_module.quantization.hessian import Hessian, numerical_advice
from gsq_module.streaming.activations import ActivationStore, Stores
from gsq_module.streaming.calls import BlockCall
from gsq_module.streaming.model import StreamedModel
from gsq_module.streaming.staging import Staging
from gsq_module.streaming.units import (
    Branch,
    Unit,
    catch,
    catch_sums,
    hooks,
    trace_units,
)
from gsq_module.unit_targets import OriginalTargets, Prepare, StreamTargets, cached_targets, stream_target

MASSIVE_SHARE = 0.5
"""Part of a target's power on one token of each sequence from which on that token decides the fit (SmolLM2: 0.98)."""
SHORT = 8
"""Tokens of a sequence up to which one of them is a large part anyway."""
MASSIVE_NOTE = (
    "more than half of its target lies on one token of each sequence (massive activations): the fit follows that token."
    " Next: --model.token_weights inverse_square weighs all tokens alike (another --run_dir)"
)


@dataclass
class Captured:
    """What one unit is fitted on.

    Attributes:
        sources: Stores of which the loaders yield rows: inputs and targets, or what they are recomputed from, and the
            weights of the tokens' errors where these differ.
        power: Mean square of the training targets, each token with its weight; of the validation rows' where nothing is
            trained.
        note: That a token of each sequence outweighs all others; empty in the ordinary case.
    """

    sources: list[ActivationStore]
    power: float
    note: str = ""


@dataclass
class BlockPasses:
    """Passes of the samples through one loaded block, `batch_size` at a time.

    Attributes:
        recipe: The module, for its settings.
        model: The streamed model.
        index: Of the block.
        block: The loaded block.
        calls: How the model calls the block, by batch size.
        samples: Calibration rows of this rank.
        batch_size: Samples that go through the block at once.
        stores: Hidden states: the `quantized` and the `original` stream, and what the passes leave for a unit.
        staging: Brings hidden states to the device and back.
        target: As the recipe's key.
    """

    recipe: GSQModule
    model: StreamedModel
    index: int
    block: nn.Module
    calls: dict[int, BlockCall]
    samples: Samples
    batch_size: int
    stores: Stores
    staging: Staging
    target: str

    @torch.no_grad()
    def propagate(self, *parts: range) -> None:
        """Pass the quantized stream through the quantized block: all samples, or these parts of them."""
        with self.staging.writer() as writer:
            for rows, hidden in self._read("quantized", *parts):
                writer.write(self.stores["quantized"].data, rows, self._call(hidden)(self.block, hidden))

    @torch.no_grad()
    def advance_original(self, units: Sequence[Unit]) -> None:
        """Pass the original stream through the untouched block; keep what each unit should bring the stream to.

        Args:
            units: Units of the block that are still to be quantized together with it; they are traced. Empty where no
                goals are needed.
        """
        if units:
            hidden = self._hidden("original", next(self._batches(*self.samples.fitted)))
            trace_units(self.block, self._call(hidden), hidden, units)
        with self.staging.writer() as writer:
            for rows, hidden in self._read("original", *self.samples.fitted):
                result, sums = catch_sums(self.block, self._call(hidden), hidden, units)
                for unit, total in zip(units, sums, strict=True):
                    if not unit.ends_block:
                        writer.write(self._goal(unit).data, rows, total)
                writer.write(self.stores["original"].data, rows, result)

    @torch.no_grad()
    def capture(self, unit: Unit) -> Captured:
        """Fill the stores that the unit is fitted on."""
        from_stream, samples = self.target == "original_stream", self.samples
        kept = ["residual"] if from_stream else ["inputs"]
        if self.recipe.targets == "cached":
            kept = ["inputs", "targets"]
        sources = [self.stores[name] for name in kept]
        goals = [self._goal(unit)] if from_stream else []
        weights = self._token_weights() if from_stream and self.recipe.token_weights == "inverse_square" else None
        # Means of squares, rows, and what the largest token of each row has of the first.
        power = torch.zeros(3, dtype=torch.float64, device=self.model.device)
        with self.staging.writer() as writer:
            for rows, hidden, *goal in self._read("quantized", *samples.fitted, others=goals):
                caught = catch(self.block, self._call(hidden), hidden, unit, with_branch=not from_stream)
                target = stream_target(caught.residual, *goal) if from_stream else caught.branch
                assert target is not None
                values = {"inputs": caught.inputs, "residual": caught.residual, "targets": target}
                for name, store in zip(kept, sources, strict=True):
                    writer.write(store.data, rows, values[name])
                squares = target.float().square().mean(-1)
                if weights is not None:
                    mean_square = goal[0].float().square().mean(-1)
                    importance = mean_square.clamp_(min=torch.finfo(torch.float32).tiny).reciprocal()
                    writer.write(weights.data, rows, importance)
                    squares *= importance
                if rows.start in samples.train or not samples.train:
                    power[0] += squares.double().mean() * len(target)
                    power[1] += len(target)
                    power[2] += squares.amax(-1).double().sum() / squares.shape[-1]
        squares, count, largest = ranks.all_reduce_(power)
        mean = float(squares / count)
        if not mean < float("inf"):
            raise NumericalError(
                f"{unit.name}: its target is not finite (mean square {mean}): {numerical_advice(self.model.dtype)}"
            )
        if self.recipe.targets == "recomputed":
            sources += goals
        if weights is not None:
            sources.append(weights)
        massive = (
            from_stream
            and bool(samples.train)
            and samples.tokens.shape[1] > SHORT
            and float(largest / squares) > MASSIVE_SHARE
        )
        note = MASSIVE_NOTE if massive and weights is None else ""
        return Captured(sources, max(mean, torch.finfo(torch.float32).tiny), note)

    @torch.no_grad()
    def student(self, unit: Unit, sizes: set[int]) -> Branch:
        """The unit as a module of its own, for microbatches of these sizes."""
        return Branch(unit, {size: self.unit_call(unit, size) for size in sizes})

    @torch.no_grad()
    def unit_call(self, unit: Unit, size: int) -> BlockCall:
        """How the block calls the unit for a microbatch of this size."""
        if size not in self.calls:
            self.calls[size] = self.model.record_calls(size, self.samples.tokens.shape[1])[self.index]
        # Rows may repeat: only the shapes matter here.
        hidden = self._hidden("quantized", [row % len(self.samples.tokens) for row in range(size)])
        call = catch(self.block, self.calls[size], hidden, unit, with_branch=False).call
        assert call is not None
        return call

    def prepare(self, unit: Unit, student: Branch) -> Prepare:
        """What makes inputs and targets of a microbatch of the captured sources."""
        if self.recipe.targets == "cached":
            return cached_targets
        if self.target == "original_stream":
            return StreamTargets(unit, self.model.dtype)
        return OriginalTargets(unit, student.calls, self.model.dtype)

    @torch.no_grad()
    def hessians(self, unit: Unit) -> dict[str, Hessian]:
        """Hessians of the unit's linears by path, of all ranks; linears that are given the same tensor share one."""
        hessians: dict[str, Hessian] = {}
        leader: dict[str, str] = {}
        seen: dict[str, Tensor] = {}

        def watch(path: str, linear: nn.Linear):
            def before(module: nn.Module, args: tuple[Tensor, ...]) -> None:
                first = leader.setdefault(path, next((p for p, given in seen.items() if given is args[0]), path))
                seen[path] = args[0]
                if first == path:
                    if path not in hessians:
                        hessians[path] = self._hessian(unit, path)
                    hessians[path].add(args[0])

            return before

        with hooks([linear.register_forward_pre_hook(watch(path, linear)) for path, linear in unit.linears.items()]):
            for _, hidden in self._read("quantized", self.samples.gptq):
                seen.clear()
                catch(self.block, self._call(hidden), hidden, unit, with_branch=True)
        return self._reduced(unit, leader, hessians)

    def _reduced(self, unit: Unit, leader: dict[str, str], hessians: dict[str, Hessian]) -> dict[str, Hessian]:
        """The sums over all ranks, by path. A linear may have been called on some ranks only."""
        for others in ranks.gather(leader):
            leader = others | leader
        for first in sorted(set(leader.values())):
            if first not in hessians:
                hessians[first] = self._hessian(unit, first)
            _reduce(hessians[first])
        return {path: hessians[first] for path, first in leader.items()}

    def _hessian(self, unit: Unit, path: str) -> Hessian:
        return _new_hessian(unit.full_name(path), unit.linears[path].in_features, self.model)

    def _batches(self, *parts: range) -> Iterator[slice]:
        return self.samples.batches(*parts, size=self.batch_size)

    def _read(self, name: str, *parts: range, others: Sequence[ActivationStore] = ()) -> Iterator[tuple[Any, ...]]:
        """Rows, hidden states of a stream in the dtype of the block, and those of other stores as stored."""
        sources = [self.stores[name].data, *(store.data for store in others)]
        for rows, (hidden, *rest) in self.staging.read(sources, self._batches(*parts)):
            yield rows, hidden.to(self.model.dtype), *rest

    def _hidden(self, name: str, rows: slice | list[int]) -> Tensor:
        return self.stores[name].read(rows, self.model.device, self.model.dtype)

    def _call(self, hidden: Tensor) -> BlockCall:
        return self.calls[hidden.shape[0]]

    def _goal(self, unit: Unit) -> ActivationStore:
        """Where the original stream stands after a unit."""
        return self.stores["original" if unit.ends_block else f"goal_{unit.kind}"]

    def _token_weights(self) -> ActivationStore:
        """Float32 `[num_samples, seq_len]`, beside the hidden states, but never in a file: it is small."""
        place = self.stores["quantized"].device
        return ActivationStore(tuple(self.samples.tokens.shape), torch.float32, "device", place, Path())


def _new_hessian(name: str, in_features: int, model: StreamedModel) -> Hessian:
    dtype = torch.float64 if model.dtype == torch.float64 else torch.float32
    return Hessian(name, in_features, model.device, dtype)


def _reduce(hessian: Hessian) -> None:
    """Make it that of all ranks."""
    ranks.all_reduce_(hessian.matrix)
    hessian.merge(ranks.gather(hessian.summary()))


@torch.no_grad()
def head_hessian(
    model: StreamedModel, samples: Samples, batch_size: int, store: ActivationStore, staging: Staging
) -> Hessian:
    """Hessian of the head's inputs on the GPTQ samples of all ranks.

    Args:
        store: Hidden states after the last block.
    """
    assert model.head_path is not None
    hessian = _new_hessian(model.head_path, model.hidden_size, model)
    with model.head_inputs() as inputs:
        for _, (hidden,) in staging.read([store.data], samples.batches(samples.gptq, size=batch_size)):
            hessian.add(inputs(hidden.to(model.dtype)))
    _reduce(hessian)
    return hessian


def record_calls(model: StreamedModel, sizes: set[int], seq_len: int) -> dict[int, list[BlockCall]]:
    """How the model calls each block, by batch size. Sizes share what they agree in: masks of long rows are large."""
    recorded: dict[int, list[BlockCall]] = {}
    largest: list[BlockCall] = []
    for size in sorted(sizes, reverse=True):
        recorded[size] = model.record_calls(size, seq_len)
        largest = largest or recorded[size]
        for call, other in zip(recorded[size], largest, strict=True):
            call.args, call.kwargs = _shared(call.args, other.args), _shared(call.kwargs, other.kwargs)
    return recorded


def _shared(value: Any, other: Any) -> Any:
    """`value`, with tensors that equal the first rows of those of `other` replaced by views of them."""
    if type(value) is not type(other):
        return value
    if is_tensor(value):
        rows = other[: len(value)] if value.ndim and other.ndim else other
        same = value.dtype == rows.dtype and value.shape == rows.shape and torch.equal(value, rows)
        return rows if same else value
    if isinstance(value, dict):
        return {key: _shared(item, other.get(key)) for key, item in value.items()}
    if type(value) in (list, tuple) and len(value) == len(other):
        return type(value)(map(_shared, value, other))
    return value
