"""The Hessian of a linear layer's squared output error: the second moment of its inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from gsq_module.problems import NumericalError


class Hessian:
    """Sum of x x^T over calibration tokens, accumulated in float32 whatever the inputs' dtype, unless told otherwise.

    On CUDA half-precision inputs are multiplied as they are: the product of two such numbers is exact in float32, so
    nothing is lost beside a product of float32 copies (measured: docs/experiments.md). Float32 inputs are multiplied in
    float32.

    Args:
        name: Name of the linear, for messages.
        in_features: Width of its input.
        device: Where the `[in_features, in_features]` matrix lives.
        dtype: What it is accumulated in; float64 makes its float32 value independent of the order of the batches.
    """

    def __init__(
        self, name: str, in_features: int, device: torch.device | str, dtype: torch.dtype = torch.float32
    ) -> None:
        self.name = name
        self.matrix = torch.zeros(in_features, in_features, dtype=dtype, device=device)
        self.num_tokens = 0
        self._batches = 0
        # On the device, so that no batch waits for it: the first batch that was not finite, and its largest value.
        self._first_bad = torch.full((), -1, dtype=torch.int64, device=device)
        self._largest = torch.zeros((), dtype=torch.float32, device=device)
        self._dtype = torch.float32

    @torch.no_grad()
    def add(self, inputs: Tensor, mask: Tensor | None = None) -> None:
        """Add one batch. That it is finite is looked at by `check`.

        Args:
            inputs: `[..., in_features]`.
            mask: Optional bool `[...]`; False marks padding, which does not count.
        """
        rows = inputs.reshape(-1, inputs.shape[-1])
        if mask is not None:
            rows = rows[mask.reshape(-1)]
        self._batches += 1
        if not len(rows):
            return
        if rows.is_cuda and rows.dtype in (torch.bfloat16, torch.float16):
            torch.addmm(self.matrix, rows.T, rows, out_dtype=torch.float32, out=self.matrix)
        else:
            rows = rows.to(self.matrix.dtype)
            self.matrix.addmm_(rows.T, rows)
        # No entry exceeds the largest of the diagonal, and one bad input shows there.
        bad = ~torch.isfinite(self.matrix.diagonal()).all() & (self._first_bad < 0)
        self._first_bad.masked_fill_(bad, self._batches - 1)
        torch.where(bad, rows.abs().amax().float(), self._largest, out=self._largest)
        self._dtype = inputs.dtype
        self.num_tokens += rows.shape[0]

    def summary(self) -> tuple[int, int, float, torch.dtype]:
        """What other ranks need beside the matrix: tokens, the bad batch or -1, its largest value, the dtype."""
        return self.num_tokens, int(self._first_bad), float(self._largest), self._dtype

    def merge(self, summaries: list[tuple[int, int, float, torch.dtype]]) -> None:
        """Take over those of all ranks, this one's among them, once `matrix` is their sum."""
        self.num_tokens = sum(tokens for tokens, *_ in summaries)
        for _, batch, largest, dtype in summaries:
            if batch >= 0:
                self._first_bad.fill_(batch)
                self._largest.fill_(largest)
                self._dtype = dtype
                return

    def give_up(self) -> None:
        """Free the matrix; what was counted stays."""
        self.matrix = self.matrix.new_empty(0, 0)

    def check(self) -> None:
        """Wait for the batches added so far.

        Raises:
            NumericalError: An input was NaN or infinite, or the squares overflowed float32; names linear and batch.
        """
        batch = int(self._first_bad)
        if batch < 0:
            return
        largest = float(self._largest)
        if largest < float("inf"):
            problem = f"inputs (up to {largest:.3g}) whose squares overflow float32"
        else:
            problem = f"inputs that are not finite (up to {largest})"
        raise NumericalError(f"{self.name}: calibration batch {batch} has {problem}: {numerical_advice(self._dtype)}")


def numerical_advice(dtype: torch.dtype) -> str:
    """What helps where a model that computes in this dtype has come to numbers that are not finite."""
    if dtype == torch.float16:
        return (
            "float16 ends at 65504, and the model goes beyond. Next: the same command with --model.dtype bfloat16 "
            "(or float32) and another --run_dir"
        )
    return (
        "a weight up to there is no number (a damaged checkpoint: get it again), or the model itself yields them on "
        "this text (look at the calibration data). Next: the same command with those mended and another --run_dir"
    )
