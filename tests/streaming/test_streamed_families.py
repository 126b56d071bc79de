"""Block by block equals the whole forward pass, for every family (cases 25, 26)."""

from __future__ import annotations

import pytest
import torch
from toy_models import CPU, FAMILIES, family, open_streamed, save, streamed_logits, tokens

from gsq_module.quantization.grid import QuantizedWeight
from gsq_module.streaming.checkpoint import Checkpoint
from gsq_module.streaming.units import find_unit, trace_units

DENSE = [name for name in FAMILIES if name != "mixtral"]
SEQ_LEN = 24
"""Three times the sliding windows of the toys."""


@torch.no_grad()
def whole_logits(model, rows):
    return model(input_ids=rows, use_cache=False).logits


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", DENSE)
def test_streaming_equals_the_whole_forward_pass(name, tied, tmp_path):
    model = family(name, tie_word_embeddings=tied)
    save(model, tmp_path, max_shard_size="60KB" if tied else "5GB")
    checkpoint = Checkpoint(tmp_path)
    assert (len(checkpoint.files()) > 3) == tied
    assert ("lm_head.weight" in checkpoint) != tied
    rows = tokens(5, SEQ_LEN)

    streamed = open_streamed(tmp_path)

    assert streamed.is_tied == tied
    torch.testing.assert_close(streamed_logits(streamed, rows, 2), whole_logits(model, rows), rtol=0, atol=1e-5)
    assert all(p.is_meta for p in streamed.model.parameters()), "weights stay behind after use"


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_5"])
def test_parts_of_the_head_are_the_head(name, tied, tmp_path):
    """What a model does with its logits (Gemma 2 caps them) is done to each part."""
    save(family(name, tie_word_embeddings=tied), tmp_path)
    streamed = open_streamed(tmp_path)
    vocabulary, hidden = streamed.embedding.weight.shape
    states = torch.randn(2, SEQ_LEN, hidden, generator=torch.Generator().manual_seed(0))
    codes = torch.randint(-8, 8, (vocabulary, hidden), dtype=torch.int8)
    hard = QuantizedWeight(codes, torch.rand(vocabulary, 2))
    for quantized in ({}, {streamed.embedding_path if tied else streamed.head_path: hard}):
        with streamed.head(quantized) as head:
            whole = head(states)
        parts = streamed.head_parts(20 * hidden)
        assert len(parts) > 2
        found = []
        for part in parts:
            with streamed.head(quantized, part) as head:
                found.append(head(states))
        torch.testing.assert_close(torch.cat(found, -1), whole, rtol=0, atol=1e-5)
        assert all(p.is_meta for p in streamed.model.parameters()), "weights stay behind after use"
        assert streamed.model.get_submodule(streamed.head_path).weight.shape == (vocabulary, hidden)


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gemma3"])
def test_the_sliding_window_takes_part(name, tmp_path):
    """Else the equality above would say nothing about masks."""
    model = family(name)
    rows = tokens(1, SEQ_LEN)
    inside = whole_logits(model, rows)
    model.config.sliding_window = 64
    for layer in model.model.layers:
        layer.self_attn.sliding_window = 64
    assert (whole_logits(model, rows) - inside).abs().max() > 1e-2


def test_each_block_gets_its_own_mask(tmp_path):
    """Gemma 3: blocks 0 and 2 slide, block 1 sees everything."""
    save(family("gemma3"), tmp_path)
    streamed = open_streamed(tmp_path)
    calls = streamed.record_calls(1, SEQ_LEN)
    hidden = torch.randn(1, SEQ_LEN, 64, generator=torch.Generator().manual_seed(0))
    block = streamed.load_block(1)
    with torch.no_grad():
        assert (calls[1](block, hidden) - calls[0](block, hidden)).abs().max() > 1e-2


def test_bfloat16_checkpoint_in_float32(tmp_path):
    model = family("llama")
    save(model, tmp_path, torch.bfloat16)
    streamed = open_streamed(tmp_path)
    assert streamed.checkpoint.dtype() == torch.bfloat16
    rows = tokens(2, SEQ_LEN)
    torch.testing.assert_close(streamed_logits(streamed, rows, 2), whole_logits(model, rows), rtol=0, atol=1e-5)


NORMS = {
    # attention: pre, post; mlp: pre, post
    "llama": ("input_layernorm", None, "post_attention_layernorm", None),
    "qwen3_5": ("input_layernorm", None, "post_attention_layernorm", None),
    "gemma2": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}
NORMS["gemma3"] = NORMS["gemma2"]


@pytest.mark.parametrize("name", NORMS)
def test_norms_around_the_units_are_found(name, tmp_path):
    save(family(name), tmp_path)
    streamed = open_streamed(tmp_path)
    calls = streamed.record_calls(2, SEQ_LEN)
    hidden = torch.randn(2, SEQ_LEN, 64, generator=torch.Generator().manual_seed(0))
    for index in range(2):  # Qwen3.5: one linear, one full attention block
        block = streamed.load_block(index)
        attention, mlp = (find_unit(block, streamed.block_name(index), kind, ()) for kind in ("attention", "mlp"))
        trace_units(block, calls[index], hidden.to(CPU), [attention, mlp])
        children = {module: child for child, module in block.named_children()}
        norms = [attention.pre_norm, attention.post_norm, mlp.pre_norm, mlp.post_norm]
        assert tuple(None if norm is None else children[norm] for norm in norms) == NORMS[name]
        assert [attention.ends_block, mlp.ends_block] == [False, True]


def test_numbers_that_are_none_are_not_taken_for_another_kind_of_block(tmp_path):
    """Case 17: a damaged weight."""
    save(family("llama"), tmp_path)
    streamed = open_streamed(tmp_path)
    call = streamed.record_calls(1, SEQ_LEN)[0]
    block = streamed.load_block(0)
    block.mlp.down_proj.weight[3, 5] = torch.nan
    unit = find_unit(block, streamed.block_name(0), "mlp", ())
    with pytest.raises(ValueError, match=r"not finite.*damaged checkpoint"):
        trace_units(block, call, torch.ones(1, SEQ_LEN, 64), [unit])


def test_units_of_qwen3_5_leave_the_small_gates_out(tmp_path):
    save(family("qwen3_5"), tmp_path)
    streamed = open_streamed(tmp_path)
    ignore = ["*.in_proj_a", "*.in_proj_b"]
    linear, full = (find_unit(streamed.blocks[i], streamed.block_name(i), "attention", ignore) for i in (0, 1))
    assert set(linear.linears) == {"in_proj_qkv", "in_proj_z", "out_proj"}
    assert set(full.linears) == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert linear.full_name("out_proj") == "model.layers.0.linear_attn.out_proj"
