"""What a recipe comes to on a model: blocks, units, stores of hidden states, and the dtypes of what is kept."""

from __future__ import annotations

import torch

from gsq_module.module import GSQModule
from gsq_module.streaming.model import StreamedModel
from gsq_module.streaming.units import Unit, find_unit


def store_dtype(model: StreamedModel) -> torch.dtype:
    """Of stored hidden states: the checkpoint's where blocks are computed in a higher precision (float32 on a CPU)."""
    return model.checkpoint.dtype() if model.dtype == torch.float32 else model.dtype


def hidden_bytes(model: StreamedModel, tokens: int) -> int:
    """Bytes of the stored hidden states of so many tokens."""
    return tokens * model.hidden_size * (torch.finfo(store_dtype(model)).bits // 8)


def count_stores(recipe: GSQModule, target: str) -> int:
    """Stores of hidden states that the loop has open at once, at most."""
    count = 3 if recipe.targets == "cached" else 2
    if target == "original_stream":
        # The last unit's goal is the original stream after the block; each unit before it needs one of its own.
        count += len(recipe.units)
    return count


def count_blocks(model: StreamedModel, recipe: GSQModule) -> int:
    """How many blocks the recipe quantizes."""
    return min(recipe.num_blocks or model.num_blocks, model.num_blocks)


def kinds_of_blocks(model: StreamedModel, count: int) -> list[list[int]]:
    """The first `count` blocks by kind: those with equal names and shapes of their weights are of a kind."""
    kinds: dict[tuple, list[int]] = {}
    for index in range(count):
        shapes = tuple((name, tuple(value.shape)) for name, value in model.blocks[index].named_parameters())
        kinds.setdefault(shapes, []).append(index)
    return list(kinds.values())


def find_units(model: StreamedModel, index: int, recipe: GSQModule) -> list[Unit]:
    """The units of a block that the recipe quantizes, in its order."""
    return [find_unit(model.blocks[index], model.block_name(index), kind, recipe.ignore) for kind in recipe.units]


def export_dtype(model: StreamedModel) -> torch.dtype:
    """Dtype of the scales: the checkpoint's own, so that hard weights are what consumers compute."""
    return model.checkpoint.dtype()
