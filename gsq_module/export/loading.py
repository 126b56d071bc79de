"""Loading a checkpoint, exported or original, whole with plain transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel


def load_whole(directory: str | Path, dtype: torch.dtype | str = "auto", device: torch.device | str = "cpu") -> Any:
    """`AutoModelForCausalLM.from_pretrained`, which in transformers 5.24 fails where the embedding is quantized.

    Args:
        directory: Checkpoint folder.
        dtype: Of the weights.
        device: Where they go.

    Returns:
        The model in evaluation mode. Packed weights are decompressed in the first forward.
    """
    with initializing_no_packed_embedding():
        return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, device_map={"": device}).eval()


@contextmanager
def initializing_no_packed_embedding() -> Iterator[None]:
    """transformers initializes what a checkpoint lacks. Of a packed linear it knows that it has no `weight`, but not of
    a packed embedding ("'Embedding' object has no attribute 'weight'"; huggingface/transformers, pull request 48123).
    """
    initialize = PreTrainedModel._init_weights

    def guarded(self: PreTrainedModel, module: nn.Module) -> None:
        if not isinstance(module, nn.Embedding) or hasattr(module, "weight"):
            initialize(self, module)

    PreTrainedModel._init_weights = guarded  # type: ignore[method-assign]
    try:
        yield
    finally:
        PreTrainedModel._init_weights = initialize  # type: ignore[method-assign]
