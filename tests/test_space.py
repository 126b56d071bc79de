"""Room and permission are asked for before the work, and their lack in the middle of it loses nothing (case 38)."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from gsq_module import atomic, storage
from gsq_module.atomic import write_atomically
from gsq_module.storage import StorageError, storing


@pytest.fixture
def old(tmp_path: Path) -> Path:
    file = tmp_path / "file"
    file.write_bytes(b"old")
    return file


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_leaves_the_old_file_and_nothing_else(number, old: Path, monkeypatch) -> None:
    usage = shutil.disk_usage(old)

    def full(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(atomic.os, "fsync", full)
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda path: usage._replace(free=1_000_000))
    with pytest.raises(StorageError) as refused:
        write_atomically(old, bytes(3_000_000))
    assert str(refused.value).startswith(
        f"{old}: no room ({os.strerror(number)}): needs 3.000 MB, 1.000 MB are free, 2.000 MB are missing."
    )
    assert "start the same command again" in str(refused.value)
    assert old.read_bytes() == b"old"
    assert list(old.parent.iterdir()) == [old]


def test_other_errors_pass(old: Path) -> None:
    with pytest.raises(OSError, match="Input/output") as passed, storing(old):
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    assert not isinstance(passed.value, StorageError)


def test_what_may_not_be_written_is_named(old: Path) -> None:
    with pytest.raises(StorageError, match=r"elsewhere cannot be written \(Read-only file system\)"), storing(old):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "elsewhere")
