"""What is measured: the geometry of one MLP and the batches that go through it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Batch:
    """Sequences of one optimizer step.

    Attributes:
        samples: Sequences of a step.
        seq_len: Tokens of a sequence.
        microbatch: Sequences that go through the unit at once.
    """

    samples: int
    seq_len: int
    microbatch: int

    @property
    def tokens(self) -> int:
        return self.samples * self.seq_len

    @property
    def microbatch_tokens(self) -> int:
        return self.microbatch * self.seq_len

    @property
    def accumulate(self) -> int:
        """Microbatches of a step."""
        return self.samples // self.microbatch

    def __str__(self) -> str:
        return f"{self.samples} x {self.seq_len} tokens, microbatch {self.microbatch}"


@dataclass(frozen=True)
class Shape:
    """An MLP and how long to look at it.

    Attributes:
        hidden: Width of its input and output.
        intermediate: Output width of gate and up, input width of down.
        group_size: Input columns that share a scale; 2 bits a weight throughout.
        batches: Of the steps.
        gptq_tokens: Behind the Hessians of the GPTQ solves.
        hessian_tokens: Of one addition to a Hessian.
        seconds: How long a figure is measured; slower things are measured three times.
        rounds: Fits of each kind, where Lightning is measured.
    """

    hidden: int
    intermediate: int
    group_size: int
    batches: tuple[Batch, ...]
    gptq_tokens: int
    hessian_tokens: int
    seconds: float
    rounds: int

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """`(out_features, in_features)` by name."""
        wide = (self.intermediate, self.hidden)
        return {"gate_proj": wide, "up_proj": wide, "down_proj": (self.hidden, self.intermediate)}

    @property
    def weights(self) -> int:
        return 3 * self.hidden * self.intermediate


SHAPES = {
    "qwen3.6-27b": Shape(
        hidden=5120,
        intermediate=17408,
        group_size=128,
        batches=(Batch(4, 1024, 1), Batch(8, 4096, 2), Batch(64, 4096, 2)),
        gptq_tokens=8192,
        hessian_tokens=4096,
        seconds=1.0,
        rounds=5,
    ),
    "smollm2-135m": Shape(
        hidden=576,
        intermediate=1536,
        group_size=64,
        batches=(Batch(2, 512, 2), Batch(4, 512, 2)),
        gptq_tokens=4096,
        hessian_tokens=4096,
        seconds=0.5,
        rounds=3,
    ),
    "tiny": Shape(
        hidden=64,
        intermediate=192,
        group_size=32,
        batches=(Batch(2, 16, 1), Batch(4, 16, 2)),
        gptq_tokens=256,
        hessian_tokens=64,
        seconds=0.01,
        rounds=1,
    ),
}
