"""`model.targets: recomputed`: the same fits as with cached targets, out of fewer stores."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from test_targets import BATCH, Spy, loop_over
from toy_models import family, open_streamed, save
from toy_runs import BARE, ONE_BLOCK, run, summary_of

from gsq_module import pipeline
from gsq_module.capture import record_calls
from gsq_module.quantization.grid import GRIDS
from gsq_module.refinement import UnitRefiner
from gsq_module.run_directory import RunDirectory
from gsq_module.streaming.activations import choose_location

TARGETS = ["original_stream", "original_unit"]


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_whole_fits_agree_in_float32(target, llama, tmp_path):
    """Stores hold what is computed, so only sums in another order differ (none here, but on other machines)."""
    weights, units = {}, {}
    for targets in ("cached", "recomputed"):
        options = (f"--model.target={target}", f"--model.targets={targets}", "--data.microbatch_size=4", *ONE_BLOCK)
        run(llama, tmp_path / targets, *options)
        weights[targets] = dict(RunDirectory(tmp_path / targets).units(GRIDS[2]).weights())
        units[targets] = summary_of(tmp_path / targets)["units"]
    assert max(unit["codes_changed"] for unit in units["cached"]) > 0.02, "else equal codes would say nothing"
    for one, two in zip(units["cached"], units["recomputed"], strict=True):
        assert two["initial_error"] == pytest.approx(one["initial_error"], rel=1e-4)
        assert two["refined_error"] == pytest.approx(one["refined_error"], rel=1e-3)
    for name, weight in weights["cached"].items():
        assert (weights["recomputed"][name].codes == weight.codes).float().mean() > 0.995, name


OPTIONS = [*(f"--model.target={target}" for target in TARGETS), "--model.token_weights=inverse_square"]


@pytest.mark.slow
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_errors_agree_up_to_the_rounding_of_stores(name, option, recipes, tmp_path):
    """Of a bfloat16 checkpoint stores are in bfloat16, and a CPU computes in float32: within 0.2 percent."""
    errors = {}
    for targets in ("cached", "recomputed"):
        options = (option, f"--model.targets={targets}", "--model.refinement.epochs=0")
        run(recipes(name), tmp_path / targets, *options, *BARE)
        errors[targets] = [unit["initial_error"] for unit in summary_of(tmp_path / targets)["units"]]
    assert errors["recomputed"] == pytest.approx(errors["cached"], rel=2e-3)


@pytest.mark.parametrize("units", [["attention", "mlp"], ["mlp"]])
@pytest.mark.parametrize("target", TARGETS)
def test_one_store_less(target, units, tmp_path, monkeypatch):
    """And the room that is looked for is the room that is taken."""
    announced, opened = {}, {}

    def watch(location, total_bytes, *others):
        announced[targets] = total_bytes
        return choose_location(location, total_bytes, *others)

    class Look(Spy):
        def __call__(self, problem, train, validation):
            opened[targets] = {file.name: file.stat().st_size for file in tmp_path.rglob("*.bin")}
            return super().__call__(problem, train, validation)

    monkeypatch.setattr(pipeline, "choose_location", watch)
    monkeypatch.setattr("test_targets.Spy", Look)
    folder = save(family("llama", num_hidden_layers=2), tmp_path / "checkpoint")
    for targets in ("cached", "recomputed"):
        settings = {"target": target, "targets": targets, "units": units, "store": "disk"}
        loop_over(open_streamed(folder), tmp_path / targets, **settings)
        assert sum(opened[targets].values()) == announced[targets]
    stream = {"original.bin", "goal_attention.bin"} if len(units) == 2 else {"original.bin"}
    needed = {"quantized.bin"} | (stream if target == "original_stream" else set())
    assert set(opened["cached"]) == needed | {"inputs.bin", "targets.bin"}
    assert set(opened["recomputed"]) == needed | {"residual.bin" if target == "original_stream" else "inputs.bin"}


@pytest.mark.parametrize("target", TARGETS)
def test_what_recomputes_is_dropped_with_its_unit(target, llama, tmp_path, monkeypatch):
    """The copy of the original unit takes as much of the device as the unit."""
    made, alive = [], []
    refine = UnitRefiner.__call__

    def watch(self, problem, *samples):
        gc.collect()
        alive.append(sum(reference() is not None for reference in made))
        made.append(weakref.ref(problem.prepare))
        return refine(self, problem, *samples)

    monkeypatch.setattr(UnitRefiner, "__call__", watch)
    run(llama, tmp_path / "run", f"--model.target={target}", "--model.targets=recomputed", *ONE_BLOCK)
    assert alive == [0, 0]


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3"])
def test_calls_of_several_sizes_share_their_tensors(name, tmp_path):
    """Masks of a sliding window are large, and every size of a batch would have its own."""
    streamed = open_streamed(save(family(name, num_hidden_layers=2), tmp_path / "checkpoint"))
    recorded = record_calls(streamed, {1, BATCH, 5}, 16)
    storages = {
        tensor.untyped_storage().data_ptr() for call in recorded[5] for tensor in call.tensors() if tensor.numel() > 1
    }
    assert storages
    for size in (1, BATCH, 5):
        for call, expected in zip(recorded[size], streamed.record_calls(size, 16), strict=True):
            assert call.kwargs.keys() == expected.kwargs.keys()
            for tensor, own in zip(call.tensors(), expected.tensors(), strict=True):
                assert torch.equal(tensor, own)
                assert tensor.numel() == 1 or tensor.untyped_storage().data_ptr() in storages
