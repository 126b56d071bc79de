"""A small Qwen3.5 checkpoint as the hub stores one: wrapper class, vision tower, hybrid text stack, MTP layers."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from toy_models import SIZES, randomize, save
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from gsq_module.streaming.checkpoint import INDEX_FILE, Checkpoint

TEXT = {key: value for key, value in SIZES.items() if key != "num_hidden_layers"} | {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
    "mtp_num_hidden_layers": 1,
}
VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": TEXT["hidden_size"],
    "num_position_embeddings": 16,
}
MEDIA_TOKENS = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}


def qwen_config(num_blocks: int = 4, **text: object) -> Qwen3_5Config:
    """Three blocks of Gated DeltaNet, one of full attention, and so on."""
    settings = {"num_hidden_layers": num_blocks, **TEXT, **text}
    tied = {"tie_word_embeddings": settings["tie_word_embeddings"]}
    return Qwen3_5Config(text_config=settings, vision_config=VISION, **MEDIA_TOKENS, **tied)


def mtp_tensors(seed: int = 1) -> dict[str, Tensor]:
    """Layers that predict one token more, which transformers does not know: a full-attention block and its input."""
    hidden, inner = TEXT["hidden_size"], TEXT["intermediate_size"]
    queries, keys = (TEXT[f"num_{kind}_heads"] * TEXT["head_dim"] for kind in ("attention", "key_value"))
    shapes = {
        "fc": (hidden, 2 * hidden),
        "layers.0.self_attn.q_proj": (2 * queries, hidden),
        "layers.0.self_attn.k_proj": (keys, hidden),
        "layers.0.self_attn.v_proj": (keys, hidden),
        "layers.0.self_attn.o_proj": (hidden, queries),
        "layers.0.self_attn.q_norm": (TEXT["head_dim"],),
        "layers.0.self_attn.k_norm": (TEXT["head_dim"],),
        "layers.0.mlp.gate_proj": (inner, hidden),
        "layers.0.mlp.up_proj": (inner, hidden),
        "layers.0.mlp.down_proj": (hidden, inner),
        "layers.0.input_layernorm": (hidden,),
        "layers.0.post_attention_layernorm": (hidden,),
        "norm": (hidden,),
        "pre_fc_norm_embedding": (hidden,),
        "pre_fc_norm_hidden": (hidden,),
    }
    generator = torch.Generator().manual_seed(seed)
    return {f"mtp.{name}.weight": torch.randn(shape, generator=generator) / 8 for name, shape in shapes.items()}


def qwen_checkpoint(folder: Path, dtype: torch.dtype = torch.bfloat16, **config: object) -> Path:
    """Write the folder: two shards and an index, vision tower and MTP layers in the second; A_log in float32."""
    model = Qwen3_5ForConditionalGeneration(qwen_config(**config)).eval()
    randomize(model)
    save(model, folder, dtype)
    weights = folder / "model.safetensors"
    checkpoint = Checkpoint(folder)
    stored = checkpoint.tensors(checkpoint.names())
    weights.unlink()
    # Of another dtype than the rest, as checkpoints have tensors that must not be rounded.
    stored |= {name: tensor.float() + 1e-4 for name, tensor in stored.items() if name.endswith("A_log")}
    vision = {name: stored.pop(name) for name in list(stored) if ".visual." in name}
    second = vision | {name: tensor.to(dtype) for name, tensor in mtp_tensors().items()}
    weight_map = {}
    for file, tensors in (("model-00001-of-00002.safetensors", stored), ("model-00002-of-00002.safetensors", second)):
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder
