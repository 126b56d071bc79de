from __future__ import annotations

import json
import math

import pytest
import torch
from export_helpers import random_weight
from torch import Tensor

from gsq_module.export import packing
from gsq_module.export.packing import pack, quantization_config, quantization_scheme, unpack, unpack_codes
from gsq_module.quantization.grid import GRIDS, OUTER_GRIDS, Grid

ALL_GRIDS = pytest.mark.parametrize("grid", [*GRIDS.values(), OUTER_GRIDS[8]], ids=lambda grid: grid.name)


def code_by_hand(packed: Tensor, row: int, column: int, bits: int) -> int:
    """The format's definition: the row is one bit stream, least significant first, of `code + 2^(bits - 1)`."""
    stream = sum((int(word) & 0xFFFFFFFF) << (32 * at) for at, word in enumerate(packed[row]))
    return (stream >> (column * bits) & (1 << bits) - 1) - (1 << bits - 1)


@ALL_GRIDS
def test_every_code_lies_where_the_format_says(grid: Grid) -> None:
    weight = random_weight(grid, 5, 80, 16)
    packed = pack(weight, grid)["weight_packed"]
    assert packed.dtype == torch.int32
    assert packed.shape == (5, math.ceil(80 * grid.storage_bits / 32))
    found = [[code_by_hand(packed, row, column, grid.storage_bits) for column in range(80)] for row in range(5)]
    assert found == weight.codes.tolist()


@ALL_GRIDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("group_size", [16, 80])
def test_unpacking_gives_the_dequantized_weight_bit_for_bit(grid: Grid, dtype: torch.dtype, group_size: int) -> None:
    weight = random_weight(grid, 33, 80, group_size)
    weight.scales = weight.scales.to(dtype)
    assert (weight.scales < 0).any(), "negative scales are the point"
    dense = unpack(pack(weight, grid), quantization_scheme(grid, group_size))
    assert dense.dtype == dtype
    assert torch.equal(dense, weight.dequantize())


@ALL_GRIDS
def test_large_matrices_go_through_the_library_a_few_rows_at_a_time(grid: Grid, monkeypatch) -> None:
    weight = random_weight(grid, 33, 80, 16)
    whole, rows = pack(weight, grid), []
    monkeypatch.setattr(packing, "CHUNK_WEIGHTS", 4 * 80 + 79)
    library = packing.pack_to_int32
    monkeypatch.setattr(packing, "pack_to_int32", lambda codes, bits: rows.append(len(codes)) or library(codes, bits))
    packed = pack(weight, grid)
    assert rows == [4] * 8 + [1]
    assert all(torch.equal(packed[name], whole[name]) for name in whole)
    assert torch.equal(unpack_codes(packed, grid), weight.codes)
    assert torch.equal(unpack(packed, quantization_scheme(grid, 16)), weight.dequantize())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scales_that_are_not_finite_are_refused(value: float) -> None:
    weight = random_weight(GRIDS[2], 4, 64, 32)
    weight.scales[2, 1] = value
    with pytest.raises(ValueError, match="1 of 8 scales"):
        pack(weight, GRIDS[2])


def test_a_code_off_the_grid_does_not_reach_its_neighbours() -> None:
    weight = random_weight(GRIDS[2], 4, 64, 32)
    weight.codes[0, 0] = 2
    with pytest.raises(AssertionError, match="off the grid"):
        pack(weight, GRIDS[2])


@pytest.mark.parametrize(("bits", "stored"), [(1, 2), ("ternary", 2), (2, 2), (3, 3), (4, 4)])
def test_the_config_says_what_vllm_and_transformers_read(bits: int | str, stored: int) -> None:
    config = quantization_config(GRIDS[bits], 64, ["lm_head"])
    assert json.loads(json.dumps(config)) == config
    (group,) = config["config_groups"].values()
    assert (
        group["weights"].items()
        >= {
            "num_bits": stored,
            "type": "int",
            "symmetric": True,
            "strategy": "group",
            "group_size": 64,
            "dynamic": False,
        }.items()
    )
    assert group["targets"] == ["Linear"]
    assert {key: value for key, value in config.items() if key != "config_groups"} == {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
    }
