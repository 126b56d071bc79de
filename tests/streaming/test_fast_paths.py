"""Kernels of other packages: used by a replayed block where they are installed, and kept out of a plan."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from toy_models import family, open_streamed, save
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback
from transformers.models.qwen3_5 import modeling_qwen3_5

from gsq_module.data import CalibrationData, TextFiles
from gsq_module.module import GSQModule
from gsq_module.planning import plan_run
from gsq_module.streaming import fast_paths
from gsq_module.streaming.model import StreamedModel

NAMES = {"chunk_gated_delta_rule": "torch_chunk_gated_delta_rule", "causal_conv1d_fn": "causal_conv1d_fn"}
MODULES = {"chunk_gated_delta_rule": "fla", "causal_conv1d_fn": "causal_conv1d"}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Packages with kernels that compute what torch's code does, but only on tensors with data; calls of them."""
    calls: list[str] = []

    def install(name: str, package: str) -> None:
        here = NAMES[name]
        plain = getattr(modeling_qwen3_5, here).__wrapped__

        @functools.wraps(plain)  # transformers passes on what the signature has
        def kernel(*args: torch.Tensor, **kwargs: object) -> object:
            assert args[0].data_ptr(), "a kernel on a tensor without data"
            calls.append(name)
            return plain(*args, **kwargs)

        module = ModuleType(package)
        setattr(module, name, kernel)
        if package == "fla":  # transformers looks for it in fla.ops.gated_delta_rule
            module.ops = ModuleType("fla.ops")  # type: ignore[attr-defined]
            module.ops.gated_delta_rule = module  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, package, module)
        # As transformers does when it is imported after the package.
        replaced = use_kernel_func_from_hub_with_fallback(name, package)(plain)
        monkeypatch.setattr(modeling_qwen3_5, here, replaced)

    for name, package in MODULES.items():
        install(name, package)
    return calls


@pytest.fixture
def streamed(tmp_path: Path) -> StreamedModel:
    return open_streamed(save(family("qwen3_5"), tmp_path))


def test_a_replayed_block_uses_the_kernels(streamed: StreamedModel, kernels: list[str]) -> None:
    call = streamed.record_calls(1, 8)[0]
    block = streamed.load_block(0)
    hidden = torch.randn(1, 8, 64, generator=torch.Generator().manual_seed(0))
    result = call(block, hidden)
    assert sorted(kernels) == sorted(NAMES)
    kernels.clear()
    with fast_paths.torch_path():
        assert torch.equal(call(block, hidden), result)
    assert kernels == []
    call(block, hidden)
    assert kernels, "the switch is put back"


def test_a_plan_takes_the_torch_code(tmp_path: Path, kernels: list[str]) -> None:
    save(family("qwen3_5"), tmp_path)
    text = TextFiles(["unread.txt"])
    data = CalibrationData(text, {"words": text}, seq_len=64, train_samples=16, batch_size=8, microbatch_size=2)
    recipe = GSQModule("unused", group_size=32)
    plan = plan_run(tmp_path, recipe, data, torch.device("cuda"), free_bytes=2**34)
    assert [block.indices for block in plan.blocks] == [(0, 2), (1,)]
    assert kernels == []


def test_what_the_plan_says_of_it(streamed: StreamedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_paths, "find_spec", lambda module: None)
    assert str(fast_paths.planned_path(streamed.model)).endswith("which a run here uses as well")
    monkeypatch.setattr(fast_paths, "find_spec", lambda module: object() if module == "fla" else None)
    assert "a run here uses flash-linear-attention, whose memory" in str(fast_paths.planned_path(streamed.model))
    llama = open_streamed(save(family("llama"), tmp_path / "llama"))
    assert fast_paths.planned_path(llama.model) is None
