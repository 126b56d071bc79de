"""Block calls of every form are recorded and replayed; what cannot be is refused (cases 23, 24, 28)."""

from __future__ import annotations

import pytest
import torch
from toy_models import streamed_logits, streamed_toy, tokens

from gsq_module.streaming.units import find_unit, trace_units

FORMS = [
    {"returns": returns, "passing": passing}
    for returns in ("tensor", "tuple")
    for passing in ("positional", "keyword", "all_keywords")
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(form.values()))
def test_every_form_of_call_gives_the_same(form, tmp_path):
    plain, whole = streamed_toy(tmp_path / "plain")
    other, _ = streamed_toy(tmp_path / "other", **form)
    rows = tokens(5, 12)
    expected = streamed_logits(plain, rows, 2)
    assert torch.equal(streamed_logits(other, rows, 2), expected)
    with torch.no_grad():
        torch.testing.assert_close(whole(rows, use_cache=False).logits, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(form.values()))
def test_a_call_keeps_all_but_the_hidden_states(form, tmp_path):
    streamed, _ = streamed_toy(tmp_path, **form)
    call = streamed.record_calls(2, 12)[1]
    assert call.place == ("hidden_states" if form["passing"] == "all_keywords" else 0)
    assert [tuple(tensor.shape) for tensor in call.tensors()] == [(1, 12, 64)], "positions, no hidden states"


def test_decoder_nested_beside_a_vision_tower_is_found(tmp_path):
    streamed, _ = streamed_toy(tmp_path / "nested", nested=True)
    plain, _ = streamed_toy(tmp_path / "plain")
    assert streamed.blocks_path == "model.language_model.layers"
    assert streamed.block_name(2) == "model.language_model.layers.2"
    # The weights are not the plain model's (the tower took random numbers first), so compare structure only.
    assert streamed.num_blocks == plain.num_blocks
    rows = tokens(3, 12)
    assert streamed_logits(streamed, rows, 2).shape == (3, 12, 97)


def test_nested_decoder_streams_what_it_computes_whole(tmp_path):
    streamed, whole = streamed_toy(tmp_path, nested=True)
    rows = tokens(3, 12)
    with torch.no_grad():
        expected = whole(rows, use_cache=False).logits
    torch.testing.assert_close(streamed_logits(streamed, rows, 2), expected, rtol=0, atol=1e-5)
    assert all(p.is_meta for p in streamed.model.model.visual.parameters()), "the tower is never needed"


def test_two_lists_of_blocks_are_listed(tmp_path):
    with pytest.raises(ValueError, match="cannot tell") as caught:
        streamed_toy(tmp_path, twin=True)
    assert "model.layers (3)" in str(caught.value)
    assert "predictors (3)" in str(caught.value)


def test_arguments_that_depend_on_the_tokens_are_refused(tmp_path):
    streamed, _ = streamed_toy(tmp_path, per_layer=True)
    with pytest.raises(ValueError, match=r"model\.layers\.0 .*depend on the tokens"):
        streamed.record_calls(2, 12)


def traced(folder, shrink=1.0, **how):
    """Units of block 0; with `shrink` they add next to nothing to hidden states of order one, as in real models."""
    streamed, _ = streamed_toy(folder, **how)
    call = streamed.record_calls(2, 12)[0]
    block = streamed.load_block(0)
    for linear in (block.self_attn.o_proj, block.mlp.down_proj):
        linear.weight.mul_(shrink)
    units = [find_unit(block, streamed.block_name(0), kind, ()) for kind in ("attention", "mlp")]
    trace_units(block, call, torch.randn(2, 12, 64, generator=torch.Generator().manual_seed(0)), units)
    return units


@pytest.mark.parametrize("shrink", [1.0, 1e-4])
def test_sequential_residual_is_traced(shrink, tmp_path):
    """The attention's sum is not the block's end, however little the MLP adds to it."""
    attention, mlp = traced(tmp_path, shrink)
    assert [attention.ends_block, mlp.ends_block] == [False, True]


@pytest.mark.parametrize("shrink", [1.0, 1e-4])
def test_parallel_residual_is_refused(shrink, tmp_path):
    with pytest.raises(ValueError, match=r"model\.layers\.0\.self_attn: .*--model\.target original_unit"):
        traced(tmp_path, shrink, parallel=True)


def test_scaled_residual_is_refused(tmp_path):
    """`x + 0.5 * unit(x)`: residual and unit's output do not add up to what the block passes on."""
    with pytest.raises(ValueError, match="original_unit"):
        traced(tmp_path, factor=0.5)


def test_experts_beside_linears_are_refused(tmp_path):
    """A shared expert is made of linears, and the others must not stay in float without a word."""
    streamed, _ = streamed_toy(tmp_path)
    mlp = streamed.blocks[0].mlp
    mlp.experts = torch.nn.Module()
    mlp.experts.gate_up_proj = torch.nn.Parameter(torch.empty(4, 8, 16, device="meta"))
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp .*experts\.gate_up_proj.*Leave 'mlp' out"):
        find_unit(streamed.blocks[0], "model.layers.0", "mlp", ())
    # A short convolution is a 3-D weight too, but no stack of matrices.
    del mlp.experts
    mlp.conv1d = torch.nn.Conv1d(16, 16, 4, groups=16, device="meta")
    assert set(find_unit(streamed.blocks[0], "model.layers.0", "mlp", ()).linears) == {"up_proj", "down_proj"}
