"""Embedding and head, the matrices around the blocks: which of them a recipe quantizes, and how.

The embedding is rounded to nearest: a lookup has no inputs to weigh errors by. The head is solved by GPTQ on what the
quantized model's last norm gives it. Neither is refined. Rows do not depend on each other, so a few thousand go
through the device at a time, shared by the ranks: of 248,320 x 5120 weights the device never holds more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from gsq_module import ranks
from gsq_module.export.packing import OuterPart
from gsq_module.memory.sizes import ROW_CHUNK_WEIGHTS
from gsq_module.module import GSQModule
from gsq_module.quantization.gptq import check_weight, factorize, solve
from gsq_module.quantization.grid import OUTER_GRIDS, QuantizedWeight
from gsq_module.quantization.hessian import Hessian
from gsq_module.quantization.scales import round_to_nearest
from gsq_module.streaming.model import StreamedModel
from gsq_module.unit_shards import UnitResult, UnitShards

GROUP_SIZES = (128, 64, 32)
"""Of `outer_group_size: null`: the first that divides the hidden size."""


def group_size_of(model: StreamedModel, recipe: GSQModule) -> int:
    """Input columns that share a scale in embedding and head."""
    fitting = [size for size in GROUP_SIZES if model.hidden_size % size == 0]
    return recipe.outer_group_size or next(iter(fitting), GROUP_SIZES[-1])


def outer_parts(model: StreamedModel, recipe: GSQModule) -> list[OuterPart]:
    """What of embedding and head the recipe quantizes, from the geometry alone."""
    group_size = group_size_of(model, recipe)
    parts = []
    if recipe.embedding_bits is not None:
        shape = (model.embedding.num_embeddings, model.hidden_size)
        copy = model.head_path if model.is_tied else None
        grid = OUTER_GRIDS[recipe.embedding_bits]
        parts.append(OuterPart("embedding", model.embedding_path, copy, grid, group_size, shape))
    if recipe.head_bits is not None and model.head_path is not None and not model.is_tied:
        rows, columns = model.model.get_output_embeddings().weight.shape
        grid = OUTER_GRIDS[recipe.head_bits]
        parts.append(OuterPart("head", model.head_path, None, grid, group_size, (rows, columns)))
    return parts


def check_outer(model: StreamedModel, recipe: GSQModule) -> list[str]:
    """What of the recipe's keys for embedding and head this model refuses; empty when they fit."""
    problems: list[str] = []
    if recipe.embedding_bits is None and recipe.head_bits is None:
        return problems
    group_size = group_size_of(model, recipe)
    if model.hidden_size % group_size:
        problems.append(
            f"model.outer_group_size={recipe.outer_group_size} does not divide the hidden size {model.hidden_size}, "
            "the width of embedding and head: choose one that does (32, 64 and 128 are common), or leave out "
            "model.embedding_bits and model.head_bits"
        )
    if model.is_tied and recipe.head_bits not in (None, recipe.embedding_bits):
        problems.append(
            f"model.head_bits={recipe.head_bits} with model.embedding_bits={recipe.embedding_bits}: this model's head "
            "is its embedding, which is quantized once, by model.embedding_bits. Leave out model.head_bits, and set "
            f"--model.embedding_bits {recipe.embedding_bits or recipe.head_bits}"
        )
    if model.head_path is None and recipe.head_bits is not None:
        problems.append(f"model.head_bits={recipe.head_bits}: {type(model.model).__name__} has no head to quantize")
    return problems


class OuterShard(UnitShards):
    """The finished embedding or head of a run, beside its units: `embedding.safetensors`, `head.safetensors`."""

    def _file(self, block: int, unit: str) -> Path:
        return self.directory / f"{unit}.safetensors"


class OuterQuantizer:
    """Quantizes embedding and head into a run's shards; what is there already is not done again.

    Args:
        model: The streamed model.
        recipe: The module, for its settings.
        shards: Of the run's units; embedding and head go beside them.
    """

    def __init__(self, model: StreamedModel, recipe: GSQModule, shards: UnitShards) -> None:
        self.model, self.recipe = model, recipe
        self.parts = {part.kind: part for part in outer_parts(model, recipe)}
        self._shards = {kind: OuterShard(shards.directory, part.grid) for kind, part in self.parts.items()}

    def result(self, kind: str) -> UnitResult | None:
        """What became of `embedding` or `head`; None where it is not finished."""
        return self._shards[kind].result(0, kind)

    def results(self) -> list[UnitResult]:
        """Of those that are finished."""
        return [result for kind in self.parts if (result := self.result(kind)) is not None]

    def is_open(self, kind: str) -> bool:
        """Whether a part is asked for and not finished."""
        return kind in self.parts and self.result(kind) is None

    @property
    def needs_stream(self) -> bool:
        """Whether the head waits for the quantized stream's end."""
        return self.is_open("head") and self.recipe.initializer == "gptq"

    def weights(self, of_blocks: Mapping[str, QuantizedWeight]) -> Mapping[str, QuantizedWeight]:
        """Hard weights by module path: those of the blocks, and those of the finished parts, read when asked for."""
        finished = {self.parts[kind].module: kind for kind in self.parts if not self.is_open(kind)}
        return _WithOuter(of_blocks, finished, self._load)

    def _load(self, kind: str) -> QuantizedWeight:
        found = self._shards[kind].load(0, kind)
        assert found is not None, f"the shard of the {kind} is gone"
        return found[1][self.parts[kind].module]

    @torch.no_grad()
    def round(self, kind: str) -> None:
        """Round a part to nearest; its error is that of its weights."""
        self._quantize(kind, lambda weight: (self._rounded(kind, weight), None), None)

    @torch.no_grad()
    def solve_head(self, hessian: Hessian) -> None:
        """Quantize the head by GPTQ; its error is that of its output. A row that rounding serves better keeps that.

        Args:
            hessian: Of the head's inputs, on all ranks together.
        """
        factor, note = factorize(hessian, self.recipe.damping)
        moment = hessian.matrix.float()
        part, scale_dtype = self.parts["head"], self.model.checkpoint.dtype()
        signed, fused = self.recipe.signed_scales, self.recipe.kernels == "auto"

        def both(weight: Tensor) -> tuple[QuantizedWeight, QuantizedWeight | None]:
            rounded = self._rounded("head", weight)
            if factor is None:
                return rounded, None
            return rounded, solve(weight, factor, part.grid, part.group_size, scale_dtype, signed, fused)

        self._quantize("head", both, moment, note)

    def _rounded(self, kind: str, weight: Tensor) -> QuantizedWeight:
        part, recipe = self.parts[kind], self.recipe
        scale_dtype = self.model.checkpoint.dtype()
        signed, fused = recipe.signed_scales, recipe.kernels == "auto"
        return round_to_nearest(weight, part.grid, part.group_size, scale_dtype, signed, fused)

    def _quantize(
        self,
        kind: str,
        quantize: Callable[[Tensor], tuple[QuantizedWeight, QuantizedWeight | None]],
        moment: Tensor | None,
        note: str = "",
    ) -> None:
        """Quantize chunk by chunk, and save.

        Args:
            kind: Of the part.
            quantize: Rows on the device -> rounded ones, and solved ones if there are any.
            moment: Second moment of the inputs, by which errors are weighed; None for those of the weights.
        """
        part, began = self.parts[kind], time.perf_counter()
        rows, columns = part.shape
        first, name = ranks.is_first(), f"{part.module}.weight"
        codes = torch.empty(rows if first else 0, columns, dtype=torch.int8)
        scales = torch.empty(len(codes), columns // part.group_size, dtype=self.model.checkpoint.dtype())
        # of squares: the weights' own, and the errors of the rounded and of the kept rows
        sums = torch.zeros(3, dtype=torch.float64, device=self.model.device)
        for begin, end in self._chunks(rows, columns):
            share = ranks.row_share(end - begin)
            if share.start < share.stop:
                weight = self.model.checkpoint.rows(name, begin + share.start, begin + share.stop)
                kept = self._keep_better(part, weight.to(self.model.device), quantize, moment, sums)
            else:
                kept = self._empty(part)
            whole_codes = ranks.gather_rows(kept.codes, end - begin)
            whole_scales = ranks.gather_rows(kept.scales, end - begin)
            if first:
                codes[begin:end].copy_(whole_codes)
                scales[begin:end].copy_(whole_scales)
        power, initial, final = ranks.all_reduce_(sums).tolist()
        result = UnitResult(
            block=-1 if kind == "embedding" else self.model.num_blocks,
            unit=kind,
            name=part.module,
            initial_error=initial / power if power else 0.0,
            refined_error=final / power if power else 0.0,
            kept="refined" if final < initial else "initial",
            seconds=time.perf_counter() - began,
            notes={part.module: note} if note else {},
        )
        ranks.from_first(partial(self._shards[kind].save, result, {part.module: QuantizedWeight(codes, scales)}))

    def _keep_better(
        self,
        part: OuterPart,
        weight: Tensor,
        quantize: Callable[[Tensor], tuple[QuantizedWeight, QuantizedWeight | None]],
        moment: Tensor | None,
        sums: Tensor,
    ) -> QuantizedWeight:
        """Of each row the quantization with the smaller error; adds to the sums."""

        def squares(matrix: Tensor) -> Tensor:
            """Of each row, weighed. Summed in float32: in float64 the whole chunk would be copied."""
            return (matrix if moment is None else matrix @ moment).mul_(matrix).sum(1).double()

        check_weight(part.module, weight)
        rounded, solved = quantize(weight)
        weight = weight.float()
        errors = squares(rounded.dequantize().float().sub_(weight))
        sums += torch.stack([squares(weight.clone()).sum(), errors.sum(), errors.sum()])
        if solved is None:
            return rounded
        others = squares(solved.dequantize().float().sub_(weight))
        better = (others < errors).unsqueeze(1)
        sums[2] += torch.minimum(others, errors).sum() - errors.sum()
        return QuantizedWeight(
            torch.where(better, solved.codes, rounded.codes), torch.where(better, solved.scales, rounded.scales)
        )

    def _empty(self, part: OuterPart) -> QuantizedWeight:
        codes = torch.empty(0, part.shape[1], dtype=torch.int8, device=self.model.device)
        scales = torch.empty(0, part.shape[1] // part.group_size, dtype=self.model.checkpoint.dtype())
        return QuantizedWeight(codes, scales.to(self.model.device))

    @staticmethod
    def _chunks(rows: int, columns: int) -> Iterator[tuple[int, int]]:
        """Row ranges that all ranks go through together."""
        step = max(1, ROW_CHUNK_WEIGHTS // columns) * ranks.world_size()
        for begin in range(0, rows, step):
            yield begin, min(begin + step, rows)


class _WithOuter(Mapping[str, QuantizedWeight]):
    """A mapping of weights with some more, which are read when they are asked for."""

    def __init__(
        self,
        of_blocks: Mapping[str, QuantizedWeight],
        kinds: Mapping[str, str],
        load: Callable[[str], QuantizedWeight],
    ) -> None:
        self._of_blocks, self._kinds, self._load = of_blocks, kinds, load

    def __getitem__(self, name: str) -> QuantizedWeight:
        return self._load(self._kinds[name]) if name in self._kinds else self._of_blocks[name]

    def __contains__(self, name: object) -> bool:
        return name in self._kinds or name in self._of_blocks

    def __iter__(self) -> Iterator[str]:
        yield from self._of_blocks
        yield from self._kinds

    def __len__(self) -> int:
        return len(self._of_blocks) + len(self._kinds)
