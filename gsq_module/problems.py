"""What a user can mend, as exceptions; problems are collected, and shown at once."""

from __future__ import annotations

from collections.abc import Iterable


class UserError(ValueError):
    """Something that a user can mend: its text says what, and how. A command that it ends shows that text alone."""


class NumericalError(UserError):
    """Numbers of model or text that a run cannot go on with; the exit status is that of `Kind.NUMERICAL`."""


def raise_collected(problems: Iterable[str]) -> None:
    """Raise one UserError that lists all problems, if there are any."""
    problems = list(problems)
    if problems:
        raise UserError("\n".join(problems))
