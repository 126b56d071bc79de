"""Rows 1-13 and 15 of the field's cases, as exceptions alone; the callback's tests raise them inside a fit."""

from __future__ import annotations

import asyncio
import errno
import subprocess
import sys

import pytest
import torch
from torch.utils.data._utils.pin_memory import pin_memory

from gsq_module.memory.allocator_setting import AllocatorSetting
from gsq_module.memory.oom import Evidence, Kind, classify, exit_code_of, find_cause, remember, without_impossible

GIB = 2**30
FULL = Evidence(free=20 * 2**20, total=12 * GIB)
ROOMY = Evidence(free=60 * GIB, total=140 * GIB)
UNKNOWN = Evidence()
OOM_TEXT = (
    "CUDA out of memory. Tried to allocate 680.00 MiB. GPU 0 has a total capacity of 11.94 GiB of which 123.00 MiB is "
    "free. Including non-PyTorch memory, this process has 17179869184.00 GiB memory in use."
)


def raised(error, cause=None):
    """The error as a handler sees it, with frames."""
    try:
        raise error from cause
    except BaseException as caught:
        return caught


def raised_while_handling(earlier, later, hidden=False):
    try:
        try:
            raise earlier
        except BaseException:
            if hidden:
                raise later from None
            raise later  # noqa: B904 - as code that has not thought of the first error
    except BaseException as caught:
        return caught


def out_of_resources():
    return pytest.importorskip("triton.runtime.errors").OutOfResources(66560, 65536, "shared memory")


@pytest.mark.parametrize("evidence", [FULL, ROOMY, UNKNOWN])
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError(OOM_TEXT), Kind.DEVICE_MEMORY),
        (RuntimeError("CUDA error: out of memory"), Kind.DEVICE_MEMORY),
        (torch.AcceleratorError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`"), Kind.DEVICE_MEMORY),
        (RuntimeError("CUDA driver error: out of memory"), Kind.DEVICE_MEMORY),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
            Kind.DEVICE_MEMORY,
        ),
        (RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED"), Kind.DEVICE_MEMORY),
        (RuntimeError("MPS backend out of memory (MPS allocated: 18.13 GB). Tried to allocate"), Kind.DEVICE_MEMORY),
        (RuntimeError("CUDA driver error: device not ready"), Kind.DEVICE_MEMORY_SUSPECTED),
        (
            RuntimeError('!handles_.at(i) INTERNAL ASSERT FAILED at "/c10/cuda/CUDACachingAllocator.cpp":421'),
            Kind.DEVICE_MEMORY_SUSPECTED,
        ),
        (
            RuntimeError('NVML_SUCCESS == r INTERNAL ASSERT FAILED at "/c10/cuda/CUDACachingAllocator.cpp":1124'),
            Kind.DEVICE_MEMORY_SUSPECTED,
        ),
        (RuntimeError("NVML_SUCCESS == r INTERNAL ASSERT FAILED"), Kind.DEVICE_MEMORY_SUSPECTED),
        (torch.distributed.DistBackendError("NCCL error ... Cuda failure 2 'out of memory'"), Kind.NCCL_MEMORY),
        (torch.distributed.DistBackendError("NCCL error ... unhandled cuda error"), Kind.NCCL_MEMORY_SUSPECTED),
        (RuntimeError("NCCL error in: ProcessGroupNCCL.cpp: out of memory"), Kind.NCCL_MEMORY),
        (MemoryError(), Kind.HOST_MEMORY),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), Kind.HOST_MEMORY),
        (RuntimeError("torch.UntypedStorage: Cannot allocate memory"), Kind.HOST_MEMORY),
        (RuntimeError("Triton Error: out of resource: shared memory, Required: 66560"), Kind.KERNEL_CONFIGURATION),
        (RuntimeError("CUDA error: invalid configuration argument"), Kind.KERNEL_CONFIGURATION),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), Kind.DRIVER_FAULT),
        (RuntimeError("CUDA error: device-side assert triggered"), Kind.DRIVER_FAULT),
        (torch.AcceleratorError("CUDA error: unknown error"), Kind.DRIVER_FAULT),
        (torch.AcceleratorError("a text of tomorrow's driver"), Kind.DRIVER_FAULT),
        (torch.linalg.LinAlgError("linalg.cholesky: the input is not positive-definite"), Kind.NUMERICAL),
        (RuntimeError("Function 'MulBackward0' returned nan values in its 0th output."), Kind.NUMERICAL),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), Kind.OTHER),
        (RuntimeError("DataLoader worker is killed by signal: Bus error. ... insufficient shared memory"), Kind.OTHER),
        (OSError(errno.ENOSPC, "No space left on device"), Kind.OTHER),
        (ValueError("the plan says CUDA out of memory: lower data.microbatch_size"), Kind.OTHER),
        (KeyboardInterrupt(), Kind.OTHER),
    ],
    ids=repr,
)
def test_class_does_not_depend_on_free_memory(error, kind, evidence):
    assert classify(raised(error), evidence).kind is kind


@pytest.mark.parametrize(
    "text",
    [
        "CUDA driver error: invalid argument",
        "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR",
    ],
)
def test_where_the_text_says_nothing_free_memory_decides(text):
    assert classify(RuntimeError(text), FULL).kind is Kind.DEVICE_MEMORY_SUSPECTED
    assert classify(RuntimeError(text), ROOMY).kind is Kind.DRIVER_FAULT
    assert "60.00 GiB of 140.00 GiB" in classify(RuntimeError(text), ROOMY).reason
    assert classify(RuntimeError(text), UNKNOWN).kind is Kind.DRIVER_FAULT


def test_kernel_that_asks_for_too_much_shared_memory_is_known_by_type():
    verdict = classify(out_of_resources(), FULL)
    assert verdict.kind is Kind.KERNEL_CONFIGURATION
    assert "66560" in verdict.message


@pytest.mark.parametrize(
    ("code", "kind"), [(2, Kind.DEVICE_MEMORY), (600, Kind.DEVICE_MEMORY_SUSPECTED), (700, Kind.DRIVER_FAULT)]
)
def test_error_code_of_the_accelerator_counts_before_its_text(code, kind):
    error = torch.AcceleratorError("a text of tomorrow's driver")
    error.error_code = code
    assert classify(error, ROOMY).kind is kind


@pytest.mark.parametrize("text", ["CUDA error: invalid argument", "CUDA error: out of memory"])
@pytest.mark.parametrize("error_type", [RuntimeError, torch.AcceleratorError])
class TestPinnedMemory:
    def test_raised_in_torchs_function(self, error_type, text):
        class Batch:
            def pin_memory(self):
                raise error_type(text)

        with pytest.raises(error_type) as caught:
            pin_memory(Batch())
        assert classify(caught.value, FULL).kind is Kind.PINNED_MEMORY

    def test_raised_by_a_method_without_a_frame(self, error_type, text):
        # Tensor.pin_memory is C code: only the statement that calls it shows it. So is a Future's result.
        future = asyncio.Future(loop=asyncio.new_event_loop())
        future.set_exception(error_type(text))

        class Batch:
            pin_memory = future.result

        def stage_microbatch():
            return Batch.pin_memory()

        with pytest.raises(error_type) as caught:
            stage_microbatch()
        assert "pin_memory" not in [entry.name for entry in caught.traceback]
        assert classify(caught.value, FULL).kind is Kind.PINNED_MEMORY

    def test_from_the_loaders_thread(self, error_type, text):
        error = error_type(f"Caught {error_type.__name__} in pin memory thread for device 0.\nOriginal ... {text}")
        assert classify(error, FULL).kind is Kind.PINNED_MEMORY

    def test_the_same_text_from_elsewhere(self, error_type, text):
        assert classify(raised(error_type(text)), FULL).kind is not Kind.PINNED_MEMORY


def test_kernel_fault_that_surfaces_in_pin_memory_is_none_of_pinned_memory():
    class Batch:
        def pin_memory(self):
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(torch.AcceleratorError) as caught:
        pin_memory(Batch())
    assert classify(caught.value, FULL).kind is Kind.DRIVER_FAULT


def test_host_allocation_that_really_fails():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 48)
    verdict = classify(caught.value, UNKNOWN)
    assert verdict.kind is Kind.HOST_MEMORY
    assert (verdict.asked_bytes, verdict.asked) == (2**50, "1024.00 TiB")


class TestChains:
    def test_wrapped_twice(self):
        oom = torch.OutOfMemoryError(OOM_TEXT)
        once = raised(RuntimeError("unit mlp failed"), oom)
        twice = raised(ValueError("block 3 failed"), once)
        verdict, cause = find_cause(twice, UNKNOWN)
        assert (verdict.kind, cause) == (Kind.DEVICE_MEMORY, oom)
        assert (verdict.error_type, verdict.message, verdict.asked_bytes) == ("OutOfMemoryError", OOM_TEXT, 680 * 2**20)
        assert exit_code_of(twice) == Kind.DEVICE_MEMORY.exit_code

    def test_while_another_error_is_handled(self):
        oom = torch.OutOfMemoryError(OOM_TEXT)
        error = raised_while_handling(torch.linalg.LinAlgError("not positive-definite"), oom)
        assert find_cause(error, UNKNOWN) == (classify(oom, UNKNOWN), oom)

    @pytest.mark.parametrize(
        "later",
        [
            RuntimeError("CUDA driver error: device not ready"),
            torch.AcceleratorError("CUDA error: unknown"),
            OSError(errno.ENOSPC, "disk"),
        ],
    )
    def test_error_of_the_cleanup_is_not_the_cause(self, later):
        oom = torch.OutOfMemoryError(OOM_TEXT)
        assert find_cause(raised_while_handling(oom, later), ROOMY)[1] is oom

    def test_what_the_author_hid_stays_hidden(self):
        other = RuntimeError("the retry failed for another reason")
        error = raised_while_handling(torch.OutOfMemoryError(OOM_TEXT), other, hidden=True)
        assert classify(error, UNKNOWN).kind is Kind.OTHER

    def test_group_as_python_3_11_and_its_backport_make_it(self):
        class Group(Exception):
            exceptions = (KeyError("x"), raised(RuntimeError("rank 1"), torch.OutOfMemoryError(OOM_TEXT)))

        assert classify(Group(), UNKNOWN).kind is Kind.DEVICE_MEMORY
        if sys.version_info >= (3, 11):
            group = ExceptionGroup("ranks", list(Group.exceptions))  # noqa: F821
            assert classify(group, UNKNOWN).kind is Kind.DEVICE_MEMORY

    def test_circle_ends(self):
        first, second = RuntimeError("a"), RuntimeError("b")
        first.__cause__, second.__cause__ = second, first
        assert classify(first, UNKNOWN).kind is Kind.OTHER

    def test_interrupt_while_an_error_is_handled_is_an_interrupt(self):
        error = raised_while_handling(torch.OutOfMemoryError(OOM_TEXT), KeyboardInterrupt())
        assert classify(error, UNKNOWN).kind is Kind.OTHER


def test_remembered_verdict_outlives_the_state_it_came_from():
    error = RuntimeError("CUDA driver error: invalid argument")
    remember(error, classify(error, FULL))
    assert classify(error, ROOMY).kind is Kind.DEVICE_MEMORY_SUSPECTED
    assert exit_code_of(raised(RuntimeError("wrapped"), error)) == Kind.DEVICE_MEMORY_SUSPECTED.exit_code


@pytest.mark.parametrize(("expandable", "named"), [(True, True), (False, False)])
def test_reason_names_expandable_segments_only_where_they_are_on(expandable, named):
    evidence = Evidence(setting=AllocatorSetting("", "", expandable_segments=expandable, wsl=True))
    reason = classify(RuntimeError("CUDA driver error: device not ready"), evidence).reason
    assert ("expandable" in reason) is named


@pytest.mark.parametrize(
    ("message", "size", "text"),
    [
        ("Tried to allocate 680.00 MiB. GPU 0 has", 680 * 2**20, "680.00 MiB"),
        ("Tried to allocate 2.50 GiB (GPU 0; 11.94 GiB total", 5 * 2**29, "2.50 GiB"),
        ("max allowed: 18.13 GB). Tried to allocate 20.00 MB on private pool.", 20 * 2**20, "20.00 MiB"),
        ("you tried to allocate 4096 bytes. Error code 12", 4096, "4.00 KiB"),
        ("Tried to allocate 17179869184.00 GiB", None, "unknown (the driver's message says 2^64 bytes)"),
        ("out of memory; 1.00 GiB free", None, "unknown"),
    ],
)
def test_what_was_asked_for(message, size, text):
    verdict = classify(torch.OutOfMemoryError(message), UNKNOWN)
    assert (verdict.asked_bytes, verdict.asked) == (size, text)


def test_impossible_sizes_are_shown_as_what_they_are():
    shown = without_impossible(OOM_TEXT)
    assert "17179869184" not in shown
    assert "this process has unknown (the driver's message says 2^64 bytes) memory in use" in shown
    assert "680.00 MiB" in shown
    assert "11.94 GiB" in shown


def test_exit_statuses_are_apart_from_each_other_and_from_those_that_mean_something_else():
    codes = [kind.exit_code for kind in Kind]
    assert len(set(codes)) == len(codes)
    assert {kind.exit_code for kind in Kind if kind is not Kind.OTHER}.isdisjoint({0, 1, 2, *range(64, 256)})
    assert exit_code_of(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) == 1


@pytest.mark.gpu
def test_error_code_of_a_real_accelerator_error():
    # In a process of its own: the device is lost to it afterwards.
    code = (
        "import torch; from gsq_module.memory.oom import *\n"
        "try:\n"
        "    torch.zeros(4, device='cuda')[torch.tensor([9], device='cuda')].cpu()\n"
        "except Exception as error:\n"
        "    kind = classify(error, Evidence(60 * 2**30, 80 * 2**30)).kind\n"
        "    assert kind is Kind.DRIVER_FAULT, (kind, error)\n"
        "    assert isinstance(error.error_code, int)\n"
        "    raise SystemExit(kind.exit_code)\n"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == Kind.DRIVER_FAULT.exit_code
