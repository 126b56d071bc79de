"""The grids a weight is quantized to: code values, storage width, candidates of the relaxation, rounding.

A grid is symmetric integer quantization without a zero point: `weight = code x scale`, one scale for each row and group
of `group_size` input columns. `compressed-tensors` stores a code as `code + 2^(storage_bits - 1)`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

WINDOW = 5
"""Candidates of the relaxation on grids with more levels than this: a window around the initial code (design.md)."""


@dataclass(frozen=True)
class Grid:
    """Code values `low, low + step, ..., high` and how they are stored.

    Attributes:
        name: What the recipe's keys say: `1`, `ternary`, `2`, `3`, `4` or `8`.
        low: Smallest code.
        high: Largest code.
        step: Distance of neighbouring codes (2 on the 1-bit grid, which has no zero).
        storage_bits: Bits a code takes in the export. The 1-bit and ternary grids take 2: the 1-bit grid of
            compressed-tensors is {-1, 0}.
    """

    name: str
    low: int
    high: int
    step: int
    storage_bits: int

    @property
    def num_levels(self) -> int:
        return (self.high - self.low) // self.step + 1

    @property
    def num_candidates(self) -> int:
        """Levels the relaxation of one weight chooses from."""
        return min(self.num_levels, WINDOW)

    @property
    def is_windowed(self) -> bool:
        """Whether the candidates differ from weight to weight."""
        return self.num_levels > WINDOW

    @property
    def is_lopsided(self) -> bool:
        """Whether one sign of the scale reaches further than the other, so that a scale search must try both."""
        return self.low != -self.high

    def nearest(self, values: Tensor) -> Tensor:
        """Nearest code of `values = weight / scale`.

        Args:
            values: Any floating dtype and shape.

        Returns:
            Codes in the dtype of `values` (integers; the caller narrows them to int8).
        """
        if self.step == 1:
            return values.round().clamp_(self.low, self.high)
        levels = (values - self.low).div_(self.step).round_().clamp_(0, self.num_levels - 1)
        return levels.mul_(self.step).add_(self.low)

    def first_candidate(self, codes: Tensor) -> Tensor:
        """Lowest code of each weight's window.

        Args:
            codes: int8, the initial codes.

        Returns:
            int8 of the same shape; a weight's candidates are `first + k * step` for `k` in `range(num_candidates)`. On
            grids without a window all entries are `low`.
        """
        if not self.is_windowed:
            return torch.full_like(codes, self.low)
        return (codes - WINDOW // 2).clamp_(self.low, self.high - WINDOW + 1)


GRIDS: dict[int | str, Grid] = {
    1: Grid("1", -1, 1, 2, 2),
    "ternary": Grid("ternary", -1, 1, 1, 2),
    2: Grid("2", -2, 1, 1, 2),
    3: Grid("3", -4, 3, 1, 3),
    4: Grid("4", -8, 7, 1, 4),
}
"""Grids by the value of the recipe key `model.bits`."""

OUTER_GRIDS: dict[int, Grid] = {4: GRIDS[4], 8: Grid("8", -128, 127, 1, 8)}
"""Grids of embedding and head. They are rounded, not refined: the relaxation does not know the 8-bit one."""


@dataclass
class QuantizedWeight:
    """Hard codes and scales of one linear layer: what is stored, exported and evaluated.

    Attributes:
        codes: int8 `[out_features, in_features]`.
        scales: `[out_features, in_features / group_size]` in the export's dtype; may be negative, never zero or NaN.
    """

    codes: Tensor
    scales: Tensor

    @property
    def group_size(self) -> int:
        return self.codes.shape[1] // self.scales.shape[1]

    def dequantize(self) -> Tensor:
        """The weight `[out_features, in_features]` in the dtype of the scales, bit for bit what consumers compute."""
        out_features, in_features = self.codes.shape
        grouped = self.codes.view(out_features, -1, self.group_size).to(self.scales.dtype)
        return (grouped * self.scales.unsqueeze(-1)).view(out_features, in_features)

    def to(self, device: torch.device | str) -> QuantizedWeight:
        return QuantizedWeight(self.codes.to(device), self.scales.to(device))
