"""What an error has to do with memory, whatever face the driver puts on it.

Types and structure decide first: the exception's class, the accelerator's error code, the chain of causes, the frames
it was raised from. Text comes last, and the state of the device where the same text has several meanings.
"""

from __future__ import annotations

import errno
import linecache
import re
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import torch

from gsq_module.memory.allocator_setting import AllocatorSetting
from gsq_module.memory.statistics import GIB, format_bytes
from gsq_module.problems import NumericalError

LITTLE_FREE = 1 * GIB
"""Less than this free on the device counts as little: more than the largest single allocation met (680 MiB)."""

IMPOSSIBLE = 2**63
"""No device has this many bytes: torch prints 2^64 and its neighbours where a figure of the driver is missing."""

IMPOSSIBLE_TEXT = "unknown (the driver's message says 2^64 bytes)"


class Kind(Enum):
    """Class of an error, with its title and the exit status of a process that it ends.

    Status 2 is what a user can mend (as jsonargparse's own), 1 is everything else, `OTHER` included.
    """

    DEVICE_MEMORY = "device memory (certain)", 10
    DEVICE_MEMORY_SUSPECTED = "device memory (suspected)", 11
    NCCL_MEMORY = "NCCL memory", 12
    NCCL_MEMORY_SUSPECTED = "NCCL failed, possibly memory", 13
    PINNED_MEMORY = "pinned host memory", 14
    HOST_MEMORY = "host memory", 15
    KERNEL_CONFIGURATION = "kernel configuration, not memory", 16
    NUMERICAL = "numerical, not memory", 17
    DRIVER_FAULT = "driver error, not memory", 18
    OTHER = "other", 1

    def __init__(self, title: str, exit_code: int) -> None:
        self.title = title
        self.exit_code = exit_code


_UNCERTAIN = (Kind.DEVICE_MEMORY_SUSPECTED, Kind.DRIVER_FAULT, Kind.NCCL_MEMORY_SUSPECTED, Kind.OTHER)
"""What an earlier error also brings about: after one, every later call to the driver may fail."""


@dataclass(frozen=True)
class Evidence:
    """State of the device when the error was met.

    Args:
        free: Bytes free on the whole device; `None` where that is unknown or there is no device.
        total: Its size in bytes; `None` likewise.
        setting: The allocator's setting in force; `None` where it is unknown.
    """

    free: int | None = None
    total: int | None = None
    setting: AllocatorSetting | None = None


@dataclass(frozen=True)
class Verdict:
    """What an error is.

    Args:
        kind: Its class.
        reason: What decided, for people.
        error_type: Name of the deciding error's class; the error may be a cause of the one that was raised.
        message: Its text, as it is.
    """

    kind: Kind
    reason: str
    error_type: str
    message: str

    @property
    def asked_bytes(self) -> int | None:
        """What was asked for, in bytes; `None` where the message does not say, or says what cannot be."""
        size = _asked(self.message)
        return None if size is None or size >= IMPOSSIBLE else size

    @property
    def asked(self) -> str:
        """The same for people."""
        size = _asked(self.message)
        if size is None:
            return "unknown"
        return IMPOSSIBLE_TEXT if size >= IMPOSSIBLE else format_bytes(size)


def classify(error: BaseException, evidence: Evidence) -> Verdict:
    """Class of an error, found by walking the chain of its causes.

    A verdict that was remembered stays: the state of the device counted at the time.
    """
    return find_cause(error, evidence)[0]


def exit_code_of(error: BaseException) -> int:
    """Exit status of a process that `error` ends: its class's own, 1 for an error that no class explains."""
    return classify(error, Evidence()).kind.exit_code


def find_cause(error: BaseException, evidence: Evidence) -> tuple[Verdict, BaseException]:
    """The verdict, and the error of the chain that decided it.

    An explicit cause (`raise ... from cause`) and the members of a group tell more than what wraps them. An error met
    while another was handled stands on its own, unless it is of a kind that the other may have brought about. What
    ends a process on purpose (KeyboardInterrupt, SystemExit) is `OTHER`, whatever it interrupted.
    """
    if not isinstance(error, Exception) and not _members(error):
        return Verdict(Kind.OTHER, "", type(error).__name__, str(error)), error
    return _find(error, evidence, set())


def _find(error: BaseException, evidence: Evidence, seen: set[int]) -> tuple[Verdict, BaseException]:
    seen.add(id(error))
    own = _judge(error, evidence), error
    for inner in (*_members(error), error.__cause__):
        if inner is not None and id(inner) not in seen:
            found = _find(inner, evidence, seen)
            if found[0].kind is not Kind.OTHER:
                return found
    earlier = error.__context__
    if earlier is not None and id(earlier) not in seen and not error.__suppress_context__:
        found = _find(earlier, evidence, seen)
        if found[0].kind is not Kind.OTHER and own[0].kind in _UNCERTAIN:
            return found
    return own


def _members(error: BaseException) -> tuple[BaseException, ...]:
    """Members of an ExceptionGroup, which Python 3.10 knows only as a backport: by structure."""
    members = getattr(error, "exceptions", ())
    return tuple(m for m in members if isinstance(m, BaseException)) if isinstance(members, (tuple, list)) else ()


_MEMORY_VERDICT = "_memory_verdict"


def remember(error: BaseException, verdict: Verdict) -> None:
    """Let the verdict stay with the error that decided it."""
    setattr(error, _MEMORY_VERDICT, verdict)


def remembered(error: BaseException) -> Verdict | None:
    """The verdict that `remember` left with this very error."""
    return getattr(error, _MEMORY_VERDICT, None)


def _judge(error: BaseException, evidence: Evidence) -> Verdict:
    known = remembered(error)
    if known is not None:
        return known
    message = str(error)
    kind, reason = _by_type(error, message) or _by_text(error, message, evidence) or (Kind.OTHER, "")
    return Verdict(kind, reason, type(error).__name__, message)


_CODES = {2: "out of memory", 600: "device not ready", 700: "illegal memory access"}
"""CUDA's error codes that decide, as their texts; `torch.AcceleratorError` carries one where the driver raised it."""


def _by_type(error: BaseException, message: str) -> tuple[Kind, str] | None:
    if _is_triton_out_of_resources(error):
        return Kind.KERNEL_CONFIGURATION, "a Triton kernel asks for more than a multiprocessor of this GPU has"
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return Kind.HOST_MEMORY, "the host refused an allocation"
    if torch.distributed.is_available() and isinstance(error, torch.distributed.DistBackendError):
        return _nccl(message)
    if isinstance(error, (NumericalError, FloatingPointError, torch.linalg.LinAlgError)):
        return Kind.NUMERICAL, "a computation met numbers it cannot go on with"
    if isinstance(error, torch.OutOfMemoryError):
        return _pinned(error) or (Kind.DEVICE_MEMORY, "torch's allocator says so")
    return None


def _is_triton_out_of_resources(error: BaseException) -> bool:
    # By name: importing Triton here would make it a requirement.
    return any(c.__name__ == "OutOfResources" and c.__module__.startswith("triton.") for c in type(error).__mro__)


def _nccl(message: str) -> tuple[Kind, str]:
    if "out of memory" in message:
        return Kind.NCCL_MEMORY, "NCCL could not allocate its buffers on the device"
    return Kind.NCCL_MEMORY_SUSPECTED, "NCCL does not say why it failed; another rank may have failed first"


_NCCL = re.compile(r"NCCL error|nccl(UnhandledCuda|System|Internal|Remote)Error")
_REFUSED = re.compile(r"(CUDA|HIP)( driver)? error: (invalid argument|out of memory)")
_BY_STATE = re.compile(r"(CUDA|HIP)( driver)? error: invalid argument|CU[A-Z]+_STATUS_(NOT_INITIALIZED|INTERNAL_ERROR)")
_DRIVER = re.compile(
    r"\b(CUDA|HIP)( driver)? error|\b(cuDNN|cuBLAS|cusolver|cusparse|cuFFT) error|CU[A-Z]+_STATUS|NVML_SUCCESS"
    r"|INTERNAL ASSERT FAILED.*cuda",
    re.S | re.I,
)

_TEXTS: tuple[tuple[str, Kind, str], ...] = (
    (
        r"out of resource: |too many resources requested for launch|invalid configuration argument",
        Kind.KERNEL_CONFIGURATION,
        "a kernel asks for more than a multiprocessor of this GPU has",
    ),
    (
        r"illegal memory access|device-side assert|misaligned address|illegal instruction|unspecified launch failure",
        Kind.DRIVER_FAULT,
        "a kernel did what it must not: a wrong address or index, no lack of memory",
    ),
    (r"returned nan values", Kind.NUMERICAL, "a gradient is not a number"),
    (
        r"DefaultCPUAllocator: |[Cc]annot allocate memory|std::bad_alloc",
        Kind.HOST_MEMORY,
        "the host refused an allocation",
    ),
)
"""Texts with one meaning. What a kernel did wrong may surface anywhere later, so these come before the frames."""

_DEVICE_TEXTS: tuple[tuple[str, Kind, str], ...] = (
    (r"out of memory|STATUS_ALLOC_FAILED|CUFFT_ALLOC_FAILED", Kind.DEVICE_MEMORY, "the driver or a library says so"),
    (
        r"(handles_|NVML_SUCCESS == r).*INTERNAL ASSERT FAILED|INTERNAL ASSERT FAILED.*CUDACachingAllocator",
        Kind.DEVICE_MEMORY_SUSPECTED,
        "torch's allocator broke off in the middle of an allocation, as it does after the driver refused one",
    ),
)


def _by_text(error: BaseException, message: str, evidence: Evidence) -> tuple[Kind, str] | None:
    # Other types speak of something else, even where their text quotes one of these.
    if not isinstance(error, RuntimeError):
        return None
    if isinstance(error, torch.AcceleratorError):
        message = f"CUDA error: {_CODES.get(getattr(error, 'error_code', 0), '')}\n{message}"
    if _NCCL.search(message):
        return _nccl(message)
    found = _first(_TEXTS, message)
    if found is None and _REFUSED.search(message):
        found = _pinned(error)
    found = found or _first(_DEVICE_TEXTS, message)
    if found is None and "error: device not ready" in message:
        found = Kind.DEVICE_MEMORY_SUSPECTED, f"a full device is reported with this text{_with_segments(evidence)}"
    if found is None and _BY_STATE.search(message):
        found = _by_state(evidence)
    if found is None and _DRIVER.search(message):
        found = Kind.DRIVER_FAULT, "the driver or one of its libraries failed, and nothing points at memory"
    return found


def _first(texts: tuple[tuple[str, Kind, str], ...], message: str) -> tuple[Kind, str] | None:
    return next(((kind, reason) for pattern, kind, reason in texts if re.search(pattern, message, re.S)), None)


def _with_segments(evidence: Evidence) -> str:
    return " where expandable segments are on" if evidence.setting and evidence.setting.expandable_segments else ""


def _by_state(evidence: Evidence) -> tuple[Kind, str]:
    if evidence.free is None:
        return Kind.DRIVER_FAULT, "the driver does not say why, and how much was free on the device is unknown"
    of = "" if evidence.total is None else f" of {format_bytes(evidence.total)}"
    free = f"the driver does not say why; {format_bytes(evidence.free)}{of} are free on the device"
    return (Kind.DEVICE_MEMORY_SUSPECTED if evidence.free < LITTLE_FREE else Kind.DRIVER_FAULT), free


def _pinned(error: BaseException) -> tuple[Kind, str] | None:
    """Whether the error came out of page-locking host memory: by its frames, or the loader's thread that does it."""
    if "in pin memory thread" in str(error) or any("pin_memory" in text for text in _frame_texts(error)):
        return Kind.PINNED_MEMORY, "raised while host memory was being page-locked (pinned)"
    return None


def _frame_texts(error: BaseException) -> Iterator[str]:
    """Names of the functions an error came through, and the statement that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    yield from (frame.name for frame in frames)
    if frames:
        # A tensor's own method leaves no frame: it shows in the statement that called it alone.
        last = frames[-1]
        first_line = last.lineno or 0
        last_line = getattr(last, "end_lineno", None) or first_line
        yield from (linecache.getline(last.filename, line) for line in range(first_line, last_line + 1))


_SIZE = r"(\d+(?:\.\d+)?) ?([KMGT]i?B|bytes)"
_POWERS = {"b": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def _bytes(match: re.Match[str]) -> int:
    # torch's KB and MB are powers of 1024 as well.
    return int(float(match[1]) * 1024 ** _POWERS[match[2][0]])


def _asked(message: str) -> int | None:
    match = re.search(rf"[Tt]ried to allocate {_SIZE}", message)
    return None if match is None else _bytes(match)


def without_impossible(text: str) -> str:
    """`text` with every size that no device has shown as what it is."""
    return re.sub(_SIZE, lambda match: IMPOSSIBLE_TEXT if _bytes(match) >= IMPOSSIBLE else match[0], text)
