"""Kernels that transformers' models take from other packages when those are installed, and its own torch code instead.

transformers decides at import (`use_kernel_func_from_hub_with_fallback` in its integrations/hub_kernels.py): the
functions of a linear attention are those of flash-linear-attention and causal-conv1d where they can be imported. A
block that is replayed calls its model's own functions, so that a run uses them without doing anything for it. They
cannot be run on tensors without data; for that transformers has its torch code, which it takes while it exports.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from unittest import mock

from torch import nn
from transformers.integrations import hub_kernels

PACKAGES = {"fla": "flash-linear-attention", "causal_conv1d": "causal-conv1d"}
"""Modules that transformers looks for, and the distributions that they come in."""


def installed_kernels() -> list[str]:
    """The distributions of fast kernels that can be imported here."""
    return [distribution for module, distribution in PACKAGES.items() if find_spec(module) is not None]


def has_linear_attention(model: nn.Module) -> bool:
    """Whether blocks of the model have a linear attention, whose function depends on what is installed."""
    return any(name.endswith("linear_attn") for name, _ in model.named_modules())


@contextmanager
def torch_path() -> Iterator[None]:
    """Make transformers' models use its torch code, whatever is installed."""
    with mock.patch.object(hub_kernels, "is_torchdynamo_exporting", return_value=True):
        yield
