"""The config.json of a checkpoint folder, read in one place: a broken one is named wherever it is met."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONFIG_FILE = "config.json"


def get_again(directory: Path) -> str:
    """What to do about a config.json that is broken."""
    return (
        f"Next: get it again (hf download <repository> {CONFIG_FILE} --local-dir {directory}), or, where the folder is "
        "an export of a run, write that again (recipes/run.py export --config RECIPE)"
    )


def read_config(directory: str | Path) -> dict[str, Any]:
    """The content of a folder's config.json.

    Raises:
        FileNotFoundError: There is none.
        ValueError: It is cut off, no JSON object, or says no model_type.
    """
    directory = Path(directory)
    file = directory / CONFIG_FILE
    if not file.is_file():
        raise FileNotFoundError(
            f"{directory} has no {CONFIG_FILE}: not a checkpoint folder of transformers. Next: name one that has"
        )
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # not JSON, or not UTF-8
        raise ValueError(f"{file} is cut off or no JSON ({error}). {get_again(directory)}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file} holds no JSON object, but {type(config).__name__}. {get_again(directory)}")
    if not config.get("model_type") or not isinstance(config["model_type"], str):
        raise ValueError(
            f"{file}: model_type={config.get('model_type')!r} names no architecture; right is a name that transformers "
            f"knows, such as 'llama'. {get_again(directory)}"
        )
    return config
