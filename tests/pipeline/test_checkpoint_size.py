"""The size of the exported checkpoint, and the stages of embedding and head, from a config.json alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from toy_runs import run, toy_checkpoint, write_recipe

from gsq_module.data.module import CalibrationData
from gsq_module.data.sources import TextFiles
from gsq_module.memory.plan import MemoryPlan
from gsq_module.memory.plan_report import as_dict
from gsq_module.memory.sizes import ROW_CHUNK_WEIGHTS
from gsq_module.memory.stage_formulas import ROW_CHUNK_BYTES
from gsq_module.module import GSQModule
from gsq_module.planning import plan_run
from gsq_module.streaming.checkpoint import Checkpoint

GEOMETRY = Path(__file__).parents[2] / "recipes" / "geometry" / "qwen3.6-27b-text"
TEXT_PARAMETERS = 26_895_998_464
HIDDEN, VOCABULARY = 5120, 248_320
GIB = 2**30


def plan(folder: Path, world_size: int = 1, strategy: str = "single", **recipe) -> MemoryPlan:
    text = TextFiles(["unread.txt"])
    data = CalibrationData(text, {"words": text}, batch_size=8, microbatch_size=1, seq_len=64, forward_batch_size=1)
    return plan_run(folder, GSQModule("unused", **recipe), data, torch.device("cuda"), 12 * GIB, world_size, strategy)


@pytest.fixture(scope="module")
def short(tmp_path_factory) -> Path:
    """Qwen3.6-27B with two blocks, of the kind that is traced sooner."""
    folder = tmp_path_factory.mktemp("short")
    config = json.loads((GEOMETRY / "config.json").read_text())
    config |= {"layer_types": ["full_attention"] * 2, "num_hidden_layers": 2}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "gigabytes"), [(None, 11.6), (8, 9.1), (4, 7.8)], ids=["bf16", "8 bits", "4 bits"])
def test_the_published_sizes_of_the_27b_model(bits, gigabytes):
    """At 2 bits in groups of 128, by bits of embedding and head (field-notes.md)."""
    made = plan(GEOMETRY, embedding_bits=bits, head_bits=bits)
    assert made.checkpoint_bytes / 1e9 == pytest.approx(gigabytes, rel=0.01)
    assert made.job.model_bytes == 2 * TEXT_PARAMETERS
    assert as_dict(made, 12 * GIB)["checkpoint"] == made.checkpoint_bytes


@pytest.mark.slow
def test_embedding_and_head_of_the_27b_model(short):
    now = plan(short)
    bits = {None: 16, 8: 8 + 16 / 128, 4: 4 + 16 / 128}
    for embedding, head in ((8, None), (8, 4)):
        made = plan(short, embedding_bits=embedding, head_bits=head)
        saved = HIDDEN * VOCABULARY / 8 * sum(16 - bits[part] for part in (embedding, head))
        assert now.checkpoint_bytes - made.checkpoint_bytes == saved
        # shards of the run and of its initial codes, beside the smaller export
        shards = HIDDEN * VOCABULARY / 8 * sum(bits[part] for part in (embedding, head) if part)
        assert made.disk_bytes - now.disk_bytes == 2 * shards - saved


@pytest.mark.slow
def test_the_device_never_holds_more_than_some_rows_of_them(short):
    made = plan(short, embedding_bits=8, head_bits=8, store="memory")
    stages = {stage.stage: stage for stage in made.stages}
    assert list(stages)[:2] == ["embedding", "embed"]
    assert list(stages).index("propagate") < list(stages).index("head") < list(stages).index("evaluate")
    assert stages["embedding"].allocated == ROW_CHUNK_BYTES * ROW_CHUNK_WEIGHTS
    assert stages["head"].allocated < 1.5 * GIB
    assert stages["head"].terms["Hessians"] == 4 * HIDDEN**2
    rows = stages["head"].terms["rows"]
    assert rows == ROW_CHUNK_BYTES * ROW_CHUNK_WEIGHTS
    two = plan(short, 2, "ddp", embedding_bits=8, head_bits=8, store="memory")
    assert two.predicted("head", None, None) - made.predicted("head", None, None) == 3 * ROW_CHUNK_WEIGHTS
    assert (
        plan(short, head_bits=8, initializer="rtn").predicted("head", None, None) == ROW_CHUNK_BYTES * ROW_CHUNK_WEIGHTS
    )


@pytest.mark.slow
def test_the_way_to_the_head_counts_where_blocks_behind_stay_in_float(short):
    part, whole = (plan(short, head_bits=8, num_blocks=blocks, store="memory") for blocks in (1, None))
    assert part.predicted("head", None, None) >= part.predicted("propagate", 0, None)
    assert part.predicted("head", None, None) >= whole.predicted("head", None, None)


@pytest.mark.slow
@pytest.mark.parametrize("tie", [False, True])
def test_it_is_what_an_export_holds(tmp_path, tie):
    recipe = write_recipe(tmp_path, toy_checkpoint(tmp_path / "model", dtype=torch.bfloat16, tie_word_embeddings=tie))
    settings = {"embedding_bits": 8, "group_size": 32} | ({} if tie else {"head_bits": 4})
    options = [f"--model.{key}={value}" for key, value in settings.items()]
    run(recipe, tmp_path / "run", *options, "--model.refinement.epochs=0", "--reload_max_gib=0")
    report = json.loads((tmp_path / "run/export/gsq_export.json").read_text())
    shapes = 16 * sum(name.endswith(".weight_shape") for name in Checkpoint(tmp_path / "run/export").names())
    assert plan(tmp_path / "model", **settings).checkpoint_bytes == report["total_bytes"] - shapes
