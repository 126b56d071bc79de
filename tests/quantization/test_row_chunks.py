"""Work is done in row chunks: no temporary over 64 MiB, and results that do not depend on where chunks end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from quantization_helpers import ALL_GRIDS, generator, random_start
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gsq_module.quantization import relaxation
from gsq_module.quantization.grid import Grid, QuantizedWeight
from gsq_module.quantization.optimizer import RelaxedLion
from gsq_module.quantization.relaxation import MAX_TEMPORARY_BYTES, row_chunks


class Storages(TorchDispatchMode):
    """Keeps every storage that an operation returned (so that no address comes twice)."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.found[storage._cdata] = storage
        return result


@pytest.fixture
def set_threads() -> Iterator[Any]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_64_mib_is_the_limit() -> None:
    assert MAX_TEMPORARY_BYTES == 64 * 2**20


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (17408, 5120), (5120, 17408), (3, 70_000_000)])
@pytest.mark.parametrize("candidates", [2, 5])
def test_chunks_cover_the_rows_in_order_within_bounds(device: str, shape: tuple[int, int], candidates: int) -> None:
    rows, cols = shape
    chunks = list(row_chunks(rows, cols, candidates, torch.device(device)))
    assert [row for chunk in chunks for row in range(rows)[chunk]] == list(range(rows))
    tallest = max(chunk.stop - chunk.start for chunk in chunks)
    assert tallest == 1 or candidates * tallest * cols * 4 <= MAX_TEMPORARY_BYTES


@ALL_GRIDS
@pytest.mark.parametrize("logit_dtype", [torch.float32, torch.bfloat16])
def test_no_temporary_exceeds_64_mib(grid: Grid, logit_dtype: torch.dtype) -> None:
    """On the meta device, which has shapes and chunks like a GPU's and computes nothing."""
    rows, cols = 4096, 17408
    codes = torch.empty(rows, cols, dtype=torch.int8, device="meta")
    start = QuantizedWeight(codes, torch.empty(rows, cols // 128, dtype=torch.bfloat16, device="meta"))
    weight = nn.Parameter(torch.empty(rows, cols, dtype=torch.bfloat16, device="meta"))
    weight.grad = torch.empty_like(weight)
    optimizer = RelaxedLion([weight], grid, logit_dtype=logit_dtype, fused=False)
    with Storages() as storages:
        optimizer.relax(weight, start, "w")
        optimizer.step()
        optimizer.redraw(weight)
        hard = optimizer.harden(weight, torch.bfloat16)
    results = [weight, weight.grad, codes, hard.codes, *optimizer.state[weight].values()]
    kept = {tensor.untyped_storage()._cdata for tensor in results if isinstance(tensor, Tensor)}
    largest = max(storage.nbytes() for address, storage in storages.found.items() if address not in kept)
    assert MAX_TEMPORARY_BYTES // 2 < largest <= MAX_TEMPORARY_BYTES


def refine(grid: Grid, logit_dtype: torch.dtype) -> dict[str, Tensor]:
    """All results of two steps on a weight whose rows are no multiple of a vector register."""
    rows, cols = 13, 84
    weight = nn.Parameter(torch.zeros(rows, cols))
    optimizer = RelaxedLion([weight], grid, lr=1e-3, logit_dtype=logit_dtype, fused=False)
    optimizer.relax(weight, random_start(grid, rows, cols, 12), "w")
    random = generator(5)
    results = {"first sample": weight.detach().clone()}
    for _ in range(2):
        weight.grad = torch.randn(rows, cols, generator=random)
        optimizer.step()
    state = optimizer.state[weight]
    results |= {name: state[name] for name in ("logits", "momentum", "scales", "scale_momentum")}
    return results | {"sample": weight.detach(), "codes": optimizer.harden(weight, torch.bfloat16).codes}


@ALL_GRIDS
@pytest.mark.parametrize("logit_dtype", [torch.float32, torch.bfloat16])
def test_results_do_not_depend_on_chunks_or_threads(
    monkeypatch: pytest.MonkeyPatch, set_threads: Any, grid: Grid, logit_dtype: torch.dtype
) -> None:
    found = {}
    for threads, rows in ((1, 13), (1, 1), (1, 5), (2, 13), (2, 4)):
        set_threads(threads)
        monkeypatch.setattr(relaxation, "CPU_CHUNK_ELEMENTS", rows * 84)
        found[threads, rows] = refine(grid, logit_dtype)
    expected = found.pop((1, 13))
    for case, results in found.items():
        for name, result in results.items():
            assert torch.equal(result, expected[name]), (case, name)
