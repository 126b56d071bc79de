"""A decoder-only transformers model of which one block at a time is in memory.

The module tree lives on the meta device. The model's own `forward` runs with its blocks short-circuited: that yields
the hidden states before the first block, the exact call of every block, and the logits after the last one, for any
family, without a class for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gsq_module.memory.sizes import PLACED_ROWS
from gsq_module.quantization.grid import QuantizedWeight
from gsq_module.streaming.activations import ActivationStore, batches
from gsq_module.streaming.calls import BlockCall
from gsq_module.streaming.checkpoint import Checkpoint
from gsq_module.streaming.tree import find_blocks, meta_model


class _StopForwardError(Exception):
    """Ends a forward pass whose rest is not needed."""


class StreamedModel:
    """Blocks, embedding and head of a checkpoint, each loaded when asked for.

    Args:
        model: The module tree on the meta device: a PreTrainedModel, or what is built like one.
        checkpoint: Its weights.
        device: Where blocks go.
        dtype: Floating dtype they are computed in.

    Raises:
        ValueError: No list of blocks is found; the candidates are listed.
    """

    def __init__(self, model: Any, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        self.model = model.eval()
        self.checkpoint = checkpoint
        self.device = device
        self.dtype = dtype
        self.blocks_path = find_blocks(model)
        self.blocks: nn.ModuleList = self.model.get_submodule(self.blocks_path)
        self.embedding: nn.Embedding = self.model.get_input_embeddings()
        names = {id(module): name for name, module in self.model.named_modules()}
        self.embedding_path = names[id(self.embedding)]
        head = self.model.get_output_embeddings()
        self.head_path = names.get(id(head))
        # Building the tree has tied them where the config says so.
        self._shares_embedding = head is not None and head.weight is self.embedding.weight
        self._returns_tuple = False

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> StreamedModel:
        """Build the module tree of a checkpoint folder from its config.json alone."""
        return cls(meta_model(checkpoint.directory), checkpoint, device, dtype)

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def hidden_size(self) -> int:
        return self.embedding.embedding_dim

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def is_tied(self) -> bool:
        """Whether the head is the embedding: the config ties them, and the checkpoint holds one tensor for both."""
        return self._shares_embedding and f"{self.head_path}.weight" not in self.checkpoint

    def block_name(self, index: int) -> str:
        """Module path of a block, e.g. `model.layers.3`."""
        return f"{self.blocks_path}.{index}"

    # --- weights -------------------------------------------------------------------------------------------------

    def load_block(self, index: int) -> nn.Module:
        """Put one block's weights on the device.

        Raises:
            ValueError: The checkpoint lacks some of its weights; they are listed.
        """
        return self._load(self.block_name(index))

    def release_block(self, index: int) -> None:
        """Drop one block's weights."""
        _drop(self.blocks[index])

    @contextmanager
    def whole(self) -> Iterator[Any]:
        """Yields the model with all its weights on the device; they are dropped at the end."""
        blocks = [self.block_name(index) for index in range(self.num_blocks)]
        paths = [*blocks, *dict.fromkeys(self.paths_around_blocks(head=False) + self.paths_around_blocks(head=True))]
        try:
            for path in paths:
                self._load(path)
            yield self.model
        finally:
            for path in paths:
                _drop(self.model.get_submodule(path))

    def missing_weights(self) -> list[str]:
        """Weights that streaming needs and the checkpoint lacks: from names alone, nothing is read."""
        around = dict.fromkeys(self.paths_around_blocks(head=False) + self.paths_around_blocks(head=True))
        paths = [*(self.block_name(index) for index in range(self.num_blocks)), *around]
        return [source for path in paths for source in self._sources(path).values() if source not in self.checkpoint]

    def _sources(self, path: str) -> dict[str, str]:
        """The checkpoint's name of each parameter and stored buffer of a module, by its name below the module."""
        module = self.model.get_submodule(path)
        names = [name for name, _ in module.named_parameters()]
        names += [
            f"{prefix}.{name}" if prefix else name
            for prefix, part in module.named_modules()
            for name in part._buffers.keys() - part._non_persistent_buffers_set
        ]
        if path == self.head_path and self.is_tied:
            return {"weight": f"{self.embedding_path}.weight"}
        return {name: f"{path}.{name}" for name in names}

    def _load(self, path: str) -> nn.Module:
        module = self.model.get_submodule(path)
        self._fill_buffers(module)
        sources = self._sources(path)
        missing = [name for name in sources.values() if name not in self.checkpoint]
        if missing:
            raise ValueError(f"{self.checkpoint.directory} lacks weights of {path}: {', '.join(missing)}")
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

    def _weights_name(self, path: str | None) -> str | None:
        """The module path that hard weights of embedding or head are found by."""
        return self.embedding_path if path == self.head_path and self.is_tied else path

    def replaces_head(self, weights: Mapping[str, QuantizedWeight]) -> bool:
        """Whether `head` with these hard weights is another one than the checkpoint's."""
        return self._weights_name(self.head_path) in weights

    @torch.no_grad()
    def _place(self, path: str, weights: Mapping[str, QuantizedWeight]) -> None:
        """Put hard weights into the loaded embedding or head, where there are any for it."""
        name = self._weights_name(path)
        if name is None or name not in weights:
            return
        target, weight = self.model.get_submodule(path).weight, weights[name]
        for rows in batches(len(target), PLACED_ROWS):
            part = QuantizedWeight(weight.codes[rows], weight.scales[rows])
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

    def paths_around_blocks(self, head: bool) -> list[str]:
        """Modules that the model's forward needs besides its blocks: from tokens on, or for the head alone."""
        decoder_path = self.blocks_path.rpartition(".")[0]
        decoder = self.model.get_submodule(decoder_path)
        prefix = f"{decoder_path}." if decoder_path else ""
        paths = [prefix + name for name, child in decoder.named_children() if child is not self.blocks]
        paths = [path for path in paths if path != self.head_path]
        if head:
            paths = [path for path in paths if path != self.embedding_path]
            paths += [self.head_path] if self.head_path is not None else []
        return paths

    @contextmanager
    def _around_blocks(self, head: bool, embedding: bool = True, head_weight: bool = True):
        """Load what the model's forward needs besides its blocks; drop it again.

        Args:
            head: What the head needs, which is no embedding; otherwise what the way to the first block needs.
            embedding: Whether the embedding's values matter there.
            head_weight: Whether the head itself is called.
        """
        paths = self.paths_around_blocks(head)
        paths = [path for path in paths if head_weight or path != self.head_path]
        one_row = head or not embedding
        try:
            paths = [path for path in paths if path != self.embedding_path or not one_row]
            for path in paths:
                self._load(path)
            if one_row:
                # Looked up, but not looked at: one row stands for all. Of 250,000 tokens it would take gigabytes.
                self._fill_buffers(self.embedding)
                row = torch.zeros(1, self.hidden_size, device=self.device, dtype=self.dtype)
                self.embedding.weight = nn.Parameter(row.expand(self.embedding.num_embeddings, -1), requires_grad=False)
                paths.append(self.embedding_path)
            yield
        finally:
            for path in paths:
                _drop(self.model.get_submodule(path))

    # --- the model's own forward, blocks short-circuited -----------------------------------------------------------

    @contextmanager
    def _short_circuit(self, on_block):
        """Replace every block's forward by `on_block(index, args, kwargs) -> hidden`."""

        def replacement(index: int):
            def forward(*args: Any, **kwargs: Any) -> Any:
                hidden = on_block(index, args, kwargs)
                return (hidden,) if self._returns_tuple else hidden

            return forward

        try:
            for index, block in enumerate(self.blocks):
                block.forward = replacement(index)
            yield
        finally:
            for block in self.blocks:
                del block.forward

    def _forward(self, tokens: Tensor) -> Any:
        return self.model(input_ids=tokens, use_cache=False)

    @torch.no_grad()
    def record_calls(self, batch_size: int, seq_len: int) -> list[BlockCall]:
        """The call of every block for inputs `[batch_size, seq_len]` without padding.

        Raises:
            ValueError: A call depends on the tokens themselves (per-layer embeddings): blocks cannot be replayed alone.
        """
        vocabulary = self.embedding.num_embeddings
        tokens = torch.arange(batch_size * seq_len, device=self.device).view(batch_size, seq_len) % vocabulary
        with self._around_blocks(head=False):
            calls = self._record(tokens)
            others = self._record((tokens + 1) % vocabulary)
        for index, (call, other) in enumerate(zip(calls, others, strict=True)):
            for a, b in zip(call.tensors(), other.tensors(), strict=True):
                if a.shape != b.shape or not torch.equal(a, b):
                    raise ValueError(
                        f"{self.block_name(index)} is called with tensors that depend on the tokens "
                        "(per-layer embeddings?): its model cannot be streamed block by block"
                    )
        return calls

    @torch.no_grad()
    def record_shapes(self, tokens: Tensor) -> list[BlockCall]:
        """The call of every block for inputs of this shape; the embedding is not read, and nothing is checked."""
        with self._around_blocks(head=False, embedding=False):
            return self._record(tokens)

    def _record(self, tokens: Tensor) -> list[BlockCall]:
        for self._returns_tuple in (False, True):
            calls: list[BlockCall] = []
            passed: list[Tensor] = []

            def on_block(index: int, args, kwargs, calls=calls, passed=passed) -> Tensor:
                call, hidden = BlockCall.record(args, kwargs)
                if passed and hidden is not passed[-1]:
                    raise _StopForwardError  # the model took something else of our result: it expects the other form
                calls.append(call)
                passed.append(hidden)
                if index == self.num_blocks - 1:
                    raise _StopForwardError
                return hidden

            with self._short_circuit(on_block):
                try:
                    self._forward(tokens)
                except _StopForwardError:
                    if len(calls) == self.num_blocks:
                        return calls
        raise ValueError(
            f"the blocks of {self.blocks_path} do not pass their hidden states on one to the next "
            f"(stopped at block {len(calls)} of {self.num_blocks})"
        )

    @torch.no_grad()
    def embed(
        self,
        tokens: Tensor,
        into: ActivationStore,
        batch_size: int,
        quantized: Mapping[str, QuantizedWeight] | None = None,
    ) -> None:
        """Hidden states before the first block.

        Args:
            tokens: int64 `[num_samples, seq_len]` in host memory.
            into: Store of as many samples.
            batch_size: Samples at a time.
            quantized: Hard weights by module path; that of the embedding stands in for the checkpoint's.
        """
        caught: list[Tensor] = []

        def on_block(index: int, args, kwargs) -> Tensor:
            caught.append(BlockCall.record(args, kwargs)[1])
            raise _StopForwardError

        with self._around_blocks(head=False), self._short_circuit(on_block):
            self._place(self.embedding_path, quantized or {})
            for rows in batches(len(tokens), batch_size):
                try:
                    self._forward(tokens[rows].to(self.device))
                except _StopForwardError:
                    into.write(rows, caught.pop())

    @contextmanager
    def head(self, quantized: Mapping[str, QuantizedWeight] | None = None):
        """Yields a function from hidden states after the last block `[batch, length, hidden]` to float32 logits.

        Args:
            quantized: Hard weights by module path; that of the head stands in for the checkpoint's.
        """

        @torch.no_grad()
        def logits(hidden: Tensor) -> Tensor:
            def on_block(index: int, args, kwargs) -> Tensor:
                return hidden

            # Norm and head see each position alone, so any token may stand for the input.
            tokens = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=self.device)
            with self._short_circuit(on_block):
                return self._forward(tokens).logits.float()

        with self._around_blocks(head=True):
            if self.head_path is not None:
                self._place(self.head_path, quantized or {})
            yield logits

    @contextmanager
    def head_inputs(self) -> Iterator[Callable[[Tensor], Tensor]]:
        """Yields a function from hidden states after the last block to what the head is given: the last norm's output.

        Both `[batch, length, hidden]`. The head's own weight is not loaded.
        """
        caught: list[Tensor] = []

        def before_head(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            caught.append(args[0])
            raise _StopForwardError

        @torch.no_grad()
        def inputs(hidden: Tensor) -> Tensor:
            tokens = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=self.device)
            with self._short_circuit(lambda index, args, kwargs: hidden):
                try:
                    self._forward(tokens)
                except _StopForwardError:
                    return caught.pop()
            raise AssertionError(f"{self.head_path} was not called")

        with self._around_blocks(head=True, head_weight=False):
            handle = self.model.get_output_embeddings().register_forward_pre_hook(before_head)
            try:
                yield inputs
            finally:
                handle.remove()


def _drop(module: nn.Module) -> None:
    """Put a module's weights and buffers back on the meta device (`Module.to` cannot, under FakeTensorMode)."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and not parameter.is_meta:
                part._parameters[name] = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
        for name, buffer in part._buffers.items():
            if buffer is not None and not buffer.is_meta:
                part._buffers[name] = torch.empty_like(buffer, device="meta")
