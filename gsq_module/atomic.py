"""Writing a file whole or not at all (design.md, contract 5)."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from gsq_module.storage import storing


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file such that a reader, or a crash at any instant, sees the old content or the new.

    Raises:
        StorageError: The disk has no room for it, or it may not be written; the old content stays.
    """
    write_parts_atomically(path, [content], len(content))


def write_parts_atomically(path: Path, parts: Iterable[bytes | memoryview], nbytes: int) -> None:
    """The same of a content of `nbytes` that is made part by part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with storing(path, nbytes):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "wb") as file:
                file.writelines(parts)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync(path.parent)


def remove_leftovers(folder: Path) -> None:
    """Remove what `write_atomically` leaves in a folder when its process is killed."""
    for path in folder.glob(".*.tmp"):
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
