"""Codes and scales as compressed-tensors' `pack-quantized` tensors, through that library, and back."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
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

from gsq_module.problems import NumericalError
from gsq_module.quantization.grid import Grid, QuantizedWeight

PACK_FORMAT: str = CompressionFormat.pack_quantized.value
CHUNK_WEIGHTS = 2**24
"""Weights that the library packs or unpacks at once: it takes several int32 tensors of their size for it."""


@dataclass(frozen=True)
class OuterPart:
    """A matrix around the blocks that a recipe quantizes.

    Attributes:
        kind: `embedding` or `head`.
        module: Module path.
        copy: Module path of a tied head, which the export gives the same codes.
        grid: Its grid.
        group_size: Input columns a scale.
        shape: `(vocabulary, hidden_size)`.
    """

    kind: str
    module: str
    copy: str | None
    grid: Grid
    group_size: int
    shape: tuple[int, int]

    def packed_bytes(self, scale_itemsize: int) -> int:
        """Codes and scales of one copy."""
        rows, columns = self.shape
        words = math.ceil(columns * self.grid.storage_bits / 32)
        return 4 * rows * words + rows * (columns // self.group_size) * scale_itemsize

    @property
    def modules(self) -> list[str]:
        """Module paths in the export."""
        return [self.module] if self.copy is None else [self.module, self.copy]

    @property
    def targets(self) -> list[str]:
        """What a config group calls it. Engines may build an embedding without its name, so it goes by its class; a
        head's name they may prefix."""
        names = ["Embedding"] if self.kind == "embedding" else [_by_name(self.module)]
        return names if self.copy is None else [*names, _by_name(self.copy)]


def _by_name(module: str) -> str:
    return f"re:.*{re.escape(module.rpartition('.')[2])}$"


def quantization_scheme(grid: Grid, group_size: int, targets: Sequence[str] = ("Linear",)) -> QuantizationScheme:
    """How the library describes a grid: symmetric integers, one scale a row and group of `group_size` input columns."""
    return QuantizationScheme(
        targets=list(targets),
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


def quantization_config(
    grid: Grid, group_size: int, ignore: Sequence[str], outer: Sequence[OuterPart] = ()
) -> dict[str, Any]:
    """The `quantization_config` of config.json.

    Args:
        grid: Gives the bit width.
        group_size: Input columns a scale.
        ignore: Module names of exactly the linears that stayed in float.
        outer: Embedding and head, where they are quantized: `group_1`, and `group_2` where their formats differ.

    Returns:
        A JSON-able dict without defaults and nulls, so that it reads the same whichever library version wrote it.
    """
    by_format: dict[tuple[Grid, int], list[str]] = {}
    for part in outer:
        by_format.setdefault((part.grid, part.group_size), []).extend(part.targets)
    groups: dict[str, QuantizationScheme | list[str]] = {
        f"group_{number}": quantization_scheme(*how, targets)
        for number, (how, targets) in enumerate(by_format.items(), 1)
    }
    # Last: the library takes a head for one of the "Linear" ones, and warns that its own target matches nothing,
    # where that comes first.
    groups["group_0"] = quantization_scheme(grid, group_size)
    config = QuantizationConfig(
        config_groups=groups,
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
        NumericalError: A scale is NaN or infinite.
    """
    if not weight.scales.isfinite().all():
        broken = int((~weight.scales.isfinite()).sum())
        raise NumericalError(f"{broken} of {weight.scales.numel()} scales are NaN or infinite: nothing was packed")
    # The packer does not mask: a code off the grid would spill into its neighbours' bits.
    low, high = (int(end) for end in weight.codes.aminmax())
    assert grid.low <= low <= high <= grid.high, f"codes {low}..{high} are off the grid {grid.name}"
    # By rows, of which each is packed alone: the packer takes some twelve bytes a code beside the result.
    packed = torch.cat([pack_to_int32(codes, grid.storage_bits) for codes in weight.codes.split(_rows(weight.codes))])
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
    rows, columns = tensors["weight_shape"].tolist()
    dense = torch.empty(rows, columns, dtype=tensors["weight_scale"].dtype)
    step = _rows(dense)
    for begin in range(0, rows, step):
        part = {name: value[begin : begin + step] for name, value in tensors.items() if name != "weight_shape"}
        part["weight_shape"] = torch.tensor([min(step, rows - begin), columns])
        dense[begin : begin + step] = PackedQuantizationCompressor.decompress(part, scheme)["weight"]
    return dense


def unpack_codes(tensors: dict[str, Tensor], grid: Grid) -> Tensor:
    """The codes behind packed tensors, int8 `[out_features, in_features]`: the inverse of `pack`."""
    rows, columns = tensors["weight_shape"].tolist()
    codes = torch.empty(rows, columns, dtype=torch.int8)
    step = _rows(codes)
    for begin in range(0, rows, step):
        packed = tensors["weight_packed"][begin : begin + step]
        codes[begin : begin + step] = unpack_from_int32(packed, grid.storage_bits, torch.Size((len(packed), columns)))
    return codes


def _rows(matrix: Tensor) -> int:
    """Rows of a matrix that go through the library at once."""
    return max(1, CHUNK_WEIGHTS // matrix.shape[1])
