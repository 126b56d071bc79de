"""Embedding and head in formats of their own: what transformers and the reader make of the export, tied and untied."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from export_helpers import random_weight
from test_export_checkpoint import GROUP, IDS, Job, make_model
from transformers import AutoModelForCausalLM

from gsq_module.export.loading import load_whole
from gsq_module.export.packing import OuterPart
from gsq_module.export.reader import open_checkpoint
from gsq_module.quantization.grid import GRIDS, OUTER_GRIDS

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"


class OuterJob(Job):
    """A `Job` with random codes for embedding and head too; `bits` of each, None for float."""

    def __init__(self, folder, tie, embedding, head, family="llama"):
        super().__init__(folder, GRIDS[2], make_model(family, tie))
        shape = (256, 64)
        self.outer = []
        for kind, module, bits in (("embedding", EMBEDDING, embedding), ("head", HEAD, head)):
            if bits is not None:
                copy = HEAD if tie and kind == "embedding" else None
                self.outer.append(OuterPart(kind, module, copy, OUTER_GRIDS[bits], 64, shape))
        stored = {
            part.module: random_weight(part.grid, *shape, 64, seed=number) for number, part in enumerate(self.outer)
        }
        self.weights = dict(self.weights) | stored
        if head is not None or tie:
            self.ignore.remove(HEAD)
        self.tied = [f"{HEAD}.weight"] if tie else []

    def export(self):
        return super().export(quantized=self.weights, ignore=self.ignore, outer=self.outer, tied=self.tied)


CASES = pytest.mark.parametrize(
    ("tie", "embedding", "head"),
    [(False, 8, 4), (False, 4, 4), (False, 8, None), (False, None, 8), (True, 8, None), (True, 4, None)],
    ids=lambda value: str(value),
)


@torch.no_grad()
@CASES
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_transformers_computes_the_quantized_model(tmp_path, caplog, tie, embedding, head, family):
    job = OuterJob(tmp_path, tie, embedding, head, family)
    job.export()
    job.put_dequantized_weights_in()
    if tie:
        job.model.tie_weights()
    with caplog.at_level(logging.WARNING):
        loaded = load_whole(job.destination)
    assert "Could not match" not in caplog.text
    assert torch.equal(loaded(IDS).logits, job.model(IDS).logits)
    for module in (EMBEDDING, HEAD):
        assert torch.equal(loaded.get_submodule(module).weight, job.model.get_submodule(module).weight), module


@CASES
def test_the_reader_tells_the_formats_apart(tmp_path, tie, embedding, head):
    job = OuterJob(tmp_path, tie, embedding, head)
    job.export()
    dense = open_checkpoint(job.destination)
    for module, weight in job.weights.items():
        assert torch.equal(dense.tensor(f"{module}.weight"), weight.dequantize()), module
        assert torch.equal(dense.rows(f"{module}.weight", 3, 9), weight.dequantize()[3:9]), module
    if tie:
        assert torch.equal(dense.tensor(f"{HEAD}.weight"), job.weights[EMBEDDING].dequantize())


def test_a_head_alone_loads_in_plain_transformers_and_an_embedding_does_not(tmp_path):
    """The day the second half fails, transformers has learned it: export/loading.py can go."""
    (tmp_path / "head").mkdir()
    (tmp_path / "both").mkdir()
    job = OuterJob(tmp_path / "head", False, None, 8)
    job.export()
    AutoModelForCausalLM.from_pretrained(job.destination)
    job = OuterJob(tmp_path / "both", False, 8, 8)
    job.export()
    with pytest.raises(AttributeError, match="'Embedding' object has no attribute 'weight'"):
        AutoModelForCausalLM.from_pretrained(job.destination)
    load_whole(job.destination)
    with pytest.raises(AttributeError):  # nothing stays changed
        AutoModelForCausalLM.from_pretrained(job.destination)


def test_config_groups(tmp_path):
    job = OuterJob(tmp_path, False, 8, 4)
    job.export()
    config = json.loads((job.destination / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"]
    formats = {name: (group["targets"], group["weights"]["num_bits"]) for name, group in groups.items()}
    assert formats == {
        "group_0": (["Linear"], 2),
        "group_1": (["Embedding"], 8),
        "group_2": (["re:.*lm_head$"], 4),
    }
    assert groups["group_0"]["weights"]["group_size"] == GROUP
    assert groups["group_1"]["weights"]["group_size"] == 64
    assert HEAD not in config["quantization_config"]["ignore"]
    assert config["tie_word_embeddings"] is False


def test_a_tied_head_is_written_beside_its_embedding(tmp_path):
    """transformers ties weights by their names, and a packed embedding has none under which it could be found."""
    job = OuterJob(tmp_path, True, 8, None)
    report = job.export()
    config = json.loads((job.destination / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    assert list(config["quantization_config"]["config_groups"]) == ["group_1", "group_0"]
    assert config["quantization_config"]["config_groups"]["group_1"]["targets"] == ["Embedding", "re:.*lm_head$"]
    assert HEAD not in config["quantization_config"]["ignore"]
    mlp = sum(weight.codes.numel() for name, weight in job.weights.items() if name != EMBEDDING)
    assert report.quantized_parameters == mlp + 256 * 64, "one tensor, whatever the export holds"
    assert report.packed_bytes == mlp // 4 + 2 * 256 * 64
