"""A checkpoint that is only a config.json: its weights are made up when they are asked for."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from gsq_module.streaming.checkpoint import Checkpoint
from gsq_module.streaming.tree import meta_model


class SyntheticCheckpoint(Checkpoint):
    """Random weights of a model's real geometry, for plans and rehearsals. Under FakeTensorMode they take no memory.

    Args:
        directory: Folder of the config.json.
        model: Its module tree on the meta device; made of the config.json where it is not given.
        device: Where they are made; a GPU makes billions of random numbers in the time a CPU takes for millions.
    """

    def __init__(
        self, directory: str | Path, model: nn.Module | None = None, device: str | torch.device = "cpu"
    ) -> None:
        self.directory = Path(directory)
        tree = model if model is not None else meta_model(self.directory)
        self._dtype = getattr(getattr(tree, "config", None), "dtype", None) or torch.bfloat16
        self._device = device
        self._shapes: dict[str, tuple[int, ...]] = {}
        seen: set[int] = set()
        for name, value in tree.state_dict(keep_vars=True).items():
            if id(value) not in seen:  # a tied head is no tensor of its own, as in real checkpoints
                self._shapes[name] = tuple(value.shape)
            seen.add(id(value))

    def names(self) -> list[str]:
        return list(self._shapes)

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def files(self) -> list[str]:
        return []

    def names_in(self, file: str) -> list[str]:
        return []

    def tensor(self, name: str) -> Tensor:
        """Normal numbers, small enough for hidden states of ordinary size; norms' weights are ones."""
        return self._random(self._shapes[name])

    def rows(self, name: str, begin: int, end: int) -> Tensor:
        rows, *others = self._shapes[name]
        return self._random((len(range(rows)[begin:end]), *others))

    def _random(self, shape: tuple[int, ...]) -> Tensor:
        if len(shape) < 2:
            return torch.ones(shape, dtype=self._dtype, device=self._device)
        return torch.empty(shape, dtype=self._dtype, device=self._device).normal_(std=0.02)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def tensors(self, names: Iterable[str]) -> dict[str, Tensor]:
        return {name: self.tensor(name) for name in names}

    def dtype(self) -> torch.dtype:
        return self._dtype
