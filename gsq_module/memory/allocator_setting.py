"""The setting of torch's CUDA caching allocator, as reports show it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AllocatorSetting:
    """What `PYTORCH_ALLOC_CONF` or its older name says, and who said it.

    Args:
        text: The value; empty where nothing is set.
        origin: Who set it, for people.
        expandable_segments: Whether the text turns expandable segments on.
        wsl: Whether the process runs under WSL2.
    """

    text: str
    origin: str
    expandable_segments: bool
    wsl: bool
