"""Environments of benchmarks/peers.py: one a peer, and commands run in it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from peer_job import DISTRIBUTIONS

REQUIREMENTS = Path(__file__).resolve().parent.parent / "requirements"


class PeerError(Exception):
    """A peer did not install or run. The text is its own last word."""


def environment_commands(requirements: Path, folder: Path) -> list[list[str]]:
    """What makes a peer's environment: an empty one, then the peer with its pins."""
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    return [[sys.executable, "-m", "venv", "--clear", str(folder)], [*pip, "--requirement", str(requirements)]]


def make_environment(peer: str, root: Path, share_torch: bool) -> Path:
    """The interpreter of a peer's environment, which is made where it is not there with these pins.

    Args:
        root: Folder of the environments and their logs.
        share_torch: Whether packages of the running interpreter stand behind the peer's own: what the pins allow is
            then not installed again.

    Raises:
        PeerError: It does not install.
    """
    name = DISTRIBUTIONS.get(peer, peer)
    folder, requirements = root / f"env-{name}", REQUIREMENTS / f"peer-{name}.txt"
    marker, wanted = folder / "installed.txt", f"{requirements.read_text()}# shared: {share_torch}\n"
    if not marker.is_file() or marker.read_text() != wanted:
        root.mkdir(parents=True, exist_ok=True)
        create, install = environment_commands(requirements, folder)
        log = root / f"env-{name}.log"
        log.unlink(missing_ok=True)
        call(create, log)
        if share_torch:
            version = f"python{sys.version_info.major}.{sys.version_info.minor}"
            packages = folder / "lib" / version / "site-packages"
            (packages / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
        call(install, log)
        marker.write_text(wanted)
    return folder / "bin" / "python"


def call(command: Sequence[str], log: Path) -> None:
    """Run a command without this repository in its path, and without the hub. Its output is appended to `log`.

    Raises:
        PeerError: Its exit status is not 0.
    """
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    with log.open("ab") as file:
        done = subprocess.run(command, stdout=file, stderr=file, env=environment | {"HF_HUB_OFFLINE": "1"}, check=False)
    if done.returncode:
        raise PeerError(f"{last_error(log.read_text(errors='replace'))} (exit status {done.returncode}, see {log})")


def last_error(log: str) -> str:
    """The last line of a log that speaks of an error, or the last one."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"error\b", line, re.IGNORECASE)]
    return (errors or lines or ["no output"])[-1]
