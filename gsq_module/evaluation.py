"""A model measured: block by block in the memory of one block, or whole through plain transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gsq_module import ranks
from gsq_module.data.samples import even_share, range_slice
from gsq_module.export.loading import load_whole
from gsq_module.measures import Measured, Predictions
from gsq_module.memory.sizes import HEAD_TOKENS, HEAD_WEIGHTS
from gsq_module.quantization.grid import QuantizedWeight
from gsq_module.streaming.activations import ActivationStore, Location, batches, choose_location, free_device_bytes
from gsq_module.streaming.model import StreamedModel
from gsq_module.streaming.staging import Staging


@dataclass
class HiddenStates:
    """Where a model's stream of each text stands behind the last block: all that its head needs.

    Attributes:
        model: The model, for its head.
        quantized: Hard weights by module path; that of the head stands in for the checkpoint's.
        texts: int64 `[num_samples, seq_len]` by name: this rank's share of the samples.
        stores: Hidden states `[num_samples, seq_len, hidden_size]` of each text.
        staging: Brings them to the device.
    """

    model: StreamedModel
    quantized: Mapping[str, QuantizedWeight]
    texts: dict[str, Tensor]
    stores: dict[str, ActivationStore]
    staging: Staging

    def leave_device(self) -> None:
        """Move to host memory what is on the device: there it would lie in the way of what comes next."""
        for name, store in self.stores.items():
            if store.device.type != "cpu":
                kept = ActivationStore(tuple(store.data.shape), store.data.dtype, "memory", store.device, Path())
                kept.write(slice(None), store.data)
                self.stores[name] = kept

    def close(self) -> None:
        """Free the memory; delete the files."""
        for store in self.stores.values():
            store.close()


@torch.no_grad()
def hidden_states(
    model: StreamedModel,
    texts: Mapping[str, Tensor],
    batch_size: int,
    scratch: Path,
    quantized: Mapping[str, QuantizedWeight] | None = None,
    pin_memory: bool = True,
    indices: Sequence[int] | None = None,
    location: Location = "auto",
) -> HiddenStates:
    """Pass the texts through the blocks, one of them in memory at a time. Each rank takes its share of the samples.

    Args:
        model: The checkpoint's model (an exported one is read through `export.reader.open_checkpoint`).
        texts: int64 `[num_samples, seq_len]` by name.
        batch_size: Samples at a time.
        scratch: Folder for hidden states that do not fit the memory.
        quantized: Hard weights by module path that stand in for the checkpoint's, embedding and head among them.
        pin_memory: Whether hidden states in host memory go through pinned buffers.
        indices: Blocks to go through; None for all. A rehearsal leaves most of them out.
        location: Where hidden states live.

    Returns:
        To be closed by the caller.
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
        cleanup.pop_all()
    return HiddenStates(model, quantized, texts, stores, staging)


@torch.no_grad()
def measure(states: HiddenStates, original: HiddenStates | None = None) -> dict[str, Measured]:
    """Figures of each text, of the samples of all ranks, which all call it.

    Args:
        states: Of the model that is measured.
        original: Of the model it is compared with, on the same texts; None leaves the comparison out.
    """
    device = states.model.device
    predictions = {
        name: Predictions((len(tokens), tokens.shape[1] - 1), device, original is not None)
        for name, tokens in states.texts.items()
    }
    for part in states.model.head_parts(HEAD_WEIGHTS):
        with _heads(states, original, part) as (head, original_head):
            for name, tokens in states.texts.items():
                there = [states.staging.read([states.stores[name].data], batches(len(tokens), 1))]
                if original is not None:
                    there.append(original.staging.read([original.stores[name].data], batches(len(tokens), 1)))
                for (rows, (hidden,)), *others in zip(*there, strict=True):
                    targets = tokens[rows, 1:].to(device, non_blocking=True)
                    for some in batches(targets.shape[1], HEAD_TOKENS):
                        compared = original_head(others[0][1][0][:, some]) if others else None
                        logits = head(hidden[:, some])
                        predictions[name].update((rows, some), logits, targets[:, some], compared, part.start)
    return {name: found.measured(of_all_ranks=True) for name, found in predictions.items()}


@contextmanager
def _heads(states: HiddenStates, original: HiddenStates | None, part: slice):
    """Some rows of the head of each model; the weights of one where both have the same."""
    with states.model.head(states.quantized, part) as head:
        if original is None:
            yield head, head
            return
        other = original.model
        if other is states.model:
            if not other.replaces_head(states.quantized):
                yield head, head
                return
            # Two heads at once need two module trees.
            other = StreamedModel.from_checkpoint(other.checkpoint, other.device, other.dtype)
        with other.head(original.quantized, part) as original_head:
            yield head, original_head


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
        predictions = Predictions((len(tokens), tokens.shape[1] - 1), device)
        for rows in batches(len(tokens), 1):
            row = tokens[rows].to(device)
            logits = model(input_ids=row, use_cache=False).logits[:, :-1].float()
            predictions.update((rows, slice(None)), logits, row[:, 1:])
        result[name] = predictions.measured().perplexity
    return result
