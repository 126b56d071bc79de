"""A certain out-of-memory error in refinement is answered with a smaller microbatch; the result stays the same."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from toy_runs import BARE, STEPS, run, summary_of

from gsq_module.module import GSQModule
from gsq_module.quantization.grid import GRIDS
from gsq_module.run_directory import RunDirectory

FULL = "CUDA out of memory. Tried to allocate 680.00 MiB. GPU 0 has a total capacity of 11.94 GiB"
IN_DOUBLE = ("--model.dtype=float64", "--data.microbatch_size=4")


def fail_where(monkeypatch: pytest.MonkeyPatch, when: Callable[[GSQModule, int], bool], error: Exception) -> list[int]:
    """Raise in training steps for which `when(module, rows)`; returns the rows of each step that was tried."""
    training_step = GSQModule.training_step
    tried: list[int] = []

    def step(self: GSQModule, batch: tuple[torch.Tensor, ...], batch_idx: int) -> torch.Tensor:
        tried.append(len(batch[0]))
        if when(self, len(batch[0])):
            raise error
        return training_step(self, batch, batch_idx)

    monkeypatch.setattr(GSQModule, "training_step", step)
    return tried


def weights_of(run_dir):
    return RunDirectory(run_dir).units(GRIDS[2]).weights()


def assert_same_codes(one, other) -> None:
    for name, weight in weights_of(one).items():
        assert torch.equal(weight.codes, weights_of(other)[name].codes), name


@pytest.mark.slow
@pytest.mark.parametrize("target", ["original_stream", "original_unit"])
def test_the_retry_reaches_the_codes_of_a_run_that_began_smaller(llama, tmp_path, monkeypatch, caplog, target):
    options = (*BARE, f"--model.target={target}", f"--model.targets={'cached' if 'stream' in target else 'recomputed'}")
    run(llama, tmp_path / "small", *options, "--model.dtype=float64", "--data.microbatch_size=2")
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        # In the middle of the second unit, once some of its steps are done.
        tried = fail_where(
            patch, lambda module, rows: rows > 2 and module.trainer.global_step == 21, torch.OutOfMemoryError(FULL)
        )
        moved = []
        patch.setattr(GSQModule, "cpu", lambda self: moved.append(sum(p.numel() for p in self.parameters())) or self)
        run(llama, tmp_path / "retried", *options, *IN_DOUBLE)
    assert moved, "Lightning's teardown moves the module to the host"
    assert set(moved) == {0}, "not the unit: the retry needs it where it is"
    assert set(tried) == {4, 2}, "later units begin with the size that fitted"
    assert_same_codes(tmp_path / "retried", tmp_path / "small")
    units = summary_of(tmp_path / "retried")["units"]
    assert [bool(unit["notes"]) for unit in units] == [False, True, False, False]
    assert units[1]["notes"] == {
        "model.layers.0.mlp": "out of device memory after 5 steps; refined again in microbatches of 2"
    }
    assert "microbatches of 2" in caplog.text
    assert not (tmp_path / "retried" / "oom_reports").exists(), "what was mended is not reported"


def test_it_goes_down_to_one_sample_and_then_ends_with_a_report(llama, tmp_path, monkeypatch):
    tried = fail_where(monkeypatch, lambda module, rows: True, torch.OutOfMemoryError(FULL))
    with pytest.raises(SystemExit) as ended:
        run(llama, tmp_path / "run", *BARE, *IN_DOUBLE)
    assert ended.value.code == 10
    assert tried == [4, 2, 1]
    assert (tmp_path / "run" / "oom_reports" / "rank0.json").is_file()


@pytest.mark.slow
def test_a_suspected_error_is_not_retried_and_finished_units_are_kept(llama, tmp_path, monkeypatch):
    error = RuntimeError("CUDA driver error: device not ready")
    with monkeypatch.context() as patch:
        tried = fail_where(patch, lambda module, rows: module.trainer.global_step == 21, error)
        with pytest.raises(SystemExit) as ended:
            run(llama, tmp_path / "run", *BARE, *IN_DOUBLE)
    assert ended.value.code == 11
    assert set(tried) == {4}
    assert (tmp_path / "run" / "oom_reports" / "rank0.json").is_file()
    run(llama, tmp_path / "run", *BARE, *IN_DOUBLE)
    run(llama, tmp_path / "undisturbed", *BARE, *IN_DOUBLE)
    assert_same_codes(tmp_path / "run", tmp_path / "undisturbed")


@pytest.mark.gpu
def test_a_unit_is_refined_again_on_the_device(llama, tmp_path, monkeypatch):
    """Lightning's teardown after the failed fit must have left it there."""
    options = (*BARE, "--trainer.accelerator=gpu", "--model.dtype=float32", "--data.microbatch_size=4")
    run(llama, tmp_path / "undisturbed", *options)
    fail_where(monkeypatch, lambda module, rows: rows > 2, torch.OutOfMemoryError(FULL))
    run(llama, tmp_path / "run", *options)
    units = summary_of(tmp_path / "run")["units"]
    assert "microbatches of 2" in units[0]["notes"]["model.layers.0.self_attn"]
    undisturbed = summary_of(tmp_path / "undisturbed")["units"]
    assert all(unit["steps"] == STEPS for unit in units)
    for unit, expected in zip(units, undisturbed, strict=True):
        assert unit["refined_error"] == pytest.approx(expected["refined_error"], rel=0.05)
