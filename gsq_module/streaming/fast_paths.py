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


def planned_path(model: nn.Module) -> str | None:
    """What a plan of this model assumes, for people; None where nothing depends on what is installed."""
    if not any(name.endswith("linear_attn") for name, _ in model.named_modules()):
        return None
    installed = [distribution for module, distribution in PACKAGES.items() if find_spec(module) is not None]
    if not installed:
        return "linear attention: planned with transformers' torch code, which a run here uses as well"
    return (
        f"linear attention: planned with transformers' torch code; a run here uses {' and '.join(installed)}, "
        "whose memory is not in the plan"
    )


@contextmanager
def torch_path() -> Iterator[None]:
    """Make transformers' models use its torch code, whatever is installed."""
    with mock.patch.object(hub_kernels, "is_torchdynamo_exporting", return_value=True):
        yield
