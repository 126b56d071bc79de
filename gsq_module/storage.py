"""What a disk refuses, said so that a user can mend it: which file, what it needs, what is free, what is missing."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from gsq_module.problems import UserError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


class StorageError(UserError):
    """A file could not be written, for lack of room or of permission. What was on disk before is still whole."""


def gigabytes(count: float) -> str:
    """Bytes for people: 1.234 GB, and smaller ones in MB."""
    return f"{count / 1e9:.3f} GB" if count >= 1e8 else f"{count / 1e6:.3f} MB"


def existing(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    return next(folder for folder in (path, *path.absolute().parents) if folder.exists())


def free_bytes(path: Path) -> int:
    """What can still be written where a path is or will be. Quotas are not seen."""
    return shutil.disk_usage(existing(path)).free


@contextmanager
def storing(path: Path, nbytes: int | None = None, of: tuple[int, ...] = FULL + FORBIDDEN) -> Iterator[None]:
    """Turn what the disk refuses inside the `with` block into a StorageError.

    Args:
        path: What is being written, for the message.
        nbytes: Its size, where that is known.
        of: Numbers of the errors that are meant.

    Raises:
        StorageError: The disk is full, or the file may not be written.
    """
    try:
        yield
    except StorageError:
        raise
    except (OSError, SafetensorError) as error:
        number = _error_number(error)
        if number is None or number not in of:
            raise
        named = getattr(error, "filename", None)
        raise StorageError(_message(Path(named) if isinstance(named, str) else path, nbytes, number)) from error


def _error_number(error: OSError | SafetensorError) -> int | None:
    """The system's number of an error; safetensors has it in its text alone."""
    if isinstance(error, OSError):
        return error.errno
    match = re.search(r"\(os error (\d+)\)", str(error))
    return int(match[1]) if match else None


def _message(path: Path, nbytes: int | None, number: int) -> str:
    reason = os.strerror(number)
    if number in FORBIDDEN:
        return f"{path} cannot be written ({reason}). Allow it, or choose another place with --run_dir or --export_dir"
    free = free_bytes(path)
    size = f" needs {gigabytes(nbytes)}," if nbytes is not None else ""
    missing = f", {gigabytes(nbytes - free)} are missing" if nbytes is not None and nbytes > free else ""
    return (
        f"{path}: no room ({reason}):{size} {gigabytes(free)} are free{missing}. All that was finished is whole: "
        "free some (or raise the quota) and start the same command again to go on"
    )
