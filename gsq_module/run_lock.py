"""One process at a time works in a run directory."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gsq_module.storage import storing

logger = logging.getLogger(__name__)

LOCK_FILE = "lock"


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Hold a run directory for the time of the `with` block. Of several ranks the first one does.

    The kernel gives the lock back when the process ends, however it ends: there is nothing to clean up after SIGKILL or
    a power cut. Children do not inherit it (Python opens files close-on-exec). On NFS, Linux turns flock into a lock of
    the server, which other machines respect; without a lock daemon there, and on some mounts of Windows' drives under
    WSL, there are no locks at all: then a warning is all that can be done.

    Args:
        run_dir: An existing folder.

    Raises:
        ValueError: Another process holds it; it is named.
        StorageError: The folder may not be written.
    """
    path = run_dir / LOCK_FILE
    with storing(path):
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"run_dir={str(run_dir)!r} is in use by {_owner(file.read())}. Wait for it or stop it, "
                f"or start another run with --run_dir {run_dir}-2"
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                raise
            logger.warning("%s: this file system has no locks (%s); start no second run there", path, error.strerror)
        else:
            # The file stays: were it removed, two processes could each lock one of that name.
            with storing(path):
                file.truncate(0)
                owner = {"pid": os.getpid(), "host": platform.node(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
                json.dump(owner, file)
                file.flush()
        yield


def _owner(text: str) -> str:
    try:
        owner = json.loads(text)
        return f"process {owner['pid']} on {owner['host']}, since {owner['since']}"
    except (ValueError, KeyError, TypeError):
        return "another process"
