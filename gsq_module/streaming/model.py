"""A decoder-only transformers model of which one block at a time is in memory.

The module tree lives on the meta device (module_weights.py loads parts of it). The model's own `forward` runs with its
blocks short-circuited (short_circuit.py): that yields the hidden states before the first block, the exact call of every
block, and the logits after the last one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gsq_module.problems import UserError
from gsq_module.quantization.grid import QuantizedWeight
from gsq_module.streaming.activations import ActivationStore, batches
from gsq_module.streaming.calls import BlockCall
from gsq_module.streaming.checkpoint import Checkpoint
from gsq_module.streaming.module_weights import ModuleWeights
from gsq_module.streaming.short_circuit import ShortCircuit
from gsq_module.streaming.tree import find_blocks, meta_model


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
        shared = {names[id(head)]: self.embedding_path} if self.is_tied else {}
        self._weights = ModuleWeights(self.model, checkpoint, device, dtype, shared)
        self._short_circuit = ShortCircuit(self.model, self.blocks_path)

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
        return self._weights.load(self.block_name(index))

    def release_block(self, index: int) -> None:
        """Drop one block's weights."""
        self._weights.drop(self.block_name(index))

    @contextmanager
    def whole(self) -> Iterator[Any]:
        """Yields the model with all its weights on the device; they are dropped at the end."""
        paths = self.all_paths()
        try:
            for path in paths:
                self._weights.load(path)
            yield self.model
        finally:
            for path in paths:
                self._weights.drop(path)

    def missing_weights(self) -> list[str]:
        """Weights that streaming needs and the checkpoint lacks: from names alone, nothing is read."""
        return self._weights.missing(self.all_paths())

    def stand_in(self, others: Mapping[int, int]) -> None:
        """Let blocks stand for others as well, by the indices of these: one module in several places.

        What streams blocks does not know of it; `whole` does.
        """
        for index, other in others.items():
            self.blocks[index] = self.blocks[other]

    def all_paths(self) -> list[str]:
        """Modules that a forward pass needs: the blocks, each once, then those around them."""
        first = {block: index for index, block in reversed(list(enumerate(self.blocks)))}
        around = dict.fromkeys(self.paths_around_blocks(head=False) + self.paths_around_blocks(head=True))
        return [*(self.block_name(index) for index in sorted(first.values())), *around]

    def replaces_head(self, weights: Mapping[str, QuantizedWeight]) -> bool:
        """Whether `head` with these hard weights is another one than the checkpoint's."""
        return (self.embedding_path if self.is_tied else self.head_path) in weights

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
                self._weights.load(path)
            if one_row:
                self._weights.load_one_row(self.embedding_path)
                paths.append(self.embedding_path)
            yield
        finally:
            for path in paths:
                self._weights.drop(path)

    # --- the model's own forward, blocks short-circuited -----------------------------------------------------------

    @torch.no_grad()
    def record_calls(self, batch_size: int, seq_len: int) -> list[BlockCall]:
        """The call of every block for inputs `[batch_size, seq_len]` without padding.

        Raises:
            ValueError: A call depends on the tokens themselves (per-layer embeddings): blocks cannot be replayed alone.
        """
        vocabulary = self.embedding.num_embeddings
        tokens = torch.arange(batch_size * seq_len, device=self.device).view(batch_size, seq_len) % vocabulary
        with self._around_blocks(head=False):
            calls = self._short_circuit.calls(tokens)
            others = self._short_circuit.calls((tokens + 1) % vocabulary)
        for index, (call, other) in enumerate(zip(calls, others, strict=True)):
            for a, b in zip(call.tensors(), other.tensors(), strict=True):
                if a.shape != b.shape or not torch.equal(a, b):
                    raise UserError(
                        f"{self.block_name(index)} is called with tensors that depend on the tokens "
                        "(per-layer embeddings?): its model cannot be streamed block by block"
                    )
        return calls

    @torch.no_grad()
    def record_shapes(self, tokens: Tensor) -> list[BlockCall]:
        """The call of every block for inputs of this shape; the embedding is not read, and nothing is checked."""
        with self._around_blocks(head=False, embedding=False):
            return self._short_circuit.calls(tokens)

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
        with self._around_blocks(head=False):
            self._weights.place(self.embedding_path, quantized or {})
            for rows in batches(len(tokens), batch_size):
                into.write(rows, self._short_circuit.first_inputs(tokens[rows].to(self.device)))

    def head_parts(self, weights: int) -> list[slice]:
        """Ranges of the vocabulary whose rows of the head have at most so many weights."""
        head = None if self.head_path is None else self.model.get_submodule(self.head_path)
        if not isinstance(head, nn.Linear):
            return [slice(0, self.embedding.num_embeddings)]
        return list(batches(head.out_features, max(1, weights // head.in_features)))

    @contextmanager
    def head(self, quantized: Mapping[str, QuantizedWeight] | None = None, part: slice | None = None):
        """Yields a function from hidden states after the last block `[batch, length, hidden]` to float32 logits.

        Args:
            quantized: Hard weights by module path; that of the head stands in for the checkpoint's.
            part: One of `head_parts`: the logits are those of these tokens alone. None for all.
        """
        some = None if part is None or [part] == self.head_parts(sys.maxsize) else part
        with self._around_blocks(head=True, head_weight=some is None), ExitStack() as cleanup:
            if some is not None:
                assert self.head_path is not None
                cleanup.enter_context(self._weights.some_rows(self.head_path, some, quantized or {}))
            elif self.head_path is not None:
                self._weights.place(self.head_path, quantized or {})
            yield self._short_circuit.logits

    @contextmanager
    def head_inputs(self) -> Iterator[Callable[[Tensor], Tensor]]:
        """Yields a function from hidden states after the last block to what the head is given: the last norm's output.

        Both `[batch, length, hidden]`. The head's own weight is not loaded.
        """
        with self._around_blocks(head=True, head_weight=False):
            yield self._short_circuit.head_inputs
