"""The sizes that the memory plan is made of: of a run, of its kinds of block, of their units."""

from __future__ import annotations

from dataclasses import dataclass

HEAD_WEIGHTS = 2**28
"""Weights of the head that are on the device at once while a model is measured: half a gigabyte in bf16."""
HEAD_TOKENS = 256
"""Positions whose logits are computed at once while a model is measured."""
ROW_CHUNK_WEIGHTS = 2**25
"""Weights of an embedding or a head that a rank quantizes at once."""
PLACED_ROWS = 8192
"""Rows of one that are dequantized at once."""


@dataclass(frozen=True)
class OuterShape:
    """A quantized embedding or head.

    Attributes:
        kind: `embedding` or `head`.
        rows: The vocabulary.
        columns: The hidden size.
        bits: Bits a code takes in the export.
        group_size: Columns that share a scale.
        copies: How often the export holds it: twice where it is embedding and head.
    """

    kind: str
    rows: int
    columns: int
    bits: int
    group_size: int
    copies: int

    @property
    def weights(self) -> int:
        return self.rows * self.columns

    @property
    def packed_bytes(self) -> int:
        """Codes and scales as they are stored, once."""
        return self.rows * 4 * -(-self.columns * self.bits // 32) + 2 * self.weights // self.group_size


@dataclass(frozen=True)
class UnitShape:
    """One unit's sizes.

    Attributes:
        kind: `attention` or `mlp`.
        linears: `(out_features, in_features)` of each quantized linear.
        hessians: in_features of each Hessian: linears with the same input share one.
        nbytes: Weights and buffers of the whole unit in the compute dtype.
        capture: Working set of a pass of `forward_batch` sequences through the block as far as the unit's end.
        training: Working set of a later microbatch's forward and backward pass; gradients of weights, which are
            accumulated in place, not counted.
        validation: Working set of a microbatch's forward pass without gradients.
    """

    kind: str
    linears: tuple[tuple[int, int], ...]
    hessians: tuple[int, ...]
    nbytes: int
    capture: int
    training: int
    validation: int

    @property
    def weights(self) -> int:
        return sum(rows * cols for rows, cols in self.linears)

    @property
    def largest(self) -> int:
        return max(rows * cols for rows, cols in self.linears)


@dataclass(frozen=True)
class BlockShape:
    """One kind of block.

    Attributes:
        indices: The blocks of this kind.
        nbytes: Weights and buffers in the compute dtype.
        calls: Tensors that the model passes to every block beside the hidden states, all batch sizes.
        forward: Working set of one pass of `forward_batch` sequences.
        units: Its quantized units in order.
    """

    indices: tuple[int, ...]
    nbytes: int
    calls: int
    forward: int
    units: tuple[UnitShape, ...]


@dataclass(frozen=True)
class Job:
    """The sizes of a run that do not depend on the block.

    Attributes:
        hidden_size: Of a hidden state.
        itemsize: Of the compute dtype.
        store_itemsize: Of a stored hidden state.
        vocabulary_bytes: Embedding and whatever else stands before the blocks.
        head_bytes: What stands behind them: the last norm and the head.
        vocabulary: Its size.
        seq_len: Tokens of a calibration sequence.
        evaluation_seq_len: Tokens of an evaluation sequence.
        microbatch: Sequences of a device's microbatch.
        shares_batch: Whether that is the device's whole share of a batch, and so smaller on more devices.
        forward_batch: Sequences at once outside refinement.
        samples: Training, validation and GPTQ sequences together.
        evaluation_samples: Sequences of all evaluation texts.
        evaluation_store: Where their hidden states live.
        candidates: Candidates of the relaxation.
        windowed: Whether they differ from weight to weight.
        group_size: Weights that share a scale.
        logit_itemsize: Of logits and momentum.
        storage_bits: Bits a code takes in the export.
        expandable_segments: Whether the allocator has them.
        measure_initial: Whether the initial codes are kept too.
        fused: Whether the Triton kernels serve.
        gptq: Whether the initializer is GPTQ.
        original_stream: Whether targets come from the original stream.
        cached: Whether a unit's inputs and targets are cached.
        store: Where hidden states live: `device`, `memory` or `disk`.
        world_size: Processes that share a run.
        strategy: `single`, `ddp` or `sharded`.
        model_bytes: All weights in the compute dtype, tied ones once.
        whole_bytes: What tokens pass through, in the compute dtype, a tied head once more: `StreamedModel.whole`.
        reload: Whether the export is also loaded whole.
        final_pass: Whether all scales are trained together at the end.
        float_bytes: Weights that stay in float, in the export's dtype.
        outer: Embedding and head, where they are quantized.
        float_blocks: Blocks behind the quantized ones.
    """

    hidden_size: int
    itemsize: int
    store_itemsize: int
    vocabulary_bytes: int
    head_bytes: int
    vocabulary: int
    seq_len: int
    evaluation_seq_len: int
    microbatch: int
    shares_batch: bool
    forward_batch: int
    samples: int
    evaluation_samples: int
    evaluation_store: str
    candidates: int
    windowed: bool
    group_size: int
    logit_itemsize: int
    storage_bits: int
    expandable_segments: bool
    measure_initial: bool
    fused: bool
    gptq: bool
    original_stream: bool
    cached: bool
    store: str
    world_size: int
    strategy: str
    model_bytes: int
    whole_bytes: int
    reload: bool
    final_pass: bool
    float_bytes: int
    outer: tuple[OuterShape, ...] = ()
    float_blocks: int = 0
