"""A decoder-only transformers model of which one block at a time is in memory.

The module tree lives on the meta device. The model's own `forward` runs with its blocks short-circuited: that yields the
hidden states before the first block, the exact call of every block, and the logits after the last one, for any family,
without a class for each.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from gsq_module.streaming.checkpoint import Checkpoint


class _StopForwardError(Exception):
    """Ends a forward pass whose rest is not needed."""


@dataclass
class BlockCall:
    """How the model calls one of its blocks, for one batch shape: everything but the hidden states.

    Attributes:
        args: Positional arguments; the hidden states' place holds None.
        kwargs: Keyword arguments likewise.
        place: Position or keyword of the hidden states.
    """

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    place: int | str = 0

    @classmethod
    def record(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[BlockCall, Tensor]:
        """Split a call into itself and the hidden states it carried."""
        if args:
            return cls((None, *args[1:]), dict(kwargs), 0), args[0]
        # transformers passes them first or by this name; a block without either takes its first tensor
        name = "hidden_states" if "hidden_states" in kwargs else next(k for k, v in kwargs.items() if torch.is_tensor(v))
        return cls((), {**kwargs, name: None}, name), kwargs[name]

    def __call__(self, module: nn.Module, hidden: Tensor) -> Tensor:
        """Replay the call on `hidden` `[batch, seq_len, hidden_size]`; of a tuple result, the first entry."""
        if isinstance(self.place, int):
            result = module(hidden, *self.args[1:], **self.kwargs)
        else:
            result = module(*self.args, **{**self.kwargs, self.place: hidden})
        return first_output(result)

    def tensors(self) -> list[Tensor]:
        """Every tensor of the call, in a fixed order."""
        found: list[Tensor] = []

        def visit(value: Any) -> None:
            if torch.is_tensor(value):
                found.append(value)
            elif isinstance(value, (list, tuple)):
                for item in value:
                    visit(item)
            elif isinstance(value, dict):
                for item in value.values():
                    visit(item)

        visit(self.args)
        visit(self.kwargs)
        return found


def first_output(result: Any) -> Tensor:
    """Blocks and their parts return a tensor, or a tuple that begins with it."""
    return result[0] if isinstance(result, tuple) else result


class StreamedModel:
    """Blocks, embedding and head of a checkpoint, each loaded when asked for.

    Args:
        model: The module tree on the meta device.
        checkpoint: Its weights.
        device: Where blocks go.
        dtype: Floating dtype they are computed in.

    Raises:
        ValueError: No list of blocks is found; the candidates are listed.
    """

    def __init__(self, model: nn.Module, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        self.model = model.eval()
        self.checkpoint = checkpoint
        self.device = device
        self.dtype = dtype
        self.blocks_path = find_blocks(model)
        self.blocks: nn.ModuleList = model.get_submodule(self.blocks_path)  # type: ignore[assignment]
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        embedding = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
        modules = {id(module): name for name, module in model.named_modules()}
        self.head_path = modules.get(id(head))
        self.embedding_path = modules.get(id(embedding))
        self._returns_tuple = False

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> StreamedModel:
        """Build the module tree of a checkpoint folder from its config.json alone."""
        return cls(meta_model(checkpoint.directory), checkpoint, device, dtype)

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def is_tied(self) -> bool:
        """Whether the head is the embedding: the checkpoint holds one tensor for both."""
        return self.head_path is not None and f"{self.head_path}.weight" not in self.checkpoint

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
        self.blocks[index].to("meta")

    def _load(self, path: str, recurse: bool = True) -> nn.Module:
        module = self.model.get_submodule(path)
        self._fill_buffers(module, recurse)
        names = dict(module.named_parameters(recurse=recurse))
        names |= {name: buffer for name, buffer in module.named_buffers(recurse=recurse) if buffer.is_meta}
        full = {name: f"{path}.{name}" if path else name for name in names}
        if path == self.head_path and self.is_tied:
            full["weight"] = f"{self.embedding_path}.weight"  # tied
        missing = [name for name in full.values() if name not in self.checkpoint]
        if missing:
            present = [name for name in self.checkpoint.names() if name.startswith(path.split(".")[0])][:3]
            raise ValueError(
                f"{self.checkpoint.directory} lacks weights of {path or 'the model'}: {', '.join(missing[:8])}"
                f"{' ...' if len(missing) > 8 else ''}; it has, for example, {', '.join(present) or 'none under that name'}"
            )
        tensors = self.checkpoint.tensors(full.values())
        for name, source in full.items():
            owner = module.get_submodule(name.rpartition(".")[0])
            value = tensors[source]
            value = value.to(self.device, self.dtype if value.is_floating_point() else None)
            leaf = name.rpartition(".")[2]
            if leaf in owner._parameters:
                owner._parameters[leaf] = nn.Parameter(value, requires_grad=False)
            else:
                owner._buffers[leaf] = value
        return module

    def _fill_buffers(self, module: nn.Module, recurse: bool) -> None:
        """Compute the buffers that no checkpoint holds (rotary frequencies, embedding scales) by the model's own code."""
        for part in module.modules() if recurse else (module,):
            computed = [name for name in part._non_persistent_buffers_set if part._buffers.get(name) is not None]
            if not computed:
                continue
            for name in computed:
                part._buffers[name] = torch.empty_like(part._buffers[name], device=self.device)  # type: ignore[arg-type]
            with torch.no_grad(), torch.device(self.device):
                self.model._init_weights(part)  # type: ignore[operator]

    @contextmanager
    def _around_blocks(self, head: bool):
        """Load what the model's forward needs besides its blocks; drop it again."""
        decoder_path = self.blocks_path.rpartition(".")[0]
        decoder = self.model.get_submodule(decoder_path)
        prefix = f"{decoder_path}." if decoder_path else ""
        paths = [prefix + name for name, child in decoder.named_children() if child is not self.blocks]
        paths = [path for path in paths if path != self.head_path]
        if head and self.head_path is not None:
            paths.append(self.head_path)
        try:
            for path in paths:
                self._load(path)
            yield
        finally:
            for path in paths:
                self.model.get_submodule(path).to("meta")

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
                block.forward = replacement(index)  # type: ignore[method-assign]
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
        vocabulary = self.model.get_submodule(self.embedding_path).num_embeddings if self.embedding_path else 2  # type: ignore[union-attr]
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
    def embed(self, tokens: Tensor, into: Any, batch_size: int) -> None:
        """Hidden states before the first block.

        Args:
            tokens: int64 `[num_samples, seq_len]` in host memory.
            into: An activation store of as many samples.
            batch_size: Samples at a time.
        """
        caught: list[Tensor] = []

        def on_block(index: int, args, kwargs) -> Tensor:
            caught.append(BlockCall.record(args, kwargs)[1])
            raise _StopForwardError

        with self._around_blocks(head=False), self._short_circuit(on_block):
            for first in range(0, len(tokens), batch_size):
                rows = slice(first, min(first + batch_size, len(tokens)))
                try:
                    self._forward(tokens[rows].to(self.device))
                except _StopForwardError:
                    into.write(rows, caught.pop())

    @contextmanager
    def head(self):
        """Yields a function from hidden states after the last block `[batch, length, hidden]` to float32 logits."""

        @torch.no_grad()
        def logits(hidden: Tensor) -> Tensor:
            def on_block(index: int, args, kwargs) -> Tensor:
                return hidden

            # Norm and head see each position alone, so any token may stand for the input.
            tokens = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=self.device)
            with self._short_circuit(on_block):
                return self._forward(tokens).logits.float()

        with self._around_blocks(head=True):
            yield logits


def meta_model(directory: Path) -> nn.Module:
    """The module tree of a checkpoint folder on the meta device, in the class its config.json names.

    Raises:
        FileNotFoundError: No config.json.
        ValueError: transformers does not know the model's type.
    """
    config_file = directory / "config.json"
    if not config_file.is_file():
        raise FileNotFoundError(f"{directory} has no config.json: not a checkpoint folder of transformers")
    try:
        config = transformers.AutoConfig.from_pretrained(directory)
    except (ValueError, KeyError) as error:
        model_type = json.loads(config_file.read_text()).get("model_type")
        raise ValueError(
            f"{config_file}: transformers {transformers.__version__} does not know model_type {model_type!r}; "
            "a newer one may: pip install --upgrade transformers"
        ) from error
    # An exported checkpoint is read dense (export/reader.py): its quantization must not shape the module tree.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    named = [getattr(transformers, name, None) for name in config.architectures or ()]
    model_class = next((cls for cls in named if cls is not None), None)
    with torch.device("meta"):
        if model_class is None or not model_class.__name__.endswith(("CausalLM", "ConditionalGeneration", "LMHeadModel")):
            return transformers.AutoModelForCausalLM.from_config(config)
        return model_class._from_config(config)


def find_blocks(model: nn.Module) -> str:
    """Path of the ModuleList that holds the decoder blocks.

    Raises:
        ValueError: None, or several that cannot be told apart; the candidates are listed.
    """
    candidates = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    nested = [n for n in candidates if any(n.startswith(f"{other}.") for other in candidates)]
    outer = {name: module for name, module in candidates.items() if name not in nested}
    config = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config(decoder=True)
    wanted = getattr(config, "num_hidden_layers", None)
    fitting = [name for name, module in outer.items() if wanted is None or len(module) == wanted]
    if len(fitting) > 1 and hasattr(model, "get_decoder"):
        decoder = model.get_decoder()
        inside = {id(module) for module in decoder.modules()}
        fitting = [name for name in fitting if id(outer[name]) in inside]
    if len(fitting) != 1:
        listed = ", ".join(f"{name} ({len(module)})" for name, module in candidates.items()) or "none"
        raise ValueError(
            f"cannot tell which module list holds the {wanted if wanted is not None else ''} decoder blocks of "
            f"{type(model).__name__}; module lists (lengths): {listed}"
        )
    return fitting[0]
