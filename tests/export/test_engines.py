"""What the checks of an export say of good ones and of each way to break one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import pack_to_int32
from export_helpers import random_weight
from safetensors.torch import load_file, save_file
from toy_models import family, open_streamed, save

from gsq_module.coverage import measure_coverage
from gsq_module.export import engines, vllm
from gsq_module.export.engines import check_engines
from gsq_module.export.reader import open_checkpoint
from gsq_module.export.writer import export_checkpoint
from gsq_module.module import GSQModule
from gsq_module.quantization.grid import GRIDS

GROUP = 32
GRID = GRIDS[2]
WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "group", "group_size": 16, "dynamic": False}


class Export:
    """An export of a two-block Llama, to be changed on disk."""

    def __init__(self, folder: Path, **recipe: Any) -> None:
        streamed = open_streamed(save(family("llama", num_hidden_layers=2), folder / "source", torch.bfloat16))
        coverage = measure_coverage(streamed, GSQModule("unused", group_size=GROUP, **recipe))
        weights = {
            name: random_weight(GRID, *streamed.model.get_submodule(name).weight.shape, GROUP, seed)
            for seed, name in enumerate(coverage.quantized)
        }
        self.folder = folder / "export"
        export_checkpoint(streamed.checkpoint, self.folder, weights, GRID, GROUP, coverage.float_linears)

    def configure(self, change: Any) -> None:
        """`change` is given the quantization_config."""
        file = self.folder / "config.json"
        config = json.loads(file.read_text())
        change(config["quantization_config"])
        file.write_text(json.dumps(config))

    def store(self, change: Any) -> None:
        """`change` is given the tensors by name."""
        (file,) = self.folder.glob("*.safetensors")
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, metadata={"format": "pt"})
        index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, file.name)}
        (self.folder / "model.safetensors.index.json").write_text(json.dumps(index))

    def problems(self) -> dict[str, str]:
        """By engine, of those that cannot load it."""
        verdicts = check_engines(self.folder)
        assert [v.engine.split()[0] for v in verdicts] == ["transformers", "compressed-tensors", "vLLM"]
        return {v.engine.split()[0]: "\n".join(v.problems) for v in verdicts if not v.loads}


@pytest.fixture
def export(tmp_path: Path) -> Export:
    return Export(tmp_path)


def pack_head(tensors: dict[str, torch.Tensor]) -> None:
    """Store the head in 8 bits, group 16, as a second config group would."""
    rows, columns = tensors.pop("lm_head.weight").shape
    codes = torch.randint(-128, 128, (rows, columns), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    tensors["lm_head.weight_packed"] = pack_to_int32(codes, 8).contiguous()
    tensors["lm_head.weight_scale"] = torch.rand(rows, columns // 16).to(torch.bfloat16)
    tensors["lm_head.weight_shape"] = torch.tensor([rows, columns])


def test_a_good_export_can_be_loaded_by_all(export: Export) -> None:
    assert export.problems() == {}
    lines = engines.as_lines(check_engines(export.folder))
    assert len(lines) == 3
    assert all(": can load it" in line for line in lines)
    assert "Humming" in lines[2]
    assert "not run" in lines[2]


def test_whole_units_in_float_are_no_problem(tmp_path: Path) -> None:
    assert Export(tmp_path, units=["mlp"], num_blocks=1).problems() == {}


def test_one_part_of_a_fused_layer_in_float(tmp_path: Path) -> None:
    problems = Export(tmp_path, ignore=["*.k_proj", "*.layers.1.*.up_proj"]).problems()
    assert set(problems) == {"vLLM"}
    attention, mlp = problems["vLLM"].splitlines()
    assert attention.startswith("q_proj, k_proj and v_proj are one layer there, but k_proj stays in float")
    assert attention.endswith(": model.layers.0.self_attn, model.layers.1.self_attn")
    assert mlp.endswith("up_proj stays in float, the rest not: model.layers.1.mlp")


def test_a_packed_layer_on_the_ignore_list(export: Export) -> None:
    export.configure(lambda config: config["ignore"].append("model.layers.1.mlp.down_proj"))
    problems = export.problems()
    assert set(problems) == {"transformers", "compressed-tensors", "vLLM"}
    assert all("model.layers.1.mlp.down_proj" in text for text in problems.values())


def test_a_float_layer_missing_from_the_ignore_list(tmp_path: Path) -> None:
    export = Export(tmp_path, units=["mlp"])
    export.configure(lambda config: config["ignore"].remove("model.layers.0.self_attn.o_proj"))
    problems = export.problems()
    assert set(problems) == {"transformers", "vLLM"}
    assert "not on the ignore list): model.layers.0.self_attn.o_proj" in problems["transformers"]
    assert problems["vLLM"].startswith("in float, but not on the ignore list: model.layers.0.self_attn.o_proj")


def test_a_float_head_missing_from_the_ignore_list(export: Export) -> None:
    """transformers takes the head for a Linear; vLLM's head has a class of its own, which "Linear" does not name."""
    export.configure(lambda config: config["ignore"].remove("lm_head"))
    problems = export.problems()
    assert set(problems) == {"transformers"}
    assert "lm_head" in problems["transformers"]


@pytest.mark.parametrize("target", ["lm_head", "re:.*lm_head$"])
def test_a_second_config_group_for_the_head(target: str, export: Export) -> None:
    def second_group(config: dict[str, Any]) -> None:
        config["config_groups"]["group_1"] = {"targets": [target], "weights": WEIGHTS, "format": "pack-quantized"}
        config["ignore"].remove("lm_head")

    export.store(pack_head)
    export.configure(second_group)
    assert export.problems() == {}
    notes = " ".join(check_engines(export.folder)[2].notes)
    assert "8 bits need Humming" in notes, "group 16 is none of Marlin's"
    (kinds,) = check_engines(export.folder)[1].notes
    assert "of 8 kinds" in kinds, "seven linears of a block, and the head"


def test_a_packed_head_that_no_target_names(export: Export) -> None:
    export.store(pack_head)
    export.configure(lambda config: config["ignore"].remove("lm_head"))
    problems = export.problems()
    assert "lm_head (weight_packed is [97, 16], not [97, 4])" in problems["compressed-tensors"]
    assert "lm_head is packed, but no target names it" in problems["vLLM"]


def test_layers_that_no_group_of_several_names(export: Export) -> None:
    def second_group(config: dict[str, Any]) -> None:
        config["config_groups"]["group_0"]["targets"] = ["re:.*self_attn.*"]
        config["config_groups"]["group_1"] = {"targets": ["lm_head"], "weights": WEIGHTS, "format": "pack-quantized"}
        config["ignore"].remove("lm_head")

    export.store(pack_head)
    export.configure(second_group)
    assert "model.layers.0.mlp.gate_proj" in export.problems()["vLLM"]
    with pytest.raises(ValueError, match=r"no config group of .*config\.json names them") as caught:
        open_checkpoint(export.folder)
    assert "model.layers.0.mlp.down_proj" in str(caught.value)
    assert "self_attn" in str(caught.value).partition("There are ")[2]


def test_a_scale_too_few_and_a_tensor_that_is_missing(export: Export) -> None:
    def damage(tensors: dict[str, torch.Tensor]) -> None:
        name = "model.layers.0.mlp.down_proj.weight_scale"
        tensors[name] = tensors[name][:, :-1].contiguous()
        del tensors["model.layers.1.mlp.gate_proj.weight_scale"]
        del tensors["model.norm.weight"]

    export.store(damage)
    problems = export.problems()
    assert "down_proj (weight_scale is [64, 3], not [64, 4])" in problems["compressed-tensors"]
    assert "gate_proj (lacks model.layers.1.mlp.gate_proj.weight_scale)" in problems["compressed-tensors"]
    assert "not in the folder: model.norm.weight" in problems["transformers"]


@pytest.mark.parametrize(("key", "wrong", "right"), [("num_bits", 3, 2), ("num_bits", 4, 2), ("group_size", 64, GROUP)])
def test_a_value_of_the_config_that_does_not_fit_the_tensors(key: str, wrong: int, right: int, export: Export) -> None:
    """No engine loads it, and nothing computes with it: key, value, what would be right, next step."""
    export.configure(lambda config: config["config_groups"]["group_0"]["weights"].update({key: wrong}))
    problems = export.problems()
    assert set(problems) == {"transformers", "compressed-tensors", "vLLM"}
    with pytest.raises(ValueError, match="config_groups") as caught:
        open_checkpoint(export.folder)
    setting = f"config_groups.group_0.weights.{key}"
    for text in (*problems.values(), str(caught.value)):
        assert f"{setting}={wrong} in {export.folder / 'config.json'}, but stored with {key} {right}" in text
        assert "model.layers.0.self_attn.q_proj (weight_" in text
        assert f"Next: set {setting} to {right}, or write the export again" in text
    open_checkpoint(export.folder, check_shapes=False)


def test_what_is_damaged_itself_is_not_blamed_on_the_config(export: Export) -> None:
    def damage(tensors: dict[str, torch.Tensor]) -> None:
        for layer, kind in (("up_proj", "weight_packed"), ("down_proj", "weight_scale")):
            name = f"model.layers.0.mlp.{layer}.{kind}"
            tensors[name] = tensors[name][1:].contiguous()
        del tensors["model.layers.1.mlp.gate_proj.weight_shape"]

    export.store(damage)
    with pytest.raises(ValueError, match="no num_bits fits the tensors") as caught:
        open_checkpoint(export.folder)
    scale, packed, missing = sorted(str(caught.value).splitlines())
    assert "no group_size fits the tensors" in scale
    assert "down_proj (weight_scale is [63, 4], not [64, 4])" in scale
    assert "up_proj (weight_packed is [127, 4], not [128, 4])" in packed
    assert "gate_proj (lacks model.layers.1.mlp.gate_proj.weight_shape)" in missing
    for line in (scale, packed, missing):
        assert line.endswith("Next: write the export again: recipes/run.py export --config RECIPE")


def test_decompression_that_differs_in_one_bit(export: Export, monkeypatch: pytest.MonkeyPatch) -> None:
    unpack = engines.unpack

    def slightly_off(tensors: dict[str, torch.Tensor], scheme: Any) -> torch.Tensor:
        weight = unpack(tensors, scheme)
        weight.view(torch.int16)[-1, -1] ^= 1
        return weight

    monkeypatch.setattr(engines, "unpack", slightly_off)
    monkeypatch.setattr(engines, "ROWS", 7)
    assert set(export.problems()) == {"compressed-tensors"}
    assert "model.layers.0.self_attn.q_proj" in export.problems()["compressed-tensors"]


@pytest.mark.parametrize("bits", range(1, 9))
def test_codes_by_the_definition_of_the_format(bits: int) -> None:
    low = -(1 << (bits - 1))
    codes = torch.randint(low, -low, (5, 40), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    assert torch.equal(engines._stored_codes(pack_to_int32(codes, bits), bits, 40), codes)


def test_what_is_no_export_is_refused(tmp_path: Path) -> None:
    folder = save(family("llama"), tmp_path)
    with pytest.raises(ValueError, match="has no quantization_config"):
        check_engines(folder)
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        check_engines(tmp_path / "nothing")


def test_kernels_by_width_and_group() -> None:
    assert vllm.kernel_of(4, 128) == (vllm.MARLIN, None)
    assert vllm.kernel_of(8, None) == (vllm.MARLIN, None)
    for bits, group_size in ((2, 64), (3, 128), (4, 16), (8, 256)):
        assert vllm.kernel_of(bits, group_size) == (vllm.HUMMING, None)
    for bits, group_size in ((1, 64), (9, 64), (2, 48), (2, 8), (4, 96)):
        kernel, problem = vllm.kernel_of(bits, group_size)
        assert kernel is None
        assert problem


def test_names_of_the_wrapper_are_matched_as_vllm_renames_them() -> None:
    """Its head is called language_model.lm_head there, and a target `lm_head` is not renamed with it."""
    embedding, head = "model.language_model.embed_tokens", "lm_head"
    config = {"weights": WEIGHTS, "format": "pack-quantized"}
    groups = [engines.QuantizationScheme(targets=[target], **config) for target in ("lm_head", "re:.*lm_head$")]
    for group, loads in zip(groups, (False, True), strict=True):
        problems = vllm.layer_problems({head: group}, [], [group], [], embedding, head)
        assert (problems == []) == loads, problems
    ignore = ["model.visual.blocks.0.attn.qkv"]
    assert vllm.layer_problems({}, ignore, groups, ignore, embedding, head) == []
    three_bits = engines.QuantizationScheme(targets=["Embedding"], weights=WEIGHTS | {"num_bits": 3})
    (problem,) = vllm.layer_problems({embedding: three_bits}, [], [three_bits], [], embedding, head)
    assert "3 bits" in problem


def test_parts_of_a_fused_layer_with_different_schemes() -> None:
    packed = {f"layers.0.linear_attn.{name}": bits for name, bits in (("in_proj_qkv", 2), ("in_proj_z", 4))}
    (problem,) = vllm.split_fused(packed, ["layers.0.linear_attn.in_proj_a", "layers.0.linear_attn.in_proj_b"])
    assert problem == "in_proj_qkv and in_proj_z are one layer there, but differ in bits or group size: " + (
        "layers.0.linear_attn"
    )
