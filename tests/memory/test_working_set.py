"""Peaks of small computations, counted by hand: on tensors without data and on real ones alike."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from gsq_module.memory.working_set import WorkingSet
from gsq_module.quantization.training_ops import accumulating_in_place

KIB = 1024
SCALAR = 512


@pytest.fixture(params=["fake", "real"], autouse=True)
def tensors(request):
    """Everything in a test happens on tensors of one sort; the working set is entered under the mode."""
    with FakeTensorMode() if request.param == "fake" else nullcontext():
        yield request.param


def kib(n, **how):
    """A float32 tensor of n KiB, n rows of 256."""
    return torch.ones(n, 256, **how)


@pytest.mark.parametrize(
    ("numel", "dtype", "nbytes"),
    [
        (1, torch.int8, 512),
        (512, torch.int8, 512),
        (513, torch.int8, 1024),
        (129, torch.float32, 1024),
        (257, torch.bfloat16, 1024),
        (0, torch.float32, 0),
    ],
)
def test_sizes_are_rounded_up_as_the_allocator_rounds_them(numel, dtype, nbytes):
    with WorkingSet() as found:
        kept = torch.empty(numel, dtype=dtype)
        assert found.current == nbytes
        del kept
    assert (found.current, found.peak) == (0, nbytes)


def test_what_a_chain_leaves_behind_is_freed_and_what_was_there_does_not_count():
    x = kib(4)
    with WorkingSet() as found:
        y = ((x + 1) * 2).exp()
        # each step holds its input and its output
        assert (found.current, found.peak) == (4 * KIB, 8 * KIB)
        z = y @ torch.ones(256, 512)
        # the factor is gone, and the product is twice as wide
        assert (found.current, found.peak) == ((4 + 8) * KIB, (4 + 512 + 8) * KIB)
        del x
        assert found.current == 12 * KIB
        del y, z
    assert found.current == 0


def test_what_dies_after_the_end_is_taken_off_and_no_peak_comes_after_it():
    with WorkingSet() as found:
        y = kib(3)
    z = y + y
    assert (found.current, found.peak) == (3 * KIB, 3 * KIB)
    del y
    assert found.current == 0
    assert z.shape == (3, 256)


def test_views_count_once_and_hold_the_whole_storage():
    x = kib(4)
    with WorkingSet() as found:
        views = [x[1:], x.t(), x.view(-1), *x.split(2), x.expand(4, 256)]
        assert (found.current, found.peak) == (0, 0)
        y = x * 2
        views = [y.t(), y[:, ::2], *y.chunk(4), y.detach(), y.unsqueeze(0).expand(7, 4, 256)]
        del y
        assert (found.current, found.peak) == (4 * KIB, 4 * KIB)
        del views[:-1]
        assert found.current == 4 * KIB
        views.clear()
        assert found.current == 0


def test_in_place_operations_make_nothing():
    x, into = kib(2), kib(2)
    with WorkingSet() as found:
        x.add_(1).mul_(x).clamp_(min=0)
        torch.mul(x, 2, out=into)
        into.copy_(x)
        into[0].zero_()
        assert found.peak == 0
        y = x.exp()
        y.sub_(x).square_()
        assert (found.current, found.peak) == (2 * KIB, 2 * KIB)
    del y


def test_every_result_of_an_operation_counts():
    x = kib(4)
    with WorkingSet() as found:
        values, indices = x.sort(dim=1)
        assert found.current == (4 + 8) * KIB  # float32 values, int64 indices
        del values
        assert found.current == 8 * KIB
        del indices


def test_reset_forgets_the_peak_and_keeps_what_is_alive():
    with WorkingSet() as found:
        kept = kib(2)
        kib(16)  # gone at once
        assert (found.current, found.peak) == (2 * KIB, 18 * KIB)
        found.reset()
        assert (found.current, found.peak) == (2 * KIB, 2 * KIB)
        other = kib(1)
        assert found.peak == 3 * KIB
        found.reset()
        del kept
        assert (found.current, found.peak) == (KIB, 3 * KIB)
        del other


def test_an_address_used_again_counts_again():
    with WorkingSet() as found:
        for n in (1, 3, 2, 3, 1):
            x = kib(n)
            assert found.current == n * KIB
            del x
        assert found.current == 0


def test_tensors_that_autograd_saves_are_held_though_nobody_names_them():
    x = kib(4, requires_grad=True)
    with WorkingSet() as found:
        y = (x + 1).sin()  # saves its input
        assert found.current == (4 + 4) * KIB
        del y
        assert found.current == 0
        y = (x + 1).exp()  # saves its result
        assert found.current == 4 * KIB
        z = y + 1  # saves nothing
        del y
        assert found.current == (4 + 4) * KIB
        del z
        assert found.current == 0
        with torch.no_grad():
            y = (x + 1).sin()
            assert found.current == 4 * KIB
        del y


def test_backward_of_a_small_net_by_hand():
    # x [16, 256], weight [256, 64]: x 16 KiB, weight 64 KiB, hidden [16, 64] 4 KiB
    x, weight = kib(16), torch.ones(256, 64, requires_grad=True)
    with WorkingSet() as found:
        loss = (x @ weight).exp().sum()
        # exp holds its input and its result for a moment; its result stays for the backward pass
        assert (found.current, found.peak) == (4 * KIB + SCALAR, 8 * KIB)
        found.reset()
        loss.backward()
        # the loss and its gradient; then exp's result and the gradient before it; then that and the weight's
        assert found.peak == 2 * SCALAR + max(4 + 4, 4 + 64) * KIB
        assert found.current == SCALAR + 64 * KIB
        found.reset()
        loss = (x @ weight).exp().sum()
        loss.backward()
        # the second gradient stands beside the first until it is added
        assert found.peak - 64 * KIB == 2 * SCALAR + (4 + 64) * KIB
        assert found.current == SCALAR + 64 * KIB
        del loss
        weight.grad = None
        assert found.current == 0


def test_a_gradient_that_is_added_in_place_needs_no_second_buffer():
    x, linear = kib(16), nn.Linear(256, 64, bias=False)
    with WorkingSet() as found, accumulating_in_place([linear]):
        linear(x).exp().sum().backward()
        assert found.current == 64 * KIB
        found.reset()
        linear(x).exp().sum().backward()
        # loss and its gradient, exp's result, and the gradient before it
        assert found.peak - 64 * KIB == 2 * SCALAR + (4 + 4) * KIB
        assert found.current == 64 * KIB
