"""What an export says of itself in `gsq_export.json`: its sizes, and the checksums of its files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gsq_module.export.folder import MARKER_FILE
from gsq_module.fingerprint import file_checksum

CHECKSUMS = "sha256"
"""Key of the files' checksums in `gsq_export.json`."""


@dataclass(frozen=True)
class ExportReport:
    """What an export holds; `gsq_export.json` beside it says the same.

    Attributes:
        files: Names of the weight shards.
        total_bytes: Bytes of all tensors, as the index says (file headers and tokenizer not counted).
        packed_bytes: Bytes of the `weight_packed` tensors alone.
        quantized_parameters: Weights stored as codes.
        float_parameters: Elements of all other tensors of the model, tied ones once.
        bits_per_weight: Bits a quantized weight takes, its share of the scales included.
        average_bits: Bits a parameter takes, over the whole model.
    """

    files: list[str]
    total_bytes: int
    packed_bytes: int
    quantized_parameters: int
    float_parameters: int
    bits_per_weight: float
    average_bits: float


def folder_checksums(folder: Path) -> dict[str, str]:
    """SHA-256 of each file of an export by its name, but for the report that they are kept in."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MARKER_FILE)
    return {path.relative_to(folder).as_posix(): file_checksum(path) for path in files}


def report_checksum(about: Mapping[str, Any]) -> str:
    """Of what `gsq_export.json` says, itself left out."""
    others = {name: checksum for name, checksum in about[CHECKSUMS].items() if name != MARKER_FILE}
    return hashlib.sha256(as_text({**about, CHECKSUMS: others}).encode()).hexdigest()


def as_text(content: Mapping[str, Any]) -> str:
    """An export's JSON files as they are written."""
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"
