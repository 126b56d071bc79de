"""Exports of every dense family: engines can load them, transformers generates, and computes what our weights do."""

from __future__ import annotations

import pytest
import torch
from toy_models import tokens
from toy_runs import BARE, run, summary_of
from transformers import AutoModelForCausalLM

from gsq_module.export.reader import open_checkpoint
from gsq_module.streaming.checkpoint import Checkpoint

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma3"]


@pytest.mark.parametrize("name", FAMILIES)
def test_an_export_loads_and_generates(name, recipes, tmp_path):
    cli = run(recipes(name), tmp_path / "run", *BARE, "--data.train_samples=16", "--model.initializer=rtn")
    export = tmp_path / "run" / "export"
    verdicts = {engine["engine"].split()[0]: engine for engine in summary_of(tmp_path / "run")["engines"]}
    assert set(verdicts) == {"transformers", "compressed-tensors", "vLLM"}
    assert all(verdict["loads"] and verdict["problems"] == [] for verdict in verdicts.values())
    assert "2 bits need Humming kernels" in " ".join(verdicts["vLLM"]["notes"])

    loaded = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
    expected = AutoModelForCausalLM.from_pretrained(cli.model.path, dtype=torch.float32)
    dense = open_checkpoint(export)
    stored = Checkpoint(export).names()
    packed = [name.removesuffix("_packed") for name in stored if name.endswith(".weight_packed")]
    assert len(packed) == 2 * 7
    for parameter in packed:
        expected.get_parameter(parameter).data = dense.tensor(parameter).float()
    if name == "qwen2":
        bias = "model.layers.0.self_attn.q_proj.bias"
        assert torch.equal(loaded.get_parameter(bias), dense.tensor(bias).float()), (
            "biases stay, of quantized layers too"
        )
    rows = tokens(2, 12)
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=rows).logits, expected(input_ids=rows).logits)
    generated = loaded.generate(rows, max_new_tokens=4, do_sample=False)
    assert generated.shape[1] > rows.shape[1]
    assert torch.equal(generated, expected.generate(rows, max_new_tokens=4, do_sample=False))
