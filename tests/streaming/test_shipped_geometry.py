"""The config.json files that are shipped to plan with have the published models' parameters."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from torch import nn

from gsq_module.streaming.tree import causal_lm_names, find_blocks, meta_model

GEOMETRY = Path(__file__).parents[2] / "recipes" / "geometry"
TEXT = 26_895_998_464
VISION = 460_730_096


def parameters(model: nn.Module) -> Counter[str]:
    """Of the vision tower and of the rest."""
    counts: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        counts["vision" if ".visual." in name else "text"] += parameter.numel()
    return counts


@pytest.mark.parametrize(
    ("name", "expected", "blocks"),
    [
        ("qwen3.6-27b-text", {"text": TEXT}, "model.layers"),
        ("qwen3.6-27b", {"text": TEXT, "vision": VISION}, "model.language_model.layers"),
    ],
)
def test_qwen36_27b(name: str, expected: dict[str, int], blocks: str) -> None:
    model = meta_model(GEOMETRY / name)
    assert parameters(model) == expected
    assert find_blocks(model) == blocks
    assert len(model.get_submodule(blocks)) == 64


def test_names_in_the_text_only_class() -> None:
    renamed = causal_lm_names(meta_model(GEOMETRY / "qwen3.6-27b"))
    assert renamed["model.language_model.layers.63.self_attn.q_proj"] == "model.layers.63.self_attn.q_proj"
    assert renamed["model.language_model.embed_tokens"] == "model.embed_tokens"
    assert not any(".visual." in name for name in renamed)
    assert causal_lm_names(meta_model(GEOMETRY / "qwen3.6-27b-text")) == {}
