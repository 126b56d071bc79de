"""The one place that sets torch's CUDA caching allocator: expandable segments on native Linux, off under WSL2.

With expandable segments less memory is lost to fragments. Under WSL2 they turn out-of-memory errors into driver errors
at varying places, which say nothing of memory.
"""

from __future__ import annotations

import logging
import os
import platform
import re
from collections.abc import Mapping, MutableMapping

import torch

from gsq_module.memory.allocator_setting import AllocatorSetting

logger = logging.getLogger(__name__)

VARIABLE = "PYTORCH_ALLOC_CONF"
"""The variable the policy sets. torch reads it from 2.10 on, the oldest that pyproject.toml allows; 2.8 did not."""

OLDER_VARIABLE = "PYTORCH_CUDA_ALLOC_CONF"
"""The older name. Where both are set, even to nothing, torch (2.10 to 2.13) reads this one alone."""

POLICY_VARIABLE = "GSQ_ALLOCATOR_POLICY"
"""Holds the value the policy set: ranks inherit the environment, and must not take that value for the user's own."""


def apply_policy(
    environ: MutableMapping[str, str] = os.environ, system: str | None = None, kernel: str | None = None
) -> AllocatorSetting:
    """Set `PYTORCH_ALLOC_CONF` for this process and those it starts, unless the user has set it.

    `expandable_segments:True` on native Linux, `expandable_segments:False` under WSL2, nothing elsewhere. torch reads
    the variable when CUDA starts: after that nothing is set, and a warning is logged.

    Args:
        environ: The environment.
        system: Name of the operating system; `None`: this one's.
        kernel: Release of its kernel; `None`: this one's.

    Returns:
        The setting in force.
    """
    chosen = VARIABLE in environ or OLDER_VARIABLE in environ
    if not chosen and (system or platform.system()) == "Linux":
        value = f"expandable_segments:{not runs_on_wsl(kernel)}"
        if torch.cuda.is_initialized():
            logger.warning("%s=%s was not set: CUDA had started already", VARIABLE, value)
        else:
            environ[VARIABLE] = environ[POLICY_VARIABLE] = value
    return setting_in_force(environ, kernel)


def setting_in_force(environ: Mapping[str, str] = os.environ, kernel: str | None = None) -> AllocatorSetting:
    """The allocator's setting as torch reads it from the environment, and where it came from.

    Args:
        environ: The environment.
        kernel: Release of the kernel; `None`: this one's.
    """
    wsl = runs_on_wsl(kernel)
    name = next((name for name in (OLDER_VARIABLE, VARIABLE) if name in environ), None)
    if name is None:
        return AllocatorSetting("", "torch's default", expandable_segments=False, wsl=wsl)
    text = environ[name]
    if name == VARIABLE and environ.get(POLICY_VARIABLE) == text:
        origin = f"set by gsq-recipes for {'WSL2' if wsl else 'native Linux'}"
    else:
        origin = f"set by the user as {name}"
    return AllocatorSetting(text, origin, _expands(text), wsl)


def runs_on_wsl(kernel: str | None = None) -> bool:
    """Whether the kernel is that of WSL2, in a container too.

    Args:
        kernel: Its release, such as `5.15.167.4-microsoft-standard-WSL2`; `None`: this one's.
    """
    return "microsoft" in (kernel or platform.release()).lower()


def _expands(text: str) -> bool:
    """Whether torch reads `text` as expandable segments on: it drops spaces, and the last word counts."""
    values = re.findall(r"(?:^|,)expandable_segments:([^,]*)", text.replace(" ", ""))
    return values[-1:] == ["True"]
