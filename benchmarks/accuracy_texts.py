"""The texts of benchmarks/accuracy.py as files, so that a machine without packages and network reads the same ones."""

from __future__ import annotations

import json
from pathlib import Path

from gsq_module.data import PythonTopics, Speeches, TextSource, WikipediaArticles
from gsq_module.problems import raise_collected

CALIBRATION = "speeches_before_1982"
TEXTS: dict[str, TextSource] = {
    CALIBRATION: Speeches(before=1982),
    "speeches": Speeches(since=1982),
    "python_topics": PythonTopics(),
    "wikipedia": WikipediaArticles(),
}
"""Calibration text, and three of other kinds or another time to measure on."""


def write_texts(folder: Path) -> None:
    """Write those that are missing, one document a line.

    Raises:
        UserError: Packages that they come in are not installed; lists all of them.
    """
    missing = {name: source for name, source in TEXTS.items() if not _file(folder, name).is_file()}
    problems = []
    for source in missing.values():
        try:
            source.check()
        except FileNotFoundError as error:
            problems.append(str(error))
    raise_collected(problems)
    folder.mkdir(parents=True, exist_ok=True)
    for name, source in missing.items():
        print(f"writing {_file(folder, name)}", flush=True)
        lines = (json.dumps({"text": document}) + "\n" for document in source.documents(None))  # type: ignore[arg-type]
        partial = folder / f"{name}.partial"
        partial.write_text("".join(lines))
        partial.rename(_file(folder, name))


def options(folder: Path) -> list[str]:
    """The recipe's `data` keys that read these files."""

    def source(name: str) -> dict[str, object]:
        return {"class_path": "gsq_module.data.TextFiles", "init_args": {"paths": [str(_file(folder, name))]}}

    evaluation = {name: source(name) for name in TEXTS if name != CALIBRATION}
    return [f"--data.calibration={json.dumps(source(CALIBRATION))}", f"--data.evaluation={json.dumps(evaluation)}"]


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name}.jsonl"
