"""Problems that a user can mend are collected, and shown at once."""

from __future__ import annotations

from collections.abc import Iterable


def raise_collected(problems: Iterable[str]) -> None:
    """Raise one ValueError that lists all problems, if there are any."""
    problems = list(problems)
    if problems:
        raise ValueError("\n".join(problems))
