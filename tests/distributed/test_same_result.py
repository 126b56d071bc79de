"""One process, two and three come to the same codes, whatever the strategy, and leave the same files."""

from __future__ import annotations

import pytest
from toy_runs import BARE, contents, summary_of

from gsq_module.quantization.grid import GRIDS
from gsq_module.run_directory import RunDirectory


def equal_codes(one, other) -> float:
    """Fraction of codes that two runs agree in."""
    weights, others = (RunDirectory(run.run_dir).units(GRIDS[2]).weights() for run in (one, other))
    assert set(weights) == set(others)
    same = sum(int((weights[name].codes == others[name].codes).sum()) for name in weights)
    return same / sum(weights[name].codes.numel() for name in weights)


def assert_same_result(run, alone) -> None:
    assert run.status == 0, run.output
    summary, expected = summary_of(run.run_dir), summary_of(alone.run_dir)
    assert min(unit["codes_changed"] for unit in expected["units"] if unit["kept"] == "refined") > 0.01
    assert equal_codes(run, alone) == 1.0
    assert contents(run.run_dir / "export") == contents(alone.run_dir / "export")
    for unit, other in zip(summary["units"], expected["units"], strict=True):
        assert unit["kept"] == other["kept"]
        assert unit["notes"] == other["notes"]
        for key in ("initial_error", "refined_error"):
            assert unit[key] == pytest.approx(other[key], rel=1e-6)
    for name in ("kl_divergence_by_text", "top1_agreement_by_text"):
        for model, value in summary[name]["held_out"].items():
            assert value == pytest.approx(expected[name]["held_out"][model], rel=1e-4)
    for name, value in summary["perplexity"].items():
        assert value == pytest.approx(expected["perplexity"][name], rel=1e-5)


def files_of(run) -> set[str]:
    return {name for name in contents(run.run_dir) if not name.startswith("export")}


def test_two_processes_do_what_one_does(launch, alone, tmp_path):
    """The whole of it, with `auto`, accumulated microbatches, the initial codes measured, and the export reloaded."""
    options = ("--trainer.devices=2", "--data.microbatch_size=3", "--model.store=disk")
    run = launch(tmp_path / "run", *options)
    assert_same_result(run, alone)
    assert set(summary_of(run.run_dir)["perplexity"]) == {"original", "initial", "quantized", "reloaded"}
    assert files_of(run) == files_of(alone), "one rank writes, and no hidden states stay behind"
    assert run.output.count("perplexity (lower is better)") == 1
    evaluated = launch(run.run_dir, "--trainer.devices=2", command="evaluate")
    assert evaluated.status == 0, evaluated.output
    (line,) = [line for line in evaluated.output.splitlines() if "held_out: perplexity" in line]
    assert float(line.split()[-1]) == pytest.approx(summary_of(run.run_dir)["perplexity"]["quantized"], abs=0.01)


def test_two_processes_with_split_weights(launch, alone, tmp_path):
    """Validation inside the fit puts hard codes into the split weights, and takes them out again."""
    options = ("--trainer.devices=2", "--trainer.strategy=sharded", "--data.microbatch_size=2")
    run = launch(tmp_path / "run", *options, "--trainer.limit_val_batches=1.0", *BARE)
    assert_same_result(run, alone)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "sharded"])
def test_three_processes_share_rows_and_samples_that_do_not_divide(strategy, launch, alone, tmp_path):
    """128 training, 5 validation, 19 GPTQ and 9 evaluation samples; weights of 2, 32, 64 and 128 rows."""
    run = launch(tmp_path / "run", "--trainer.devices=3", f"--trainer.strategy={strategy}", *BARE)
    assert_same_result(run, alone)


DEFAULT_RATE = ("--model.refinement.lr=2e-4", "--model.refinement.epochs=8", "--model.num_blocks=1", *BARE)
"""Refinement's default learning rate, and steps enough to change codes by it; units whose inputs are the same."""


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "equal", "near"), [("float32", 1.0, 1e-5), ("bfloat16", 0.995, 5e-3)])
def test_rounding_moves_few_codes_at_the_default_rate(dtype, equal, near, launch, tmp_path):
    """Behind units that differ in a few codes, more of them differ: docs/experiments.md, "Several processes"."""
    options = (f"--model.dtype={dtype}", f"--model.refinement.logit_dtype={dtype}", *DEFAULT_RATE)
    single = launch(tmp_path / "single", *options)
    assert single.status == 0, single.output
    expected = summary_of(single.run_dir)
    assert any(unit["kept"] == "refined" and unit["codes_changed"] > 0.01 for unit in expected["units"])
    for strategy in ("ddp", "sharded"):
        run = launch(tmp_path / strategy, *options, "--trainer.devices=2", f"--trainer.strategy={strategy}")
        assert run.status == 0, run.output
        assert equal_codes(run, single) >= equal
        for name, value in summary_of(run.run_dir)["perplexity"].items():
            assert value == pytest.approx(expected["perplexity"][name], rel=near)


@pytest.mark.slow
def test_two_processes_share_the_rows_of_embedding_and_head(launch, tmp_path):
    """97 rows: they do not divide."""
    options = ("--model.embedding_bits=8", "--model.head_bits=4", "--model.refinement.epochs=0", "--reload_max_gib=0")
    one = launch(tmp_path / "one", *options)
    two = launch(tmp_path / "two", *options, "--trainer.devices=2")
    assert one.status == two.status == 0, one.output + two.output
    assert contents(two.run_dir / "export") == contents(one.run_dir / "export")
    for part, other in zip(summary_of(two.run_dir)["outer"], summary_of(one.run_dir)["outer"], strict=True):
        assert part["refined_error"] == pytest.approx(other["refined_error"], rel=1e-6)
        assert part["kept"] == other["kept"]
    assert files_of(two) == files_of(one)
