"""Fit, export and reload: every grid, three families, every unit."""

from __future__ import annotations

import json
import math

import pytest
import torch
from compressed_tensors.compressors import unpack_from_int32
from safetensors import safe_open
from torch import nn
from toy_runs import STEPS, run, summary_of
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from gsq_module.quantization.grid import GRIDS

FAMILIES = ["llama", "qwen3", "qwen3_5"]
GATES = ("in_proj_a", "in_proj_b")
BITS = [1, "ternary", 2, 3, 4]


def whole_perplexity(folder, tokens):
    """As anyone would measure it, without any code of ours."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(input_ids=tokens).logits[:, :-1]
    return math.exp(nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), tokens[:, 1:].reshape(-1)))


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        pytest.param(name, bits, marks=[] if bits == 2 or name == "llama" else pytest.mark.slow)
        for name in FAMILIES
        for bits in BITS
    ],
)
def test_fit_export_reload(name, bits, recipes, tmp_path):
    run_dir = tmp_path / "run"
    initializer = "rtn" if bits in (3, 4) else "gptq"
    cli = run(recipes(name), run_dir, f"--model.bits={bits}", f"--model.initializer={initializer}")
    grid, summary, export = GRIDS[bits], summary_of(run_dir), run_dir / "export"
    assert summary == json.loads(json.dumps(cli.summary))

    # the export is the model that was measured
    perplexity = summary["perplexity"]
    assert set(perplexity) == {"original", "initial", "quantized", "reloaded"}
    assert perplexity["quantized"] != perplexity["initial"] != perplexity["original"]
    assert perplexity["reloaded"] == pytest.approx(perplexity["quantized"], rel=1e-3)
    held_out = cli.datamodule.evaluation_tokens["held_out"]
    assert whole_perplexity(export, held_out) == pytest.approx(perplexity["quantized"], rel=1e-3)
    assert AutoTokenizer.from_pretrained(export)("w5 w7")["input_ids"] == [5, 7]

    # what is packed, at which width, and what is not
    config = json.loads((export / "config.json").read_text())["quantization_config"]
    assert config["config_groups"]["group_0"]["weights"]["num_bits"] == grid.storage_bits
    with torch.device("meta"):
        original = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(cli.model.path))
    linears = {path for path, module in original.named_modules() if isinstance(module, nn.Linear)}
    floats = {path for path in linears if path == "lm_head" or path.endswith(GATES)}
    assert sorted(config["ignore"]) == sorted(floats)
    with safe_open(export / summary["export"]["files"][0], framework="pt") as file:
        stored = {key: file.get_tensor(key) for key in file.keys()}
    assert {key.removesuffix(".weight_packed") for key in stored if key.endswith(".weight_packed")} == linears - floats
    for path in linears - floats:
        rows, columns = stored[f"{path}.weight_shape"].tolist()
        packed = stored[f"{path}.weight_packed"]
        assert packed.nbytes * 8 == rows * columns * grid.storage_bits
        codes = unpack_from_int32(packed, grid.storage_bits, torch.Size([rows, columns]))
        assert set(codes.unique().tolist()) <= set(range(grid.low, grid.high + 1, grid.step))
        assert stored[f"{path}.weight_scale"].dtype == torch.bfloat16
        assert stored[f"{path}.weight_scale"].shape == (rows, columns // 32)

    # the summary
    assert [(unit["block"], unit["unit"]) for unit in summary["units"]] == [
        (block, unit) for block in (0, 1) for unit in ("attention", "mlp")
    ]
    for unit in summary["units"]:
        assert 0 < unit["refined_error"] <= unit["initial_error"]
        assert unit["steps"] == STEPS
        assert (unit["kept"] == "refined") == (unit["rejected_error"] is None) == (unit["codes_changed"] > 0)
        assert unit["seconds"] > 0
    assert sum(unit["kept"] == "refined" for unit in summary["units"]) >= 2
    assert summary["bits_per_weight"] == pytest.approx(grid.storage_bits + 16 / 32)
    quantized = sum(stored[f"{path}.weight_shape"].prod().item() for path in linears - floats)
    in_float = sum(tensor.numel() for key, tensor in stored.items() if "weight_" not in key)
    coverage = summary["coverage"]
    assert coverage["quantized_parameters"] == quantized
    assert sum(coverage["float_parameters"].values()) == in_float
    assert coverage["quantized_fraction"] == pytest.approx(quantized / (quantized + in_float))
    assert summary["perplexity_by_text"] == {"held_out": perplexity}
    stages = {"embed", "original", "capture", "initialize", "refine", "propagate", "export", "evaluate", "reload"}
    assert stages < set(summary["seconds"])
    assert sum(summary["seconds"][stage] for stage in stages) <= summary["seconds"]["total"]
    assert summary["peak_memory"]["host_bytes"] > 1 << 20
    assert summary["export"]["path"] == str(export)
