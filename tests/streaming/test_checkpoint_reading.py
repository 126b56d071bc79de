"""Checkpoint folders: single file, shards, what is missing (case 40), and what the module tree needs."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from toy_models import family, open_streamed, save, tokenizer

from gsq_module.coverage import check_geometry
from gsq_module.export.engines import check_engines
from gsq_module.export.reader import open_checkpoint
from gsq_module.module import GSQModule
from gsq_module.streaming.checkpoint import INDEX_FILE, Checkpoint
from gsq_module.streaming.tree import meta_model


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    return save(family("llama"), tmp_path_factory.mktemp("sharded"), max_shard_size="60KB")


@pytest.fixture
def single(tmp_path):
    return save(family("llama"), tmp_path / "single")


def copy_of(folder, target):
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


@pytest.mark.parametrize("left", [0, 1000, -1])
def test_a_file_that_was_cut_off_is_named(left, sharded, single, tmp_path):
    shards = copy_of(sharded, tmp_path / "shards")
    for folder, name in ((shards, Checkpoint(shards).files()[2]), (single, "model.safetensors")):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[:left])
        with pytest.raises(ValueError, match=rf"{name} is not whole .*hf download"):
            Checkpoint(folder)


def edit(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_single_file_and_shards_hold_the_same(sharded, single):
    one, many = Checkpoint(single), Checkpoint(sharded)
    assert one.files() == ["model.safetensors"]
    assert len(many.files()) > 3
    assert sorted(one.names()) == sorted(many.names())
    assert sorted(name for file in many.files() for name in many.names_in(file)) == sorted(one.names())
    for name, tensor in many.tensors(many.names()).items():
        assert torch.equal(tensor, one.tensor(name))
        assert many.shape(name) == tuple(tensor.shape)


def test_missing_shards_are_named(sharded, tmp_path):
    folder = copy_of(sharded, tmp_path / "copy")
    gone = Checkpoint(folder).files()[1:3]
    for file in gone:
        (folder / file).unlink()
    with pytest.raises(FileNotFoundError) as caught:
        Checkpoint(folder)
    assert all(file in str(caught.value) for file in gone)
    assert Checkpoint(sharded).files()[0] not in str(caught.value)
    assert "hf download" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ('{"weight_map": {"model.nor', "is cut off or no JSON"),
        ('["model.norm.weight"]', "has no weight_map"),
        ('{"metadata": {}}', "has no weight_map"),
        ('{"weight_map": {"model.norm.weight": 1}}', "has no weight_map"),
        ('{"weight_map": {}}', "weight_map is empty"),
    ],
)
def test_a_damaged_index_is_named(sharded, tmp_path, content, what):
    folder = copy_of(sharded, tmp_path / "copy")
    (folder / INDEX_FILE).write_text(content)
    with pytest.raises(ValueError, match=rf"{INDEX_FILE}:? {what}.*hf download"):
        Checkpoint(folder)


def test_an_index_of_other_files_is_named(sharded, tmp_path):
    folder = copy_of(sharded, tmp_path / "copy")
    index = json.loads((folder / INDEX_FILE).read_text())
    first = next(iter(index["weight_map"].values()))
    index["weight_map"] |= {"model.extra.weight": first, "model.extra.bias": first}
    (folder / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=rf"names 2 tensors .* model\.extra\.weight in {first}"):
        Checkpoint(folder)


def test_folder_without_weights(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors\.index\.json nor model\.safetensors"):
        Checkpoint(tmp_path)
    with pytest.raises(FileNotFoundError, match="no checkpoint folder"):
        Checkpoint(tmp_path / "nothing")


def test_missing_weights_are_listed_when_a_block_is_loaded(single):
    gone = ["model.layers.1.mlp.up_proj.weight", "model.layers.1.self_attn.q_proj.weight"]
    edit(single, lambda tensors: [tensors.pop(name) for name in gone])
    streamed = open_streamed(single)
    streamed.load_block(0)
    with pytest.raises(ValueError, match="lacks weights") as caught:
        streamed.load_block(1)
    assert all(name in str(caught.value) for name in gone)


def test_missing_weights_are_listed_before_any_is_read(single, monkeypatch):
    gone = ["model.layers.2.mlp.up_proj.weight", "model.norm.weight", "model.embed_tokens.weight"]
    edit(single, lambda tensors: [tensors.pop(name) for name in gone])
    streamed = open_streamed(single)
    monkeypatch.setattr(Checkpoint, "tensors", None)
    (problem,) = check_geometry(streamed, GSQModule("unused", group_size=32))
    assert all(name in problem for name in gone)


def test_missing_head_is_no_tied_head(single):
    """Without its head an untied checkpoint would be measured with the embedding in the head's place."""
    edit(single, lambda tensors: tensors.pop("lm_head.weight"))
    streamed = open_streamed(single)
    assert not streamed.is_tied
    (problem,) = check_geometry(streamed, GSQModule("unused", group_size=32))
    assert "lm_head.weight" in problem


def test_whole_checkpoints_lack_nothing(sharded, tmp_path):
    recipe = GSQModule("unused", group_size=32)
    assert check_geometry(open_streamed(sharded), recipe) == []
    tied = save(family("gemma3", tie_word_embeddings=True), tmp_path / "tied")
    assert check_geometry(open_streamed(tied), recipe) == []


def test_dtype_is_that_of_most_tensors(single):
    def mixed(tensors):
        for name in tensors:
            if "norm" not in name:
                tensors[name] = tensors[name].to(torch.float16)

    edit(single, mixed)
    assert Checkpoint(single).dtype() == torch.float16


def test_unknown_model_type(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "of_tomorrow"}))
    with pytest.raises(ValueError, match="does not know model_type 'of_tomorrow'"):
        meta_model(tmp_path)


@pytest.mark.parametrize("read", [meta_model, open_checkpoint, check_engines])
@pytest.mark.parametrize(
    ("content", "what"),
    [
        ('{"model_type": "lla', "is cut off or no JSON"),
        ("", "is cut off or no JSON"),
        ("\xff\xfe", "is cut off or no JSON"),
        ("[1]", "holds no JSON object, but list"),
        ("{}", "model_type=None names no architecture"),
        ('{"model_type": ["llama"]}', r"model_type=\['llama'\] names no architecture"),
    ],
)
def test_a_broken_config_is_named_with_the_next_step(content, what, read, tmp_path):
    # The folder's name must not stand in for the type, as it does for transformers.
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=what) as caught:
        read(folder)
    assert str(folder / "config.json") in str(caught.value)
    assert "Next: get it again" in str(caught.value)


@pytest.mark.parametrize(("key", "value"), [("hidden_size", "wide"), ("num_attention_heads", 0), ("hidden_act", "no")])
def test_a_value_that_makes_no_model_names_the_file(key, value, single):
    file = single / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(ValueError, match="makes no model of it") as caught:
        meta_model(single)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("found", ["2 bits", {"quant_method": "compressed-tensors", "format": "pack-quantized"}])
def test_a_quantization_config_that_cannot_be_read_names_the_file(found, single):
    file = single / "config.json"
    if isinstance(found, dict):
        found["config_groups"] = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": "two"}}}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": found}))
    for read in (open_checkpoint, check_engines):
        with pytest.raises(ValueError, match="quantization_config") as caught:
            read(single)
        assert str(file) in str(caught.value)
        assert "Next: " in str(caught.value)


def test_folder_without_config(tmp_path):
    tokenizer().save_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        meta_model(tmp_path)
