"""Staging on a CUDA device under heavy overlap: what is read and written is what plain copies give, bit for bit."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from gsq_module.streaming.staging import Staging

pytestmark = pytest.mark.gpu

SAMPLES, SEQ_LEN, HIDDEN = 96, 256, 1024
BATCH = 4
CYCLES = 5_000_000
"""A kernel that does nothing for some milliseconds: the host is far ahead of the device."""


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def states(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SAMPLES, SEQ_LEN, HIDDEN, generator=generator).to(dtype)


def batches(shuffle: bool) -> list[list[int]] | list[slice]:
    if not shuffle:
        return [slice(first, min(first + BATCH, SAMPLES)) for first in range(0, SAMPLES, BATCH)]
    rows = random.Random(1).sample(range(SAMPLES), SAMPLES)
    return [rows[:1], *(rows[first : first + BATCH] for first in range(1, SAMPLES, BATCH))]


def churn(device: torch.device) -> None:
    """Keep the device busy, and overwrite whatever memory the allocator takes for free."""
    torch.cuda._sleep(CYCLES)
    for rows in (1, BATCH, BATCH):
        torch.full((rows, SEQ_LEN, HIDDEN), float("nan"), dtype=torch.bfloat16, device=device)


@pytest.mark.parametrize("pin_memory", [True, False])
@pytest.mark.parametrize("shuffle", [True, False])
def test_reads(shuffle, pin_memory, device):
    sources = [states(), states(torch.float32, seed=1), states(seed=2)[:, :, 0].float()]
    result = [torch.zeros_like(source, device=device) for source in sources]
    for rows, tensors in Staging(device, pin_memory).read(sources, batches(shuffle)):
        churn(device)
        for tensor, whole in zip(tensors, result, strict=True):
            whole[rows] = tensor
        del tensor, tensors
        churn(device)
    for whole, source in zip(result, sources, strict=True):
        assert torch.equal(whole.cpu(), source)


@pytest.mark.parametrize("pin_memory", [True, False])
def test_in_place_pass(pin_memory, device):
    """Propagation and capture: read, compute, write back and to a second tensor; sources are dropped at once."""
    store, other = states(), torch.zeros(SAMPLES, SEQ_LEN, HIDDEN, dtype=torch.float32)
    expected = torch.cat([(states()[rows].to(device) * 3 + 1).cpu() for rows in batches(False)])
    staging = Staging(device, pin_memory)
    with staging.writer() as writer:
        for rows, (hidden,) in staging.read([store], batches(False)):
            churn(device)
            result = hidden * 3 + 1
            writer.write(store, rows, result)
            writer.write(other, rows, result.float() * 2)
            del hidden, result
            churn(device)
    assert torch.equal(store, expected)
    assert torch.equal(other, expected.float() * 2)


def test_a_pass_that_is_left_early_leaves_no_copy_behind(device):
    """Its memory goes to the next tensor at once."""
    staging, source = Staging(device), states()
    for _ in range(10):
        reading = staging.read([source], batches(True))
        _, (hidden,) = next(reading)
        torch.cuda._sleep(CYCLES)
        reading.close()
        del hidden
        taken = [torch.full((BATCH, SEQ_LEN, HIDDEN), 7.0, dtype=torch.bfloat16, device=device) for _ in range(4)]
        assert all(bool((tensor == 7.0).all()) for tensor in taken)


def test_stores_on_the_device_are_not_copied(device):
    source = states().to(device)
    staging = Staging(device)
    for rows, (hidden,) in staging.read([source], batches(False)):
        assert hidden.data_ptr() == source[rows].data_ptr()
    for rows, (hidden,) in staging.read([source], batches(True)):
        assert torch.equal(hidden, source[torch.tensor(rows, device=device)])


def test_pinned_memory_is_a_few_buffers(device):
    """Not the store: 50 MB here, of which a pass pins two batches."""
    counted: list[int] = []
    empty = torch.empty

    def watch(*args, **kwargs):
        made = empty(*args, **kwargs)
        if kwargs.get("pin_memory"):
            assert made.is_pinned()
            counted.append(made.nbytes)
        return made

    source = states()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", watch)
        for _ in Staging(device).read([source], batches(True)):
            pass
        assert sum(counted) == 2 * BATCH * SEQ_LEN * HIDDEN * 2
        counted.clear()
        for _ in Staging(device, pin_memory=False).read([source], batches(True)):
            pass
        assert counted == []


def test_the_device_does_not_wait_for_copies(device):
    """The host is ahead: every copy of the pass is under way or done before the device has computed the last batch."""
    staging, source = Staging(device), states()
    torch.cuda.synchronize(device)
    total = torch.zeros((), dtype=torch.float64, device=device)
    ends = []
    for _, (hidden,) in staging.read([source], batches(True)):
        torch.cuda._sleep(4 * CYCLES)
        total += hidden.double().sum()
        ends.append(torch.cuda.current_stream(device).record_event())
    assert not ends[-1].query(), "the host waited for the device's last batch"
    assert float(total) == pytest.approx(float(source.double().sum()), rel=1e-6, abs=1e-3)
