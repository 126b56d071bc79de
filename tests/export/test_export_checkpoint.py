from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from export_helpers import random_weight
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen3Config

from gsq_module.export import writer
from gsq_module.export.reader import PackedCheckpoint, open_checkpoint
from gsq_module.export.report import ExportReport
from gsq_module.export.writer import export_checkpoint
from gsq_module.quantization.grid import GRIDS, Grid, QuantizedWeight
from gsq_module.storage import StorageError
from gsq_module.streaming.checkpoint import INDEX_FILE, Checkpoint

GROUP = 32
SHAPE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "dtype": "bfloat16",
    "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
}
IDS = torch.arange(24).view(2, 12) * 7 % 256


class LazyWeights(Mapping[str, QuantizedWeight]):
    """Makes a weight when it is asked for, and remembers what was asked for. Like unit shards on disk."""

    def __init__(self, grid: Grid, shapes: dict[str, torch.Size]) -> None:
        self.grid, self.shapes = grid, shapes
        self.loads: list[str] = []

    def __getitem__(self, module: str) -> QuantizedWeight:
        rows, columns = self.shapes[module]
        self.loads.append(module)
        return random_weight(self.grid, rows, columns, GROUP, seed=list(self.shapes).index(module))

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def linears(model: nn.Module) -> dict[str, torch.Size]:
    return {name: module.weight.shape for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def make_model(family: str = "llama", tie: bool = False) -> PreTrainedModel:
    torch.manual_seed(0)
    config: PreTrainedConfig = LlamaConfig(**SHAPE, tie_word_embeddings=tie)
    if family == "qwen3":
        config = Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=tie)
    return AutoModelForCausalLM.from_config(config).eval()


class Job:
    """A model on disk, random codes for its MLPs, and the arguments of its export."""

    def __init__(self, folder: Path, grid: Grid, model: PreTrainedModel, max_shard_size: str = "60KB") -> None:
        self.model, self.grid = model, grid
        self.source = folder / "source"
        self.destination = folder / "export"
        model.save_pretrained(self.source, max_shard_size=max_shard_size)
        shapes = linears(model)
        self.ignore = [name for name in shapes if ".mlp." not in name]
        self.weights = LazyWeights(grid, {name: shape for name, shape in shapes.items() if ".mlp." in name})

    def export(self, **changes: Any) -> ExportReport:
        arguments: dict[str, Any] = {
            "source": Checkpoint(self.source),
            "destination": self.destination,
            "quantized": self.weights,
            "grid": self.grid,
            "group_size": GROUP,
            "ignore": self.ignore,
        }
        return export_checkpoint(**(arguments | changes))

    def put_dequantized_weights_in(self) -> None:
        for module, weight in self.weights.items():
            self.model.get_submodule(module).weight.data = weight.dequantize()


def load(folder: Path) -> tuple[PreTrainedModel, dict[str, Any]]:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    return model


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path, GRIDS[2], make_model())


@torch.no_grad()
@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("grid", GRIDS.values(), ids=lambda grid: grid.name)
def test_plain_transformers_computes_the_quantized_model(tmp_path: Path, grid: Grid, family: str, tie: bool) -> None:
    job = Job(tmp_path, grid, make_model(family, tie))
    job.export()
    job.put_dequantized_weights_in()
    loaded, info = load(job.destination)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert torch.equal(loaded(IDS).logits, job.model(IDS).logits)  # transformers decompresses in the first forward
    for name, parameter in job.model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter), name
    assert loaded.config.rope_parameters["rope_theta"] == 100_000.0


@pytest.mark.parametrize("grid", GRIDS.values(), ids=lambda grid: grid.name)
def test_an_export_reads_back_as_the_dense_checkpoint(tmp_path: Path, grid: Grid) -> None:
    job = Job(tmp_path, grid, make_model("qwen3"))
    job.export()
    job.put_dequantized_weights_in()
    dense = open_checkpoint(job.destination)
    assert isinstance(dense, PackedCheckpoint)
    expected = job.model.state_dict()
    assert sorted(dense.names()) == sorted(Checkpoint(job.source).names())
    assert {name for file in dense.files() for name in dense.names_in(file)} == set(expected)
    assert dense.dtype() == torch.bfloat16
    together = dense.tensors(expected)
    for name, tensor in expected.items():
        assert name in dense
        assert dense.shape(name) == tensor.shape
        assert torch.equal(dense.tensor(name), tensor), name
        assert torch.equal(together[name], tensor), name
    assert "model.layers.0.mlp.up_proj.weight_packed" not in dense
    with pytest.raises(KeyError):
        dense.tensor("model.layers.0.mlp.up_proj.weight_scale")


def test_a_checkpoint_in_float_opens_as_it_is(job: Job) -> None:
    assert type(open_checkpoint(job.source)) is Checkpoint
    with pytest.raises(FileNotFoundError, match="nowhere"):
        open_checkpoint(job.source / "nowhere")


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "gptq", "bits": 2},
        {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {}},
    ],
)
def test_other_quantizations_are_refused(job: Job, quantization: dict[str, Any]) -> None:
    path = job.source / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization}))
    with pytest.raises(ValueError, match=quantization["quant_method"]):
        open_checkpoint(job.source)
    with pytest.raises(ValueError, match="quantized already"):
        job.export()


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_the_report_counts_what_is_on_disk(tmp_path: Path, bits: int) -> None:
    job = Job(tmp_path, GRIDS[bits], make_model(tie=True))
    report = job.export()
    stored: dict[str, torch.Tensor] = {}
    for path in sorted(job.destination.glob("*.safetensors")):
        stored |= load_file(path)
    assert [path.name for path in sorted(job.destination.glob("*.safetensors"))] == report.files
    packed = {name: tensor for name, tensor in stored.items() if name.endswith(".weight_packed")}
    assert {name.removesuffix(".weight_packed") for name in packed} == set(job.weights)
    for name, tensor in packed.items():
        rows, columns = job.weights.shapes[name.removesuffix(".weight_packed")]
        assert tensor.shape == (rows, columns * bits // 32)
    quantized = 2 * 3 * 64 * 96
    assert report.quantized_parameters == quantized
    assert report.packed_bytes == quantized * bits / 8
    assert report.bits_per_weight == bits + 16 / GROUP
    assert report.quantized_parameters + report.float_parameters == sum(p.numel() for p in job.model.parameters())
    assert report.total_bytes == sum(tensor.nbytes for tensor in stored.values())
    assert report.average_bits == 8 * report.total_bytes / (report.quantized_parameters + report.float_parameters)
    index = json.loads((job.destination / INDEX_FILE).read_text())
    assert index["metadata"]["total_size"] == report.total_bytes
    assert set(index["weight_map"]) == set(stored)
    about = json.loads((job.destination / "gsq_export.json").read_text())
    assert about.pop("grid") == job.grid.name
    assert set(about.pop("sha256")) == {path.name for path in job.destination.iterdir()}
    assert about == asdict(report)


def test_each_source_file_becomes_one_shard_and_each_weight_is_loaded_once(job: Job) -> None:
    report = job.export()
    source_files = Checkpoint(job.source).files()
    assert len(source_files) > 3
    assert report.files == [
        f"model-{number:05d}-of-{len(source_files):05d}.safetensors" for number in range(1, len(source_files) + 1)
    ]
    for source_file, file in zip(source_files, report.files, strict=True):
        with safe_open(job.destination / file, framework="pt") as shard:
            modules = {name.rpartition(".")[0] for name in shard.keys()}
        assert modules == {name.rpartition(".")[0] for name in Checkpoint(job.source).names_in(source_file)}
    assert sorted(job.weights.loads) == sorted(job.weights)


def test_a_single_file_is_split_and_always_indexed(tmp_path: Path) -> None:
    job = Job(tmp_path, GRIDS[3], make_model(), max_shard_size="5GB")
    assert Checkpoint(job.source).files() == ["model.safetensors"]
    assert job.export().files == ["model-00001-of-00001.safetensors"]
    assert (job.destination / INDEX_FILE).is_file()
    whole = {name: open_checkpoint(job.destination).tensor(name) for name in open_checkpoint(job.destination).names()}
    limit = 40_000  # above the largest tensor
    files = job.export(max_shard_bytes=limit).files
    assert len(files) > 2
    for file in files:
        assert sum(tensor.nbytes for tensor in load_file(job.destination / file).values()) <= limit
    split = open_checkpoint(job.destination)
    assert split.names() == list(whole)
    assert all(torch.equal(split.tensor(name), tensor) for name, tensor in whole.items())


def test_float_tensors_keep_their_dtype_and_bytes(tmp_path: Path) -> None:
    job = Job(tmp_path, GRIDS[2], make_model(), max_shard_size="5GB")
    path = job.source / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = torch.randn(64, dtype=torch.float32)
    tensors["model.layers.0.mlp.up_proj.bias"] = torch.randn(96, dtype=torch.float16)
    save_file(tensors, path, metadata={"format": "pt"})
    job.export()
    exported = open_checkpoint(job.destination)
    for name in set(tensors) - {f"{module}.weight" for module in job.weights}:
        found = exported.tensor(name)
        assert found.dtype == tensors[name].dtype, name
        assert torch.equal(found, tensors[name]), name


@torch.no_grad()
def test_a_tied_head_is_stored_once(tmp_path: Path) -> None:
    job = Job(tmp_path, GRIDS[2], make_model(tie=True), max_shard_size="5GB")
    path = job.source / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, path, {"format": "pt"})
    job.export(tied=["lm_head.weight"])
    assert "lm_head.weight" not in open_checkpoint(job.destination)
    job.put_dequantized_weights_in()
    loaded, _ = load(job.destination)
    assert torch.equal(loaded(IDS).logits, job.model(IDS).logits)


def test_the_config_is_carried_over_and_names_what_stayed_in_float(job: Job) -> None:
    path = job.source / "config.json"
    source_config = json.loads(path.read_text()) | {"a_key_nobody_knows": [1, None]}
    assert "rope_theta" not in source_config, "transformers 5 writes rope_parameters only"
    nested = {"rope_parameters": {"rope_theta": 7.0}, "vocab_size": 3}
    path.write_text(json.dumps(source_config | {"text_config": nested}))
    job.export(extra_config={"made_by": "a test"})
    config = json.loads((job.destination / "config.json").read_text())
    quantization = config.pop("quantization_config")
    assert sorted(quantization["ignore"]) == sorted(set(linears(job.model)) - set(job.weights))
    assert quantization["config_groups"]["group_0"]["weights"]["num_bits"] == 2
    assert config == source_config | {
        "rope_theta": 100_000.0,
        "text_config": nested | {"rope_theta": 7.0},
        "made_by": "a test",
    }


def test_a_rope_theta_of_the_source_is_left_alone(job: Job) -> None:
    path = job.source / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_theta": 5.0}))
    job.export()
    assert json.loads((job.destination / "config.json").read_text())["rope_theta"] == 5.0


def test_tokenizer_files_come_along_and_other_weights_do_not(job: Job) -> None:
    wanted = [
        "tokenizer.json",
        "tokenizer.model",
        "merges.txt",
        "chat_template.jinja",
        "additional_chat_templates/tools.jinja",
        "modeling_custom.py",
        "README.md",
        "LICENSE",
    ]
    others = ["pytorch_model.bin", "pytorch_model.bin.index.json", "model.gguf", ".gitattributes", ".git/config"]
    for name in wanted + others:
        (job.source / name).parent.mkdir(exist_ok=True)
        (job.source / name).write_text(name)
    report = job.export()
    exported = contents(job.destination)
    assert set(exported) == {
        *wanted,
        *report.files,
        "generation_config.json",
        "config.json",
        INDEX_FILE,
        "gsq_export.json",
    }
    assert all(exported[name] == name.encode() for name in wanted)


def test_the_same_input_gives_the_same_bytes(job: Job) -> None:
    job.export()
    first = contents(job.destination)
    job.export()
    assert contents(job.destination) == first
    job.export(destination=job.destination.with_name("elsewhere"))
    assert contents(job.destination.with_name("elsewhere")) == first


def test_the_source_is_never_overwritten(job: Job, tmp_path: Path) -> None:
    before = contents(job.source)
    (tmp_path / "link").symlink_to(job.source)
    for destination in (job.source, tmp_path / "link", tmp_path / "link" / "inside"):
        with pytest.raises(ValueError, match="source model"):
            job.export(destination=destination)
    assert contents(job.source) == before


def test_an_interrupted_export_leaves_the_old_one(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.export()
    old = contents(job.destination)
    calls = []

    def fail_on_the_second(*arguments: Any, **keywords: Any) -> None:
        calls.append(arguments)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        save_file(*arguments, **keywords)

    monkeypatch.setattr(writer, "save_file", fail_on_the_second)
    with pytest.raises(StorageError, match="No space") as refused:
        job.export(extra_config={"new": True})
    assert f"{job.destination}/model-00002-of-" in str(refused.value)
    assert contents(job.destination) == old
    assert {path.name for path in job.destination.parent.iterdir()} == {"source", "export"}
    monkeypatch.undo()
    job.export(extra_config={"new": True})
    assert contents(job.destination)["config.json"] != old["config.json"]


def test_a_full_disk_is_found_before_anything_is_written(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    report = job.export()
    old = contents(job.destination)
    usage = shutil.disk_usage(job.source)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=report.total_bytes // 2))
    monkeypatch.setattr(writer, "save_file", lambda *arguments, **keywords: pytest.fail("wrote a shard"))
    with pytest.raises(ValueError, match=r"needs 0\.\d+ MB, but 0\.\d+ MB are free"):
        job.export()
    assert contents(job.destination) == old


def test_the_disk_estimate_is_the_size_of_the_export(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = []
    monkeypatch.setattr(writer, "_check_disk", lambda folder, destination, size: needed.append(size))
    job.export()
    written = sum(len(data) for data in contents(job.destination).values())
    assert 0.9 * written < needed[0] <= written


def test_whoever_may_read_the_config_may_read_the_weights(job: Job) -> None:
    job.export()
    assert len({path.stat().st_mode for path in job.destination.iterdir()}) == 1


def test_names_that_do_not_fit_the_source_are_listed_at_once(job: Job) -> None:
    job.weights.shapes |= {"model.layers.9.mlp.up_proj": torch.Size([96, 64]), "lm_haed": torch.Size([256, 64])}
    with pytest.raises(ValueError) as caught:
        job.export(
            ignore=[*job.ignore, "model.layers.0.mlp.up_proj"],
            tied=["model.layers.1.mlp.down_proj.weight"],
        )
    message = str(caught.value)
    assert "lm_haed.weight, model.layers.9.mlp.up_proj.weight" in message
    assert "ignore list: model.layers.0.mlp.up_proj" in message
    assert "tied to another tensor: model.layers.1.mlp.down_proj.weight" in message
    assert not job.destination.exists()
    assert not job.weights.loads


def test_nothing_to_export_is_said(job: Job) -> None:
    with pytest.raises(ValueError, match="no module is quantized"):
        job.export(quantized={})


def test_weights_of_another_run_are_refused(job: Job) -> None:
    with pytest.raises(ValueError, match=r"group size 16.*group size 32.*another run"):
        job.export(group_size=16)
    name = next(iter(job.weights))
    with pytest.raises(ValueError, match=f"{name}.*another run"):
        job.export(quantized={name: random_weight(job.grid, 8, 64, GROUP)})


def test_a_broken_scale_names_its_module(job: Job) -> None:
    weights = dict(job.weights)
    weights["model.layers.1.mlp.down_proj"].scales[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.down_proj: 1 of"):
        job.export(quantized=weights)
    assert not job.destination.exists()
