"""The texts that the accuracy benchmarks' tests run on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from toy_models import words


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """An output folder whose texts are there already."""
    folder = tmp_path / "out"
    (folder / "texts").mkdir(parents=True)
    for number, name in enumerate(("speeches_before_1982", "speeches", "python_topics", "wikipedia")):
        (folder / "texts" / f"{name}.jsonl").write_text(json.dumps({"text": words(6000, seed=number)}) + "\n")
    return folder
