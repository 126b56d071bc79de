"""A checkpoint of class Qwen3_5ForConditionalGeneration in the hub's key names: vision tower and MTP layers stay."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from torch import nn
from toy_models import open_streamed
from toy_qwen import TEXT, qwen_checkpoint
from toy_runs import BARE, run, summary_of, write_recipe

from gsq_module.coverage import measure_coverage
from gsq_module.export.engines import check_engines
from gsq_module.export.reader import open_checkpoint
from gsq_module.module import GSQModule
from gsq_module.streaming.checkpoint import Checkpoint

BLOCKS = "model.language_model.layers"
MLP = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
LINEAR = [f"linear_attn.{name}" for name in ("in_proj_qkv", "in_proj_z", "out_proj")]
FULL = [f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
QUANTIZED = {f"{BLOCKS}.{block}.{name}" for block in range(4) for name in (FULL if block == 3 else LINEAR) + MLP}
VISION = [
    f"blocks.{n}.{name}" for n in (0, 1) for name in ("attn.qkv", "attn.proj", "mlp.linear_fc1", "mlp.linear_fc2")
]
KEPT = {f"model.visual.{name}" for name in [*VISION, "merger.linear_fc1", "merger.linear_fc2"]} | {"lm_head", "mtp.fc"}
KEPT |= {f"mtp.layers.0.{name}" for name in FULL + MLP}
GATES = {f"{prefix}.{n}.linear_attn.in_proj_{x}" for prefix in (BLOCKS, "model.layers") for n in range(3) for x in "ab"}
CLASSES = ["AutoModelForImageTextToText", "AutoModelForCausalLM"]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return qwen_checkpoint(tmp_path_factory.mktemp("qwen") / "checkpoint")


@pytest.fixture(scope="module")
def run_dir(source, tmp_path_factory):
    """A run of few steps, and its export."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["run.py"])
        run(write_recipe(folder, source), folder / "run", "--model.measure_initial=false", "--data.train_samples=16")
    return folder / "run"


def test_all_that_is_not_quantized_is_carried_over_bit_for_bit(source, run_dir):
    before, after = Checkpoint(source), Checkpoint(run_dir / "export")
    kept = [name for name in before.names() if name.removesuffix(".weight") not in QUANTIZED]
    assert {f"{name}.weight" for name in KEPT} <= set(kept)
    for name in kept:
        stored = before.tensor(name), after.tensor(name)
        assert stored[0].dtype == stored[1].dtype, name
        assert torch.equal(*(tensor.view(torch.uint8) for tensor in stored)), name
    assert before.tensor(f"{BLOCKS}.0.linear_attn.A_log").dtype == torch.float32
    packed = {f"{name}.{part}" for name in QUANTIZED for part in ("weight_packed", "weight_scale", "weight_shape")}
    assert set(after.names()) == {*kept, *packed}


def test_config_and_ignore_list(source, run_dir):
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, run_dir / "export"))
    quantization = after.pop("quantization_config")
    assert after.pop("text_config").items() >= before.pop("text_config").items()
    assert after == before
    assert after["architectures"] == ["Qwen3_5ForConditionalGeneration"]
    assert len(quantization["ignore"]) == len(set(quantization["ignore"]))
    assert set(quantization["ignore"]) == KEPT | GATES


@pytest.mark.parametrize("name", CLASSES)
def test_both_classes_load_it_and_compute_what_our_weights_do(name, source, run_dir):
    export = run_dir / "export"
    auto = getattr(transformers, name)
    loaded, info = auto.from_pretrained(export, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    dense = open_checkpoint(export)
    expected = auto.from_pretrained(source, dtype=torch.float32)
    prefix = BLOCKS if "ForConditional" in type(expected).__name__ else "model.layers"
    for path in QUANTIZED:
        linear = expected.get_submodule(path.replace(BLOCKS, prefix))
        assert isinstance(linear, nn.Linear)
        linear.weight.data = dense.tensor(f"{path}.weight").float()
    tokens = torch.tensor([[1, 5, 2, 9, 13, 4]])
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=tokens).logits, expected(input_ids=tokens).logits)
    generated = loaded.generate(tokens, max_new_tokens=4, do_sample=False)
    assert torch.equal(generated, expected.generate(tokens, max_new_tokens=4, do_sample=False))


def test_the_summary_counts_everything_and_says_what_loads_it(source, run_dir):
    summary = summary_of(run_dir)
    coverage, perplexity = summary["coverage"], summary["perplexity"]
    stored = Checkpoint(source)
    sizes = {name: stored.tensor(name).numel() for name in stored.names()}
    assert coverage["quantized_parameters"] == sum(sizes[f"{name}.weight"] for name in QUANTIZED)
    assert coverage["quantized_parameters"] + sum(coverage["float_parameters"].values()) == sum(sizes.values())
    mtp = sum(size for name, size in sizes.items() if name.startswith("mtp."))
    assert coverage["float_parameters"]["in the checkpoint, not in transformers' model (MTP layers)"] == mtp
    assert perplexity["reloaded"] == pytest.approx(perplexity["quantized"], rel=1e-3)
    assert [engine["loads"] for engine in summary["engines"]] == [True, True, True]


def test_tied_embeddings_of_the_wrapper(tmp_path):
    streamed = open_streamed(qwen_checkpoint(tmp_path / "tied", tie_word_embeddings=True))
    assert streamed.is_tied
    coverage = measure_coverage(streamed, GSQModule("unused", group_size=32))
    assert coverage.float_parameters["embedding, tied with the head"] == TEXT["vocab_size"] * TEXT["hidden_size"]
    assert set(coverage.float_linears) == KEPT | GATES


@pytest.mark.slow
def test_plan_and_rehearsal_from_the_config_alone(source, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["run.py"])
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_bytes((source / "config.json").read_bytes())
    recipe = write_recipe(tmp_path, bare)
    plan = run(recipe, tmp_path / "run", "--memory=12GiB", command="plan").memory_plan
    assert [block.indices for block in plan.blocks] == [(0, 1, 2), (3,)]
    assert "linear attention: planned with transformers' torch code" in capsys.readouterr().out
    few = ("--data.train_samples=16", "--data.gptq_samples=4", "--data.evaluation_samples=2")
    rows = run(recipe, tmp_path / "run", *few, command="rehearse").rehearsed
    assert {row.block for row in rows} == {None, 0, 3}


def test_an_export_without_the_mtp_layers_in_ignore_is_found_out(run_dir, tmp_path):
    """What compressed-tensors itself would not notice: its tree has no such layers, vLLM's has."""
    folder = tmp_path / "export"
    folder.mkdir()
    for file in (run_dir / "export").iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((folder / "config.json").read_text())
    ignore = config["quantization_config"]["ignore"]
    config["quantization_config"]["ignore"] = [n for n in ignore if not n.startswith(("mtp.", "model.layers."))]
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    transformers_, library, vllm = check_engines(folder)
    (problem,) = transformers_.problems
    assert "AutoModelForCausalLM" in problem
    assert "model.layers.0.linear_attn.in_proj_a" in problem
    assert library.loads
    (problem,) = vllm.problems
    assert problem.startswith("in float, but not on the ignore list: mtp.fc, mtp.layers.0.self_attn.q_proj")


@pytest.mark.slow
def test_vllm_does_not_load_a_packed_embedding_of_this_class(tmp_path):
    recipe = write_recipe(tmp_path, qwen_checkpoint(tmp_path / "checkpoint"))
    options = ("--model.refinement.epochs=0", "--model.num_blocks=1", "--model.head_bits=4", *BARE)
    problems = []
    for bits in ("null", "8"):
        run(recipe, tmp_path / bits, f"--model.embedding_bits={bits}", *options)
        (verdict,) = [found for found in check_engines(tmp_path / bits / "export") if found.engine == "vLLM"]
        problems.append("\n".join(verdict.problems))
    assert "issue 54304" not in problems[0]
    assert "embed_tokens is packed, which its class Qwen3_5ForConditionalGeneration does not load" in problems[1]
