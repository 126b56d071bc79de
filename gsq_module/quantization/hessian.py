"""The Hessian of a linear layer's squared output error: the second moment of its inputs."""

from __future__ import annotations

import torch
from torch import Tensor


class Hessian:
    """Sum of x x^T over calibration tokens, accumulated in float32 whatever the inputs' dtype.

    Args:
        name: Name of the linear, for messages.
        in_features: Width of its input.
        device: Where the `[in_features, in_features]` matrix lives.
    """

    def __init__(self, name: str, in_features: int, device: torch.device | str) -> None:
        self.name = name
        self.matrix = torch.zeros(in_features, in_features, dtype=torch.float32, device=device)
        self.num_tokens = 0
        self._batches = 0

    @torch.no_grad()
    def add(self, inputs: Tensor, mask: Tensor | None = None) -> None:
        """Add one batch.

        Args:
            inputs: `[..., in_features]`.
            mask: Optional bool `[...]`; False marks padding, which does not count.

        Raises:
            ValueError: An input is NaN or infinite, or the squares overflow float32; names the linear and the batch.
        """
        rows = inputs.reshape(-1, inputs.shape[-1])
        if mask is not None:
            rows = rows[mask.reshape(-1)]
        rows = rows.float()
        self.matrix.addmm_(rows.T, rows)
        # No entry exceeds the largest of the diagonal, and one bad input shows there.
        if not bool(torch.isfinite(self.matrix.diagonal()).all()):
            if bool(torch.isfinite(rows).all()):
                problem = f"inputs (up to {float(rows.abs().max()):.3g}) whose squares overflow float32"
            else:
                problem = "inputs that are not finite"
            advice = (
                "float16 ends at 65504: use --model.dtype bfloat16 (or float32)"
                if inputs.dtype == torch.float16
                else "the model itself yields them on this text: look at the calibration data and the checkpoint"
            )
            raise ValueError(f"{self.name}: calibration batch {self._batches} has {problem}; {advice}")
        self.num_tokens += rows.shape[0]
        self._batches += 1
