"""What shapes the result of a run, as something to compare: settings, the model's files, the calibration rows."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from torch import Tensor

import gsq_module
from gsq_module.streaming.checkpoint import INDEX_FILE, Checkpoint

MODEL, DATA = "model (its files)", "data (its calibration rows)"
CONTENT_FIELDS = frozenset({MODEL, DATA})
"""Fields that are known only once the model and the texts have been found; an earlier check leaves them out."""
CHECKSUM = "sha256"
"""Beside the fields in the file: what a damaged one does not agree with."""

FREE_FIELDS = (
    "data.evaluation",
    "data.forward_batch_size",
    "data.microbatch_size",
    "data.pin_memory",
    "model.final_pass",
    "model.kernels",
    "model.measure_initial",
    "model.snapshot_every",
    "model.store",
    "model.targets",
)
"""Fields of `model` and `data` that may change when a run is resumed: they do not shape its units. The final
pass, which begins when these are finished, is done again where its own settings have changed."""

SAMPLES, SAMPLE_BYTES = 64, 4096


def settings_fields(config: dict[str, Any]) -> dict[str, Any]:
    """Everything of a resolved configuration that shapes the result, flat, and the version of this package."""
    flat: dict[str, Any] = {"gsq_module": gsq_module.__version__}

    def visit(prefix: str, value: Any) -> None:
        if prefix in FREE_FIELDS:
            return
        if isinstance(value, dict):
            for key, item in value.items():
                visit(f"{prefix}.{key}" if prefix else key, item)
        else:
            flat[prefix] = value

    visit("", {key: config[key] for key in ("seed_everything", "model", "data")})
    return flat


def as_text(fields: dict[str, Any]) -> str:
    """The fields as JSON, with a checksum of their own."""
    return _json(fields | {CHECKSUM: _digest(fields)})


def parse(text: bytes) -> dict[str, Any] | None:
    """The fields of `as_text`; None where the text is damaged."""
    try:
        fields = json.loads(text)
        expected = fields.pop(CHECKSUM)
    except (ValueError, AttributeError, KeyError):
        return None
    return fields if _digest(fields) == expected else None


def comparable(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields as they are after a way through JSON."""
    return json.loads(_json(fields))


def model_identity(checkpoint: Checkpoint) -> str:
    """Hash of a checkpoint's configuration, index, and weight files as `file_identity` has them."""
    digest = hashlib.sha256()
    for name in ("config.json", INDEX_FILE):
        path = checkpoint.directory / name
        digest.update(path.read_bytes() if path.is_file() else b"")
    for name in sorted(checkpoint.files()):
        digest.update(f"{name} {file_identity(checkpoint.directory / name)}".encode())
    return digest.hexdigest()


def file_identity(path: Path) -> str:
    """Hash of a file's size, its first bytes and samples all over it, the header of safetensors among them.

    A model that was trained further has the same header and size and differs nearly everywhere, so samples tell it from
    what it was; hashing 55 GB would take minutes. One changed byte is mostly not noticed.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with open(path, "rb") as file:
        header = int.from_bytes(file.read(8), "little") if path.suffix == ".safetensors" else 0
        digest.update(file.read(min(header, size)))
        for number in range(SAMPLES):
            file.seek(max(0, size - SAMPLE_BYTES) * number // (SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def data_identity(*rows: Tensor) -> str:
    """Hash of calibration rows, int64 `[num_samples, seq_len]` each: of what text and tokenizer come to."""
    digest = hashlib.sha256()
    for part in rows:
        digest.update(str(tuple(part.shape)).encode())
        digest.update(part.contiguous().numpy().tobytes())
    return digest.hexdigest()


def file_checksum(path: Path) -> str:
    """SHA-256 of a whole file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def _digest(fields: dict[str, Any]) -> str:
    return hashlib.sha256(_json(fields).encode()).hexdigest()


def _json(fields: dict[str, Any]) -> str:
    return json.dumps(fields, indent=1, sort_keys=True, default=str)
