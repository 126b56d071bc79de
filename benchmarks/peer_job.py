"""One run of benchmarks/peers.py, in the peer's own environment: a checkpoint with the weights that the peer makes.

Imports nothing of this repository, which that environment does not have. A peer is called as its documentation calls
it, with its own defaults in all that the job does not fix.

The job is a JSON file: `peer`, one of PEERS; `model`, the folder of the checkpoint; `rows`, a safetensors file with the
calibration tokens, int64 `[samples, seq_len]`; `checkpoint` and `scratch`, folders to write; `result`, a JSON file to
write; `linears` and `others`, module paths of the linears to quantize and of those to leave; `bits`, `group_size`,
`dtype`, `seed`; `steps` and `batch_size`, for peers that train: optimizer steps of a block, sequences of each.
"""

from __future__ import annotations

import json
import os
import re
import shutil
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
    folder = Path(job["scratch"]) / "fake"
    quantizer.quantize_and_save(str(folder), format="fake")
    tensors: Weights = {}
    for file in folder.rglob("*.safetensors"):
        tensors |= load_file(file)
    return {name: tensors[f"{name}.weight"] for name in job["linears"]}


def llmcompressor(job: Job) -> Weights:
    """GPTQ of llm-compressor; scales by squared error, since its default, by the largest weight, wastes 2 bits."""
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
    """GPTQ of GPTQModel, saved, loaded, dequantized; scales by squared error, for llm-compressor's reason."""
    # Of its own accord 7.6.0 takes one on machines with two cores, and then refuses to have fewer than two.
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

    rows = _rows(job)
    dynamic: dict[str, dict[str, Any]] = {f"-:^{re.escape(name)}$": {} for name in job["others"]}
    config = QuantizeConfig(bits=job["bits"], group_size=job["group_size"], dynamic=dynamic, mse=2.0)
    model = GPTQModel.load(job["model"], config, device=_device(), dtype=getattr(torch, job["dtype"]))
    model.quantize([{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in rows], batch_size=1)
    folder = str(Path(job["scratch"]) / "packed")
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
    """Quantize, and write the checkpoint.

    Returns:
        Version of the peer, seconds it took, and its peak memory in bytes.
    """
    peer: str = job["peer"]
    began = time.perf_counter()
    weights = PEERS[peer](job)
    seconds = time.perf_counter() - began
    write_checkpoint(Path(job["model"]), weights, Path(job["checkpoint"]))
    status = Path("/proc/self/status").read_text()
    peak = re.search(r"VmHWM:\s+(\d+) kB", status)  # getrusage's begins with what the starting process had
    assert peak is not None
    return {
        "version": version(DISTRIBUTIONS.get(peer, peer)),
        "seconds": seconds,
        "peak_device_bytes": torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0,
        "peak_host_bytes": int(peak[1]) * 1024,
    }


def write_checkpoint(source: Path, weights: Weights, destination: Path) -> None:
    """Copy a checkpoint folder, with other weights in the place of some, in the dtype they have."""
    destination.mkdir(parents=True, exist_ok=True)
    replaced = 0
    for path in source.iterdir():
        if path.suffix == ".safetensors":
            tensors = load_file(path)
            for name in tensors:
                weight = weights.get(name.removesuffix(".weight"))
                if weight is not None:
                    tensors[name] = weight.detach().cpu().contiguous()
                    replaced += 1
            save_file(tensors, destination / path.name, metadata={"format": "pt"})
        elif path.is_file():
            shutil.copy(path, destination)
    assert replaced == len(weights), f"{len(weights) - replaced} of {len(weights)} weights are not in {source}"


def _load(job: Job) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(job["model"], dtype=getattr(torch, job["dtype"]))
    return model.to(_device()), AutoTokenizer.from_pretrained(job["model"])


def _rows(job: Job) -> Tensor:
    return load_file(job["rows"])["rows"]


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    job = json.loads(Path(sys.argv[1]).read_text())
    Path(job["result"]).write_text(json.dumps(run(job)))
