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
