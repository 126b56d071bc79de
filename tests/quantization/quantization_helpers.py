"""Inputs and independent restatements that several tests of this folder share."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gsq_module.quantization.grid import GRIDS, Grid, QuantizedWeight
from gsq_module.quantization.hessian import Hessian
from gsq_module.quantization.noise import exponential_shares, random_bits

ALL_GRIDS = pytest.mark.parametrize("grid", GRIDS.values(), ids=lambda grid: grid.name)


def levels_of(grid: Grid) -> Tensor:
    return torch.arange(grid.low, grid.high + 1, grid.step)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_start(grid: Grid, rows: int, cols: int, group_size: int, seed: int = 0) -> QuantizedWeight:
    """Random codes of the grid, every level among them, and bf16 scales of both signs."""
    random = generator(seed)
    levels = levels_of(grid)
    codes = levels[torch.randint(len(levels), (rows, cols), generator=random)].to(torch.int8)
    codes.view(-1)[: len(levels)] = levels
    scales = (torch.rand(rows, cols // group_size, generator=random) + 0.5) / 50
    scales *= torch.randint(2, scales.shape, generator=random) * 2 - 1
    return QuantizedWeight(codes, scales.to(torch.bfloat16))


def candidate_values(grid: Grid, first: Tensor) -> Tensor:
    """float64 `[K, rows, cols]`: what each candidate of each weight stands for, written out."""
    return torch.stack([first.double() + k * grid.step for k in range(grid.num_candidates)])


def relaxed_weight(
    logits: Tensor, scales: Tensor, values: Tensor, key: tuple[int, int], temperature: float, logit_scale: float
) -> Tensor:
    """The relaxation as autograd sees it: differentiable in logits `[K, rows, cols]` and scales `[rows, groups]`."""
    bits = random_bits(key, 0, logits[0].numel(), len(logits) - 1, "cpu")
    noise = -exponential_shares(bits, torch.float64).log().view(logits.shape)
    p = torch.softmax((logit_scale * logits + noise) / temperature, dim=0)
    return scales.repeat_interleave(logits.shape[2] // scales.shape[1], dim=1) * (values * p).sum(0)


def correlated_inputs(tokens: int, features: int, seed: int = 0) -> Tensor:
    """Activations with a few strong directions and features of unequal size, as a transformer's are."""
    random = generator(seed)
    mixing = torch.randn(features, features, generator=random) / features**0.5
    mixing[:6] *= 5
    spread = torch.rand(features, generator=random) * 2 + 0.1
    return torch.randn(tokens, features, generator=random) @ mixing * spread


def hessian_of(inputs: Tensor, name: str = "linear") -> Hessian:
    hessian = Hessian(name, inputs.shape[-1], "cpu")
    hessian.add(inputs)
    return hessian


def output_error(weight: Tensor, quantized: QuantizedWeight, inputs: Tensor) -> float:
    difference = weight.double() - quantized.dequantize().double()
    return float((inputs.double() @ difference.T).square().sum())
