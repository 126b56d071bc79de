"""Codes and scales as compressed-tensors' `pack-quantized` tensors, through that library, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from compressed_tensors.compressors import PackedQuantizationCompressor, pack_to_int32, unpack_from_int32
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import (
    DEFAULT_QUANTIZATION_METHOD,
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    QuantizationStrategy,
    QuantizationType,
)
from torch import Tensor

from gsq_module.quantization.grid import Grid, QuantizedWeight

PACK_FORMAT: str = CompressionFormat.pack_quantized.value


def quantization_scheme(grid: Grid, group_size: int) -> QuantizationScheme:
    """How the library describes a grid: symmetric integers, one scale a row and group of `group_size` input columns."""
    return QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(
            num_bits=grid.storage_bits,
            type=QuantizationType.INT,
            symmetric=True,
            strategy=QuantizationStrategy.GROUP,
            group_size=group_size,
            dynamic=False,
        ),
        format=CompressionFormat.pack_quantized,
    )


def quantization_config(grid: Grid, group_size: int, ignore: Sequence[str]) -> dict[str, Any]:
    """The `quantization_config` of config.json.

    Args:
        grid: Gives the bit width.
        group_size: Input columns a scale.
        ignore: Module names of exactly the linears that stayed in float.

    Returns:
        A JSON-able dict without defaults and nulls, so that it reads the same whichever library version wrote it.
    """
    config = QuantizationConfig(
        config_groups={"group_0": quantization_scheme(grid, group_size)},
        quant_method=DEFAULT_QUANTIZATION_METHOD,
        format=PACK_FORMAT,
        quantization_status=QuantizationStatus.COMPRESSED,
        ignore=list(ignore),
    )
    return config.model_dump(mode="json", exclude_unset=True, exclude_none=True)


def pack(weight: QuantizedWeight, grid: Grid) -> dict[str, Tensor]:
    """Packs the codes as they are: nothing is rounded again.

    Args:
        weight: Codes `[out_features, in_features]` on `grid`, scales `[out_features, in_features / group_size]`.
        grid: Gives the bit width; the 1-bit and ternary grids are stored in 2 bits.

    Returns:
        `weight_packed` int32 `[out_features, ceil(in_features * bits / 32)]`, `weight_scale` in the dtype of the
        scales, `weight_shape` int64 `[2]`.

    Raises:
        ValueError: A scale is NaN or infinite.
    """
    if not weight.scales.isfinite().all():
        broken = int((~weight.scales.isfinite()).sum())
        raise ValueError(f"{broken} of {weight.scales.numel()} scales are NaN or infinite: nothing was packed")
    # The packer does not mask: a code off the grid would spill into its neighbours' bits.
    low, high = (int(end) for end in weight.codes.aminmax())
    assert grid.low <= low <= high <= grid.high, f"codes {low}..{high} are off the grid {grid.name}"
    packed = pack_to_int32(weight.codes, grid.storage_bits)
    words = math.ceil(weight.codes.shape[1] * grid.storage_bits / 32)
    assert packed.shape[1] == words, "compressed-tensors before 0.18 pads 3-bit codes to ten a word"
    return {
        "weight_packed": packed.contiguous(),
        "weight_scale": weight.scales.contiguous(),
        "weight_shape": torch.tensor(weight.codes.shape),
    }


def unpack(tensors: dict[str, Tensor], scheme: QuantizationScheme) -> Tensor:
    """The dense weight as every consumer of the format computes it.

    Args:
        tensors: `weight_packed`, `weight_scale`, `weight_shape` of one module (and what else its scheme stores).
        scheme: The scheme they were packed by.

    Returns:
        `[out_features, in_features]` in the dtype of the scales, bit for bit `QuantizedWeight.dequantize()`.
    """
    return PackedQuantizationCompressor.decompress(tensors, scheme)["weight"]


def unpack_codes(tensors: dict[str, Tensor], grid: Grid) -> Tensor:
    """The codes behind packed tensors, int8 `[out_features, in_features]`: the inverse of `pack`."""
    return unpack_from_int32(tensors["weight_packed"], grid.storage_bits, torch.Size(tensors["weight_shape"].tolist()))
