from __future__ import annotations

import torch

from gsq_module.quantization.grid import Grid, QuantizedWeight


def random_weight(grid: Grid, out_features: int, in_features: int, group_size: int, seed: int = 0) -> QuantizedWeight:
    """Random codes of the grid and bf16 scales of both signs."""
    generator = torch.Generator().manual_seed(seed)
    levels = torch.arange(grid.low, grid.high + 1, grid.step, dtype=torch.int8)
    codes = levels[torch.randint(len(levels), (out_features, in_features), generator=generator)]
    scales = torch.randn(out_features, in_features // group_size, generator=generator).to(torch.bfloat16) / 50
    return QuantizedWeight(codes, scales)
