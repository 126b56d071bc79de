"""`run.py verify`: what it finds, one kind of damage after the other, and its exit status."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from toy_models import family, save

from gsq_module.cli import main
from gsq_module.export.folder import MARKER_FILE
from gsq_module.export.report import CHECKSUMS, folder_checksums, report_checksum
from gsq_module.export.writer import export_checkpoint
from gsq_module.fingerprint import as_text
from gsq_module.quantization.grid import GRIDS, QuantizedWeight
from gsq_module.quantization.scales import round_to_nearest
from gsq_module.streaming.checkpoint import INDEX_FILE, Checkpoint
from gsq_module.unit_shards import UnitResult, UnitShards
from gsq_module.verification import DAMAGED, verify_export, verify_run

GROUP = 32
LAYER = "model.layers.0.mlp.up_proj"
SHARD = "model-00001-of-00001.safetensors"


@pytest.fixture(scope="module", params=["2", "ternary"])
def made(request, tmp_path_factory) -> Path:
    """A run directory with two units and the export of them. Not to be written to."""
    grid = next(grid for grid in GRIDS.values() if grid.name == request.param)
    run_dir = tmp_path_factory.mktemp(request.param) / "run"
    source = Checkpoint(save(family("llama", num_hidden_layers=2), run_dir.with_name("source"), torch.bfloat16))
    shards = UnitShards(run_dir / "units", grid)
    names = [name.removesuffix(".weight") for name in source.names() if "_proj.weight" in name]
    weights: dict[str, QuantizedWeight] = {}
    for block in (0, 1):
        unit = {
            name: round_to_nearest(source.tensor(f"{name}.weight"), grid, GROUP, torch.bfloat16)
            for name in names
            if name.startswith(f"model.layers.{block}.mlp")
        }
        shards.save(UnitResult(block, "mlp", f"model.layers.{block}.mlp", 1.0, 0.5, "refined"), unit)
        weights |= unit
    ignore = [name for name in names if name not in weights] + ["lm_head"]
    export_checkpoint(source, run_dir / "export", weights, grid, GROUP, ignore)
    bits = grid.name if grid.name == "ternary" else int(grid.name)
    (run_dir / "config.yaml").write_text(f"model: {{bits: {bits}}}\n")
    (run_dir / "fingerprint.json").write_text(as_text({"model.bits": bits}))
    return run_dir


@pytest.fixture
def run_dir(made, tmp_path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


def sign(export: Path) -> None:
    """Give an export the checksums of what is in it now: what only looks at these, sees nothing."""
    about = json.loads((export / MARKER_FILE).read_text())
    about[CHECKSUMS] = folder_checksums(export)
    about[CHECKSUMS][MARKER_FILE] = report_checksum(about)
    (export / MARKER_FILE).write_text(json.dumps(about))


def change(export: Path, **tensors: torch.Tensor | None) -> None:
    """Replace tensors of the layer, or leave them out."""
    stored = load_file(export / SHARD)
    for kind, tensor in tensors.items():
        del stored[f"{LAYER}.{kind}"]
        if tensor is not None:
            stored[f"{LAYER}.{kind}"] = tensor
    save_file(stored, export / SHARD, metadata={"format": "pt"})
    index = json.loads((export / INDEX_FILE).read_text())
    index["metadata"]["total_size"] = sum(tensor.nbytes for tensor in stored.values())
    (export / INDEX_FILE).write_text(json.dumps(index))
    sign(export)


def edit(export: Path, change) -> None:
    config = json.loads((export / "config.json").read_text())
    change(config)
    (export / "config.json").write_text(json.dumps(config))
    sign(export)


def test_what_is_whole_is_whole(made, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["run.py"])
    assert verify_run(made)[1] == []
    for folder in (made, made / "export"):
        main(["verify", str(folder)])
        assert f"{folder}: nothing bad was found" in capsys.readouterr().out


@pytest.mark.parametrize("harm", ["one bit", "half", "empty", "gone"])
@pytest.mark.parametrize("name", [SHARD, INDEX_FILE, "config.json", "generation_config.json", MARKER_FILE])
def test_every_file_of_an_export_is_watched(name, harm, run_dir, capsys):
    file = run_dir / "export" / name
    content = file.read_bytes()
    if harm == "gone":
        file.unlink()
    else:
        flipped = content[:-2] + bytes([content[-2] ^ 1]) + content[-1:]
        file.write_bytes({"one bit": flipped, "half": content[: len(content) // 2], "empty": b""}[harm])
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(run_dir), "--json"])
    assert ended.value.code == DAMAGED
    found = json.loads(capsys.readouterr().out)
    assert any(name in problem for problem in found["problems"]), found


def test_a_flipped_bit_of_a_unit_is_found(run_dir):
    file = run_dir / "units" / "block_0001.mlp.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 8]))
    _, problems = verify_run(run_dir)
    assert f"{file} is damaged: the same fit again does its unit again" in problems


def test_what_is_no_number(run_dir):
    scales = load_file(run_dir / "export" / SHARD)[f"{LAYER}.weight_scale"]
    scales[0, 0] = float("nan")
    change(run_dir / "export", weight_scale=scales)
    assert f"{SHARD}: {LAYER}: 1 scales are not finite" in verify_export(run_dir / "export")


def test_what_is_off_the_grid(run_dir):
    packed = load_file(run_dir / "export" / SHARD)[f"{LAYER}.weight_packed"]
    packed[0, 0] = 0  # sixteen codes of -2
    change(run_dir / "export", weight_packed=packed)
    off = f"{SHARD}: {LAYER}: 16 codes are off the grid ternary"
    assert (off in verify_export(run_dir / "export")) == ("ternary" in str((run_dir / "config.yaml").read_text()))
    assert any("is not what the run's unit holds" in problem for problem in verify_run(run_dir)[1])


def test_what_has_the_wrong_shape(run_dir):
    stored = load_file(run_dir / "export" / SHARD)
    packed, scales = stored[f"{LAYER}.weight_packed"], stored[f"{LAYER}.weight_scale"]
    change(run_dir / "export", weight_packed=packed[:, 1:].contiguous())
    assert any(f"{LAYER}: codes are torch.int32" in problem for problem in verify_export(run_dir / "export"))
    change(run_dir / "export", weight_packed=packed, weight_scale=scales[:, 1:].contiguous())
    assert any(f"{LAYER}: scales are" in problem for problem in verify_export(run_dir / "export"))
    change(run_dir / "export", weight_scale=None)
    problems = verify_export(run_dir / "export")
    assert f"{SHARD}: {LAYER}: {LAYER}.weight_scale missing" in problems
    assert f"{INDEX_FILE}: {LAYER}.weight_scale is not in {SHARD}" in problems


def test_configuration_against_tensors(run_dir):
    export = run_dir / "export"
    edit(export, lambda config: config["quantization_config"]["ignore"].remove("lm_head"))
    assert verify_export(export) == ["lm_head is neither packed nor on the ignore list of config.json"]
    edit(export, lambda config: config["quantization_config"].update(ignore=["lm_head", LAYER]))
    assert f"{LAYER} is packed, but config.json says that it stayed in float" in verify_export(export)
    edit(export, lambda config: config.update(intermediate_size=64))
    assert any(f"{LAYER}.weight is" in problem for problem in verify_export(export))
    edit(export, lambda config: config.update(num_hidden_layers=3))
    assert any(problem.startswith("model.layers.2.") for problem in verify_export(export))
    edit(export, lambda config: config.pop("quantization_config"))
    assert any("no quantization_config" in problem for problem in verify_export(export))


def test_units_and_export_need_not_come_together(run_dir):
    (run_dir / "units" / "block_0001.mlp.safetensors").unlink()
    assert verify_run(run_dir)[1] == [], "fewer units than the export has: the run was started over"
    other = run_dir / "units/block_0001.mlp.safetensors"
    shutil.copy(run_dir / "units/block_0000.mlp.safetensors", other)
    assert any(f"{other} is damaged" in problem for problem in verify_run(run_dir)[1])
    other.unlink()
    shutil.rmtree(run_dir / "export")
    notes, problems = verify_run(run_dir)
    assert problems == []
    assert "export: none yet" in notes


def test_neither_a_run_nor_an_export(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(tmp_path)])
    assert ended.value.code == 2
    assert "neither a run directory" in capsys.readouterr().err


@pytest.mark.parametrize("marked", [True, False])
def test_a_broken_config_is_named(marked, run_dir, capsys):
    file = run_dir / "export" / "config.json"
    file.write_text(file.read_text()[:40])
    if not marked:
        (run_dir / "export" / MARKER_FILE).unlink()
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(run_dir / "export")])
    assert ended.value.code == DAMAGED
    assert f"bad: {file} is cut off or no JSON" in capsys.readouterr().out
