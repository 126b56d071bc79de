"""Perplexity of a model: block by block in the memory of one block, or whole through plain transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
import torchmetrics.text
from torch import Tensor

from gsq_module import ranks
from gsq_module.data.samples import even_share, range_slice
from gsq_module.export.loading import load_whole
from gsq_module.quantization.grid import QuantizedWeight
from gsq_module.streaming.activations import ActivationStore, Location, batches, choose_location, free_device_bytes
from gsq_module.streaming.model import StreamedModel
from gsq_module.streaming.staging import Staging

HEAD_TOKENS = 512
"""Positions whose logits are computed at once: with a vocabulary of 250,000, half a gigabyte in float32."""


class Perplexity:
    """torchmetrics' perplexity, fed with hidden states or logits of whole sequences.

    Args:
        device: Where the predictions are.
        of_all_ranks: Whether `compute`, which all ranks then call, is of the predictions of all of them.
    """

    def __init__(self, device: torch.device, of_all_ranks: bool = False) -> None:
        self._metric = torchmetrics.text.Perplexity(sync_on_compute=of_all_ranks).to(device)  # type: ignore[arg-type]

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Add predictions.

        Args:
            logits: float32 `[batch, length, vocabulary]`.
            targets: int64 `[batch, length]`, the token that follows each position.
        """
        self._metric.update(logits, targets)

    def compute(self) -> float:
        return float(self._metric.compute())


@torch.no_grad()
def streamed_perplexity(
    model: StreamedModel,
    texts: Mapping[str, Tensor],
    batch_size: int,
    scratch: Path,
    quantized: Mapping[str, QuantizedWeight] | None = None,
    pin_memory: bool = True,
    indices: Sequence[int] | None = None,
    location: Location = "auto",
) -> dict[str, float]:
    """Perplexity of each text, one block of the model in memory at a time. All ranks call it; each takes its share.

    Args:
        model: The checkpoint's model (an exported one is read through `export.reader.open_checkpoint`).
        texts: int64 `[num_samples, seq_len]` by name.
        batch_size: Samples at a time.
        scratch: Folder for hidden states that do not fit the memory.
        quantized: Hard weights by module path that stand in for the checkpoint's.
        pin_memory: Whether hidden states in host memory go through pinned buffers.
        indices: Blocks to go through; None for all. A rehearsal leaves most of them out.
        location: Where hidden states live.

    Returns:
        Perplexities by name.
    """
    quantized = quantized or {}
    texts = {
        name: tokens[range_slice(even_share(len(tokens), ranks.rank(), ranks.world_size()))]
        for name, tokens in texts.items()
    }
    staging = Staging(model.device, pin_memory)
    itemsize = torch.finfo(model.dtype).bits // 8
    total_bytes = sum(tokens.numel() for tokens in texts.values()) * model.hidden_size * itemsize
    location = choose_location(location, total_bytes, free_device_bytes(model.device), ranks.processes_of_host())
    with ExitStack() as cleanup:
        stores: dict[str, ActivationStore] = {}
        calls = {}
        for name, tokens in texts.items():
            file = scratch / f"evaluation_{name}.bin"
            store = ActivationStore((*tokens.shape, model.hidden_size), model.dtype, location, model.device, file)
            cleanup.callback(store.close)
            stores[name] = store
            model.embed(tokens, store, batch_size, quantized)
            for rows in batches(len(tokens), batch_size):
                shape = (rows.stop - rows.start, tokens.shape[1])
                if shape not in calls:
                    calls[shape] = model.record_calls(*shape)
        for index in range(model.num_blocks) if indices is None else indices:
            block = model.load_block(index)
            place_weights(model, index, quantized)
            with staging.writer() as writer:
                for store in stores.values():
                    for rows, (hidden,) in staging.read([store.data], batches(len(store), batch_size)):
                        writer.write(store.data, rows, calls[hidden.shape[0], hidden.shape[1]][index](block, hidden))
            model.release_block(index)
        result = {}
        with model.head(quantized) as head:
            for name, tokens in texts.items():
                metric = Perplexity(model.device, of_all_ranks=True)
                for rows, (hidden,) in staging.read([stores[name].data], batches(len(tokens), 1)):
                    targets = tokens[rows, 1:].to(model.device, non_blocking=True)
                    for part in batches(targets.shape[1], HEAD_TOKENS):
                        metric.update(head(hidden[:, part]), targets[:, part])
                result[name] = metric.compute()
        return result


def place_weights(model: StreamedModel, index: int, quantized: Mapping[str, QuantizedWeight]) -> None:
    """Put hard weights into a loaded block."""
    prefix = model.block_name(index) + "."
    for name in quantized:
        if name.startswith(prefix):
            weight = model.model.get_submodule(name).weight
            weight.copy_(quantized[name].dequantize())


@torch.no_grad()
def whole_model_perplexity(
    directory: Path, texts: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype
) -> dict[str, float]:
    """Perplexity of each text as a user of transformers gets it: `load_whole`, then the model's forward.

    One process does it alone.

    Args:
        directory: Checkpoint folder, exported or original.
        texts: int64 `[num_samples, seq_len]` by name.
    """
    model = load_whole(directory, dtype, device)
    result = {}
    for name, tokens in texts.items():
        metric = Perplexity(device)
        for sample in range(len(tokens)):
            row = tokens[sample : sample + 1].to(device)
            metric.update(model(input_ids=row, use_cache=False).logits[:, :-1].float(), row[:, 1:])
        result[name] = metric.compute()
    return result
