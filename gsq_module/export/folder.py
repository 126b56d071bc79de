"""Writing a whole folder or nothing: a sibling temporary folder that is swapped in when it is complete."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gsq_module.atomic import sync
from gsq_module.problems import UserError
from gsq_module.storage import storing

MARKER_FILE = "gsq_export.json"
"""Its presence says that the folder is an export of ours and may be replaced. The writer puts its report there."""


def check_destination(source: Path, destination: Path) -> None:
    """Refuses destinations whose replacement would lose something that this program did not write.

    Args:
        source: Folder of the model that is exported from.
        destination: Where the export is to go. Links are followed in both.

    Raises:
        UserError: The folders are the same or one lies in the other, or the destination holds something else.
    """
    source = source.resolve()
    for folder in _folders(destination):
        if folder == source or folder in source.parents or source in folder.parents:
            raise UserError(
                f"the export to {destination} would write {folder}, which is, holds or lies in the source model "
                f"{source}. Choose a destination outside of it."
            )
        if folder.exists() and not folder.is_dir():
            raise UserError(f"the export to {destination} needs {folder} as a folder, but that is a file.")
        if folder.is_dir() and not (folder / MARKER_FILE).is_file() and any(folder.iterdir()):
            raise UserError(
                f"{folder} is not empty and is no export of this program (it has no {MARKER_FILE}), so the export to "
                f"{destination} does not replace it. Choose another destination or remove that folder yourself."
            )


@contextmanager
def replaced_folder(destination: Path) -> Iterator[Path]:
    """Yields an empty `<destination>.partial`; what is written there becomes `destination` when the block ends.

    The old folder stays in place until the new one is on disk, file by file. An exception in the block removes the new
    one. A process killed in the middle leaves the old one, at worst (between the two renames) as
    `<destination>.previous`, which the next call moves back.

    Args:
        destination: A folder that `check_destination` let pass.
    """
    destination, partial, previous = _folders(destination)
    with storing(destination):
        yield from _replaced(destination, partial, previous)


def _replaced(destination: Path, partial: Path, previous: Path) -> Iterator[Path]:
    destination.parent.mkdir(parents=True, exist_ok=True)
    if previous.exists():
        if destination.exists():
            _remove(previous)
        else:
            previous.rename(destination)
    if partial.exists():
        _remove(partial)
    partial.mkdir()
    try:
        (partial / MARKER_FILE).touch()
        yield partial
        for path in [*partial.rglob("*"), partial]:
            sync(path)
        if destination.exists():
            destination.rename(previous)
        partial.rename(destination)
    except BaseException:
        if previous.exists() and not destination.exists():
            previous.rename(destination)
        shutil.rmtree(partial, ignore_errors=True)
        raise
    sync(destination.parent)
    if previous.exists():
        _remove(previous)


def _remove(folder: Path) -> None:
    """Remove a folder of ours, its marker last: what a killed process leaves of it must still be known as ours."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != MARKER_FILE:
            path.unlink()
    shutil.rmtree(folder)


def _folders(destination: Path) -> tuple[Path, Path, Path]:
    """The destination behind its links, the folder being written, the folder being replaced."""
    destination = destination.resolve()
    partial, previous = (destination.with_name(destination.name + suffix) for suffix in (".partial", ".previous"))
    return destination, partial.resolve(), previous.resolve()
