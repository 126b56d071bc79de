"""Weights of modules of a tree on the meta device: loaded from the checkpoint when they are needed, and dropped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from gsq_module.memory.sizes import PLACED_ROWS
from gsq_module.problems import UserError
from gsq_module.quantization.grid import QuantizedWeight
from gsq_module.streaming.activations import batches
from gsq_module.streaming.checkpoint import Checkpoint


class ModuleWeights:
    """Puts the weights of modules on the device, and takes them away again.

    Args:
        model: The module tree on the meta device.
        checkpoint: Its weights.
        device: Where modules go.
        dtype: Floating dtype they are computed in.
        shared: Of modules that have no weight of their own in the checkpoint: path of the module that has it.
    """

    def __init__(
        self, model: Any, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, shared: Mapping[str, str]
    ) -> None:
        self.model = model
        self.checkpoint = checkpoint
        self.device = device
        self.dtype = dtype
        self.shared = shared

    def _sources(self, path: str) -> dict[str, str]:
        """The checkpoint's name of each parameter and stored buffer of a module, by its name below the module."""
        if path in self.shared:
            return {"weight": f"{self.shared[path]}.weight"}
        module = self.model.get_submodule(path)
        names = [name for name, _ in module.named_parameters()]
        names += [
            f"{prefix}.{name}" if prefix else name
            for prefix, part in module.named_modules()
            for name in part._buffers.keys() - part._non_persistent_buffers_set
        ]
        return {name: f"{path}.{name}" for name in names}

    def missing(self, paths: Iterable[str]) -> list[str]:
        """What these modules need and the checkpoint lacks: from names alone, nothing is read."""
        return [source for path in paths for source in self._sources(path).values() if source not in self.checkpoint]

    def load(self, path: str) -> nn.Module:
        """Put one module's weights on the device.

        Raises:
            ValueError: The checkpoint lacks some of them; they are listed.
        """
        module = self.model.get_submodule(path)
        self._fill_buffers(module)
        missing = self.missing([path])
        if missing:
            raise UserError(f"{self.checkpoint.directory} lacks weights of {path}: {', '.join(missing)}")
        sources = self._sources(path)
        tensors = self.checkpoint.tensors(sources.values())
        for name, source in sources.items():
            owner = module.get_submodule(name.rpartition(".")[0])
            value = tensors[source]
            value = value.to(self.device, self.dtype if value.is_floating_point() else None)
            leaf = name.rpartition(".")[2]
            if leaf in owner._parameters:
                owner._parameters[leaf] = nn.Parameter(value, requires_grad=False)
            else:
                owner._buffers[leaf] = value
        return module

    def load_one_row(self, path: str) -> None:
        """Zeros for an embedding that is looked up, but not looked at: one row in memory stands for all.

        Of 250,000 tokens it would take gigabytes.
        """
        embedding = self.model.get_submodule(path)
        self._fill_buffers(embedding)
        row = torch.zeros(1, embedding.embedding_dim, device=self.device, dtype=self.dtype)
        embedding.weight = nn.Parameter(row.expand(embedding.num_embeddings, -1), requires_grad=False)

    def drop(self, path: str) -> None:
        """Put a module's weights and buffers back on the meta device (`Module.to` cannot, under FakeTensorMode)."""
        for part in self.model.get_submodule(path).modules():
            for name, parameter in part._parameters.items():
                if parameter is not None and not parameter.is_meta:
                    empty = torch.empty_like(parameter, device="meta")
                    part._parameters[name] = nn.Parameter(empty, requires_grad=False)
            for name, buffer in part._buffers.items():
                if buffer is not None and not buffer.is_meta:
                    part._buffers[name] = torch.empty_like(buffer, device="meta")

    @contextmanager
    def some_rows(self, path: str, rows: slice, weights: Mapping[str, QuantizedWeight]) -> Iterator[None]:
        """Inside, a linear layer has these rows of its weight and bias alone, and so as many outputs.

        Args:
            path: Of the linear.
            rows: Consecutive rows.
            weights: Hard weights by module path, as in `place`.
        """
        module = self.model.get_submodule(path)
        whole = dict(module._parameters)
        try:
            for name, source in self._sources(path).items():
                value = self.checkpoint.rows(source, rows.start, rows.stop).to(self.device, self.dtype)
                module._parameters[name] = nn.Parameter(value, requires_grad=False)
            self.place(path, weights, rows.start)
            yield
        finally:
            module._parameters.update(whole)

    @torch.no_grad()
    def place(self, path: str, weights: Mapping[str, QuantizedWeight], first: int = 0) -> None:
        """Put hard weights into a loaded embedding or head, where there are any for it; `first` is its first row."""
        name = self.shared.get(path, path)
        if name not in weights:
            return
        target, weight = self.model.get_submodule(path).weight, weights[name]
        for rows in batches(len(target), PLACED_ROWS):
            there = slice(first + rows.start, first + rows.stop)
            part = QuantizedWeight(weight.codes[there], weight.scales[there])
            target[rows].copy_(part.to(self.device).dequantize())

    def _fill_buffers(self, module: nn.Module) -> None:
        """Compute the buffers that no checkpoint holds (rotary frequencies, scales) by the model's own code."""
        for part in module.modules():
            computed = [name for name in part._non_persistent_buffers_set if part._buffers.get(name) is not None]
            if not computed:
                continue
            for name in computed:
                part._buffers[name] = torch.empty_like(part._buffers[name], device=self.device)  # type: ignore[arg-type]
            with torch.no_grad(), torch.device(self.device):
                self.model._init_weights(part)
