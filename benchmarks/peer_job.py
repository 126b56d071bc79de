"""One run of benchmarks/peers.py, inside the peer's own environment: the weights that the peer makes of a checkpoint.

Imports nothing of this repository, which that environment does not have. A peer is called as its documentation calls it,
with its own defaults in all that the job does not fix.

The job is a JSON file: `peer`, one of PEERS; `model`, the folder of the checkpoint; `rows`, a safetensors file with the
calibration tokens, int64 `[samples, seq_len]`; `out`, the folder to write; `linears` and `others`, module paths of the
linears to quantize and of those to leave; `bits`, `group_size`, `dtype`, `seed`; `steps` and `batch_size`, for peers that
train: optimizer steps of a block, sequences of each.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Job = dict[str, Any]
Weights = dict[str, Tensor]
"""Dequantized weights `[out, in]` by module path."""


def auto_round(job: Job, **options: Any) -> Weights:
    """AutoRound: rounding and clipping of a block trained by signed gradients. Symmetric codes, as by default."""
    from auto_round import AutoRound

    model, tokenizer = _load(job)
    rows = _rows(job)
    quantizer = AutoRound(
        model,
        tokenizer,
        bits=job["bits"],
        group_size=job["group_size"],
        sym=True,
        iters=job["steps"],
        batch_size=job["batch_size"],
        dataset=list(rows.split(1)),
        nsamples=len(rows),
        seqlen=rows.shape[1],
        seed=job["seed"],
        layer_config={name: {"bits": 16} for name in job["others"]},
        device_map=_device(),
        **options,
    )
    folder = Path(job["out"]) / "fake"
    quantizer.quantize_and_save(str(folder), format="fake")
    tensors: Weights = {}
    for file in folder.rglob("*.safetensors"):
        tensors |= load_file(file)
    return {name: tensors[f"{name}.weight"] for name in job["linears"]}


def llmcompressor(job: Job) -> Weights:
    """GPTQ of llm-compressor, its `actorder` static by default; scales by least squares, as 2 bits need."""
    from compressed_tensors.quantization.lifecycle.forward import forward_quantize
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier

    model, tokenizer = _load(job)
    rows = _rows(job)
    weights = {
        "num_bits": job["bits"],
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": job["group_size"],
        "observer": "mse",
    }
    modifier = GPTQModifier(config_groups={"all": {"targets": job["linears"], "weights": weights}})
    samples = {"input_ids": rows.tolist(), "attention_mask": torch.ones_like(rows).tolist()}
    oneshot(
        model=model,
        tokenizer=tokenizer,
        dataset=Dataset.from_dict(samples),
        recipe=modifier,
        num_calibration_samples=len(rows),
        max_seq_length=rows.shape[1],
    )
    result: Weights = {}
    for name in job["linears"]:
        module = model.get_submodule(name)
        result[name] = forward_quantize(module, module.weight, "weight", module.quantization_scheme.weights)
    return result


def gptqmodel(job: Job) -> Weights:
    """GPTQ of GPTQModel, its columns in groups by activation, as by default; saved, and dequantized when loaded again."""
    # Of its own accord 7.6.0 takes one on machines with two cores, and then refuses to have fewer than two.
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

    rows = _rows(job)
    dynamic = {f"-:^{re.escape(name)}$": {} for name in job["others"]}
    config = QuantizeConfig(bits=job["bits"], group_size=job["group_size"], dynamic=dynamic)
    model = GPTQModel.load(job["model"], config, device=_device(), dtype=getattr(torch, job["dtype"]))
    model.quantize([{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in rows], batch_size=1)
    folder = str(Path(job["out"]) / "packed")
    model.save(folder)
    packed = GPTQModel.load(folder, device=_device(), backend=BACKEND.TORCH)
    result: Weights = {}
    for name in job["linears"]:
        module = packed.model.get_submodule(name)
        # Of the class: the instance's own is compiled, for one call a layer.
        result[name] = type(module).dequantize_weight(module).T
    return result


PEERS: dict[str, Callable[[Job], Weights]] = {
    "auto-round": auto_round,
    "auto-round-alg-ext": partial(auto_round, enable_alg_ext=True),
    "llmcompressor": llmcompressor,
    "gptqmodel": gptqmodel,
}
DISTRIBUTIONS = {"auto-round-alg-ext": "auto-round"}
"""Names on the index, where they are others than the peers'."""


def run(job: Job) -> dict[str, Any]:
    """Quantize; write `weights.safetensors` (float32, by module path) into the job's folder.

    Returns:
        Version of the peer, seconds it took, and its peak memory in bytes.
    """
    began = time.perf_counter()
    with torch.no_grad() if job["peer"] == "gptqmodel" else torch.enable_grad():
        weights = PEERS[job["peer"]](job)
    seconds = time.perf_counter() - began
    stored = {name: weight.detach().to("cpu", torch.float32).contiguous() for name, weight in weights.items()}
    save_file(stored, Path(job["out"]) / "weights.safetensors")
    status = Path("/proc/self/status").read_text()
    return {
        "version": version(DISTRIBUTIONS.get(job["peer"], job["peer"])),
        "seconds": seconds,
        "peak_device_bytes": torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0,
        # Not getrusage's: that one begins with what the starting process had.
        "peak_host_bytes": int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024,  # type: ignore[index]
    }


def _load(job: Job) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=getattr(torch, job["dtype"]))
    return model.to(_device()), AutoTokenizer.from_pretrained(job["model"])


def _rows(job: Job) -> Tensor:
    return load_file(job["rows"])["rows"]


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    folder = Path(sys.argv[1]).parent
    result = run(json.loads(Path(sys.argv[1]).read_text()))
    (folder / "result.json").write_text(json.dumps(result))
