"""A model's own forward with its blocks short-circuited: what comes before the first, between them, and after the last.

It serves any family, without a class for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gsq_module.problems import UserError
from gsq_module.streaming.calls import BlockCall


class _StopForwardError(Exception):
    """Ends a forward pass whose rest is not needed."""


class ShortCircuit:
    """Runs a model's own `forward` without running its blocks. What it needs besides them must be loaded.

    Args:
        model: A PreTrainedModel, or what is built like one.
        blocks_path: Module path of its list of blocks.
    """

    def __init__(self, model: Any, blocks_path: str) -> None:
        self.model = model
        self.blocks_path = blocks_path
        self.blocks: nn.ModuleList = model.get_submodule(blocks_path)
        self._returns_tuple = False

    @contextmanager
    def _replaced(self, on_block: Callable[[int, Any, Any], Tensor]) -> Iterator[None]:
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
    def calls(self, tokens: Tensor) -> list[BlockCall]:
        """The call of every block.

        Args:
            tokens: int64 `[batch, seq_len]` on the device.

        Raises:
            ValueError: The blocks do not pass their hidden states on.
        """
        for self._returns_tuple in (False, True):
            calls: list[BlockCall] = []
            passed: list[Tensor] = []

            def on_block(index: int, args, kwargs, calls=calls, passed=passed) -> Tensor:
                call, hidden = BlockCall.record(args, kwargs)
                if passed and hidden is not passed[-1]:
                    raise _StopForwardError  # the model took something else of our result: it expects the other form
                calls.append(call)
                passed.append(hidden)
                if index == len(self.blocks) - 1:
                    raise _StopForwardError
                return hidden

            with self._replaced(on_block):
                try:
                    self._forward(tokens)
                except _StopForwardError:
                    if len(calls) == len(self.blocks):
                        return calls
        raise UserError(
            f"the blocks of {self.blocks_path} do not pass their hidden states on one to the next "
            f"(stopped at block {len(calls)} of {len(self.blocks)})"
        )

    @torch.no_grad()
    def first_inputs(self, tokens: Tensor) -> Tensor:
        """Hidden states before the first block, of tokens int64 `[batch, seq_len]` on the device."""
        caught: list[Tensor] = []

        def on_block(index: int, args, kwargs) -> Tensor:
            caught.append(BlockCall.record(args, kwargs)[1])
            raise _StopForwardError

        with self._replaced(on_block):
            try:
                self._forward(tokens)
            except _StopForwardError:
                return caught.pop()
        raise AssertionError(f"no block of {self.blocks_path} was called")

    @torch.no_grad()
    def _after_blocks(self, hidden: Tensor) -> Any:
        # Norm and head see each position alone, so any token may stand for the input.
        tokens = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
        with self._replaced(lambda index, args, kwargs: hidden):
            return self._forward(tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 logits of hidden states after the last block, `[batch, length, hidden]`."""
        return self._after_blocks(hidden).logits.float()

    def head_inputs(self, hidden: Tensor) -> Tensor:
        """What the head is given, the last norm's output, of hidden states after the last block; it is not run."""
        caught: list[Tensor] = []

        def before_head(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            caught.append(args[0])
            raise _StopForwardError

        handle = self.model.get_output_embeddings().register_forward_pre_hook(before_head)
        try:
            self._after_blocks(hidden)
        except _StopForwardError:
            return caught.pop()
        finally:
            handle.remove()
        raise AssertionError("the head was not called")
