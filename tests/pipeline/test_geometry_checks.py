"""What a model's geometry forbids is refused before a weight is read (cases 22, 27), and coverage is never silent."""

from __future__ import annotations

import pytest
import torch
from toy_models import family, open_streamed, save
from toy_runs import run, summary_of, toy_checkpoint, write_recipe

from gsq_module.coverage import check_geometry, measure_coverage
from gsq_module.module import GSQModule
from gsq_module.streaming.checkpoint import Checkpoint


@pytest.fixture
def nothing_read(monkeypatch):
    """The weights that were read, which must stay none."""
    read = []
    monkeypatch.setattr(Checkpoint, "tensors", lambda self, names: read.extend(names))
    monkeypatch.setattr(Checkpoint, "tensor", lambda self, name: read.append(name))
    return read


def refused(capsys, *arguments):
    """The message of a command that must end with status 2."""
    with pytest.raises(SystemExit) as caught:
        run(*arguments)
    assert caught.value.code == 2
    return capsys.readouterr().err


def test_group_that_does_not_divide(tmp_path, capsys, nothing_read):
    checkpoint = toy_checkpoint(tmp_path / "checkpoint", hidden_size=200, head_dim=32, intermediate_size=256)
    message = refused(capsys, write_recipe(tmp_path, checkpoint), tmp_path / "run", "--model.group_size=128")
    assert "model.group_size=128 does not divide the input width of 10 linears" in message
    # o_proj takes 128 columns and down_proj 256: they fit
    for linear in ("self_attn.q_proj [128, 200]", "self_attn.k_proj [64, 200]", "mlp.gate_proj [256, 200]"):
        assert f"model.layers.0.{linear}" in message
    assert "_proj [200" not in message
    assert "Choose a group_size" in message
    assert "model.ignore" in message
    assert nothing_read == []


def test_both_remedies_are_good(tmp_path):
    streamed = open_streamed(save(family("llama", hidden_size=200, head_dim=32, intermediate_size=256), tmp_path))
    assert check_geometry(streamed, GSQModule("unused", group_size=128))
    assert check_geometry(streamed, GSQModule("unused", group_size=8)) == []
    ignore = ["*.q_proj", "*.k_proj", "*.v_proj", "*.gate_proj", "*.up_proj"]
    recipe = GSQModule("unused", group_size=128, ignore=ignore)
    assert check_geometry(streamed, recipe) == []
    assert measure_coverage(streamed, recipe).quantized == [
        f"model.layers.{block}.{linear}" for block in range(3) for linear in ("self_attn.o_proj", "mlp.down_proj")
    ]


def test_ignoring_a_whole_unit_says_so(tmp_path):
    streamed = open_streamed(save(family("llama"), tmp_path))
    problems = check_geometry(streamed, GSQModule("unused", group_size=32, ignore=["*.mlp.*"]))
    assert len(problems) == 3
    assert "model.ignore" in problems[0]
    assert "Leave 'mlp' out of model.units" in problems[0]
    assert "experts" not in problems[0]


def test_more_blocks_than_there_are(tmp_path):
    streamed = open_streamed(save(family("llama"), tmp_path))
    (problem,) = check_geometry(streamed, GSQModule("unused", group_size=32, num_blocks=4))
    assert problem == "model.num_blocks=4: the model has 3 blocks"


def test_unit_under_an_unknown_name(tmp_path):
    streamed = open_streamed(save(family("llama"), tmp_path))
    for block in streamed.blocks:
        block.gizmo = block.mlp
        del block.mlp
    problem = check_geometry(streamed, GSQModule("unused", group_size=32, units=["mlp"]))[-1]
    assert "model.layers.2 has no mlp part under a known name (mlp, feed_forward" in problem
    assert "gizmo" in problem


@pytest.fixture
def mixtral(tmp_path):
    """In the layout of the modules: transformers fuses the experts of published Mixtrals while loading."""
    model = family("mixtral", num_hidden_layers=2)
    return write_recipe(tmp_path, save(model, tmp_path / "checkpoint", save_original_format=False))


def test_fused_experts_are_refused(mixtral, tmp_path, capsys, nothing_read):
    message = refused(capsys, mixtral, tmp_path / "run")
    assert "model.layers.0.mlp keeps weights outside nn.Linear (experts.gate_up_proj, experts.down_proj)" in message
    assert "Leave 'mlp' out of model.units" in message
    assert nothing_read == []


def test_attention_beside_fused_experts(mixtral, tmp_path):
    run(mixtral, tmp_path / "run", "--model.units=[attention]")
    summary = summary_of(tmp_path / "run")
    assert [unit["unit"] for unit in summary["units"]] == ["attention", "attention"]
    assert any(unit["kept"] == "refined" for unit in summary["units"])
    coverage = summary["coverage"]
    experts = 2 * 4 * 3 * 64 * 128
    assert coverage["float_parameters"]["fused experts"] == experts
    assert coverage["quantized_parameters"] == 2 * (2 * 64 * 64 + 2 * 64 * 32)
    assert coverage["quantized_fraction"] < 0.2
    assert summary["perplexity"]["reloaded"] == pytest.approx(summary["perplexity"]["quantized"], rel=1e-3)


def test_experts_stored_one_by_one_are_refused(tmp_path, capsys, nothing_read):
    recipe = write_recipe(tmp_path, save(family("mixtral", num_hidden_layers=2), tmp_path / "checkpoint"))
    message = refused(capsys, recipe, tmp_path / "run", "--model.units=[attention]")
    assert "lacks 6 weights" in message
    assert "model.layers.0.mlp.experts.gate_up_proj" in message
    assert "save_original_format=False" in message
    assert nothing_read == []


def test_coverage_gives_every_parameter_one_reason(tmp_path):
    folder = save(family("qwen3_5", tie_word_embeddings=True), tmp_path)
    streamed = open_streamed(folder)
    recipe = GSQModule("unused", group_size=32, units=["attention"], num_blocks=2)
    coverage = measure_coverage(streamed, recipe)
    stored = {name: Checkpoint(folder).tensor(name) for name in Checkpoint(folder).names()}
    assert sum(coverage.float_parameters.values()) + coverage.quantized_parameters == sum(
        tensor.numel() for tensor in stored.values()
    )
    hidden, mlp = 64, 3 * 64 * 128
    third_block = sum(t.numel() for n, t in stored.items() if ".layers.2." in n and n.endswith(("proj.weight",)))
    third_block += sum(t.numel() for n, t in stored.items() if ".layers.2." in n and "in_proj_" in n)
    assert coverage.float_parameters == {
        "embedding, tied with the head": 97 * hidden,
        "linears in model.ignore": 2 * 4 * hidden,
        "linears outside model.units": 2 * mlp,
        "blocks after model.num_blocks": third_block,
        "outside the decoder blocks": hidden,
        "norms, biases and other small tensors": coverage.float_parameters["norms, biases and other small tensors"],
    }
    assert "lm_head" in coverage.float_linears, "a consumer quantizes every linear that the ignore list does not name"
    linears = [name for name, module in streamed.model.named_modules() if isinstance(module, torch.nn.Linear)]
    assert sorted(coverage.float_linears + coverage.quantized) == sorted(linears)
