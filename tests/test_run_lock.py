"""Two processes on one run directory: the second one is refused, with the name of the first."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from gsq_module.run_lock import LOCK_FILE, locked
from gsq_module.storage import StorageError

HOLDER = """
import sys, time
from pathlib import Path
from gsq_module.run_lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path):
    """Another process that holds the lock of the folder."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_the_second_process_is_refused_until_the_first_is_gone(holder, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is in use") as refused, locked(tmp_path):
        pass
    for part in (f"process {holder.pid} on {platform.node()}, since ", str(tmp_path), "--run_dir"):
        assert part in str(refused.value)
    holder.kill()  # SIGKILL: it cannot give anything back itself
    holder.wait()
    with locked(tmp_path):
        assert str(os.getpid()) in (tmp_path / LOCK_FILE).read_text()
    with locked(tmp_path):
        pass


def test_children_do_not_keep_it(tmp_path: Path) -> None:
    with locked(tmp_path):
        code = "import time; print('up', flush=True); time.sleep(60)"
        child = subprocess.Popen([sys.executable, "-c", code], close_fds=False, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        with locked(tmp_path):
            pass
    finally:
        child.kill()
        child.wait()


def test_a_file_system_without_locks_is_warned_of(tmp_path: Path, monkeypatch, caplog) -> None:
    def no_locks(*args) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with caplog.at_level(logging.WARNING), locked(tmp_path):
        assert "has no locks" in caplog.text


def test_a_folder_that_may_not_be_written_is_named(tmp_path: Path, monkeypatch) -> None:
    def forbidden(*args, **kwargs) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(tmp_path / LOCK_FILE))

    monkeypatch.setattr(os, "open", forbidden)
    with (
        pytest.raises(StorageError, match=r"lock cannot be written \(Permission denied\).*--run_dir"),
        locked(tmp_path),
    ):
        pass
