"""How a model calls one of its blocks, recorded so that the call can be replayed on other hidden states."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, is_tensor, nn


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
        name = "hidden_states" if "hidden_states" in kwargs else next(k for k, v in kwargs.items() if is_tensor(v))
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
            if is_tensor(value):
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
