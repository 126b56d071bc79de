"""A real out-of-memory error in each stage of a run is reported with that stage."""

from __future__ import annotations

import json

import pytest
import torch
import yaml
from toy_models import family
from toy_runs import run, write_recipe

from gsq_module.memory.stages import StageClock

pytestmark = pytest.mark.gpu


@pytest.fixture
def starve(monkeypatch):
    """From the start of a stage on, the process gets no more memory of the device than it has."""
    init = StageClock.__init__

    def at(stage: str) -> None:
        class Starving:
            def on_stage_start(self, begun) -> None:
                if begun.name == stage:
                    torch.cuda.empty_cache()
                    total = torch.cuda.get_device_properties(0).total_memory
                    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)

            def on_stage_end(self, *arguments) -> None:
                pass

        def with_starving(self, device, listeners=(), *arguments, **keywords) -> None:
            init(self, device, [*listeners, Starving()], *arguments, **keywords)

        monkeypatch.setattr(StageClock, "__init__", with_starving)

    yield at
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """Recipe of a model with two kinds of block, so that something is propagated; its tensors take megabytes."""
    folder = tmp_path_factory.mktemp("hybrid")
    recipe = yaml.safe_load(write_recipe(folder, folder / "model").read_text())
    sizes = {"hidden_size": 512, "intermediate_size": 2048}
    family("qwen3_5", **sizes).config.save_pretrained(folder / "model")
    recipe["data"] |= {"seq_len": 512, "batch_size": 8, "microbatch_size": 1, "forward_batch_size": 8}
    recipe["model"]["dtype"] = "bfloat16"
    recipe["trainer"]["accelerator"] = "gpu"
    path = folder / "hybrid.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


@pytest.mark.parametrize("stage", ["embed", "original", "capture", "initialize", "refine", "propagate", "evaluate"])
def test_the_report_names_the_stage(hybrid, tmp_path, starve, stage):
    starve(stage)
    with pytest.raises(SystemExit) as ended:
        run(hybrid, tmp_path / "run", command="rehearse")
    torch.cuda.set_per_process_memory_fraction(1.0)
    assert ended.value.code == 10
    report = json.loads((tmp_path / "run" / "oom_reports" / "rank0.json").read_text())
    assert (report["class"], report["stage"]) == ("device_memory", stage)
    assert report["memory"]["allocated"] >= 0
    assert report["memory"]["free"] > 0
    assert report["predicted_bytes"] > 0
    assert "OutOfMemoryError" in report["traceback"]
