"""The final pass: all scales trained together against the original's predictions."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
import torch.nn.functional as F
from toy_qwen import qwen_checkpoint
from toy_runs import BARE, contents, run, summary_of, toy_checkpoint, write_recipe

from gsq_module.quantization.grid import GRIDS, QuantizedWeight
from gsq_module.run_directory import RunDirectory
from gsq_module.scale_tuning import ScaledLinear, divergence

EPOCHS = "--model.final_pass.epochs=2"
FAST = "--model.final_pass.lr=5e-3"


def weights_of(shards):
    return dict(shards.weights().items())


@pytest.fixture(scope="module")
def tuned_with_warnings(llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tuned")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(llama, folder, EPOCHS, FAST, "--model.measure_initial=false")
    return folder, [str(warning.message) for warning in caught]


@pytest.fixture(scope="module")
def tuned(tuned_with_warnings):
    return tuned_with_warnings[0]


def test_lightning_is_given_no_loader_that_it_warns_of(tuned_with_warnings):
    assert not [text for text in tuned_with_warnings[1] if "val_dataloader" in text]


def test_the_model_predicts_more_like_the_original(tuned):
    found = summary_of(tuned)["final_pass"]
    assert found["kept"] is True
    assert 0 < found["after"] < 0.98 * found["before"]


def test_codes_stay_and_scales_change(tuned):
    directory = RunDirectory(tuned)
    before, after = (weights_of(shards(GRIDS[2])) for shards in (directory.units, directory.tuned_units))
    assert before.keys() == after.keys()
    for name, weight in before.items():
        assert torch.equal(weight.codes, after[name].codes)
        assert weight.scales.dtype == after[name].scales.dtype
    assert any(not torch.equal(weight.scales, after[name].scales) for name, weight in before.items())


def test_what_is_exported_is_what_was_measured(tuned):
    found = summary_of(tuned)["perplexity"]
    assert found["reloaded"] == pytest.approx(found["quantized"], rel=1e-4)


def test_a_finished_pass_is_not_done_again(tuned, llama):
    before = contents(tuned / "export")
    cli = run(llama, tuned, EPOCHS, FAST, "--model.measure_initial=false")
    assert cli.trainer.fit_loop.epoch_loop.batch_progress.current.ready == 0, "nothing was trained"
    assert contents(tuned / "export") == before


def test_other_settings_of_the_pass_find_the_same_units(llama, tmp_path, capsys):
    """A run whose pass failed, or came out badly, is not lost."""
    run(llama, tmp_path, EPOCHS, FAST, *BARE)
    tuned = contents(tmp_path / "export")
    written = {name: (tmp_path / name).stat().st_mtime_ns for name in contents(tmp_path) if name.startswith("units/")}
    with pytest.raises(SystemExit):
        run(llama, tmp_path, EPOCHS, "--model.final_pass.lr=1e-3", *BARE, command="export")
    assert "the final pass (model.final_pass) is not finished" in capsys.readouterr().err
    run(llama, tmp_path, "--model.final_pass.epochs=0", *BARE)
    without = contents(tmp_path / "export")
    assert without != tuned
    run(llama, tmp_path, EPOCHS, "--model.final_pass.lr=1e-3", *BARE)
    assert contents(tmp_path / "export") not in (tuned, without)
    assert written == {name: (tmp_path / name).stat().st_mtime_ns for name in written}, "no unit was done again"


def test_an_outcome_of_the_wrong_type_is_done_again(tuned, llama):
    file = RunDirectory(tuned).tuned_units(GRIDS[2]).directory / "final_pass.json"
    expected = json.loads(file.read_text())
    file.write_text(json.dumps(expected | {"after": "better"}))
    run(llama, tuned, EPOCHS, FAST, "--model.measure_initial=false")
    assert json.loads(file.read_text())["after"] == pytest.approx(expected["after"])


def test_what_no_token_needs_takes_no_part(tmp_path):
    """The vision tower of Qwen3.5 has no weights in memory."""
    recipe = write_recipe(tmp_path, qwen_checkpoint(tmp_path / "checkpoint"))
    run(recipe, tmp_path / "run", EPOCHS, FAST, "--model.refinement.epochs=0", "--model.num_blocks=1", *BARE)
    assert summary_of(tmp_path / "run")["final_pass"]["after"] > 0


@pytest.mark.slow
def test_scales_that_got_worse_are_not_kept(llama, tmp_path):
    run(llama, tmp_path, EPOCHS, "--model.final_pass.lr=50", *BARE)
    found = summary_of(tmp_path)["final_pass"]
    assert found["kept"] is False
    directory = RunDirectory(tmp_path)
    before, after = (weights_of(shards(GRIDS[2])) for shards in (directory.units, directory.tuned_units))
    assert all(torch.equal(weight.scales, after[name].scales) for name, weight in before.items())


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_embedding_and_head_are_quantized_in_it_and_stay_as_they_are(tied, tmp_path):
    recipe = write_recipe(tmp_path, toy_checkpoint(tmp_path / "checkpoint", tie_word_embeddings=tied))
    options = ["--model.embedding_bits=4"] + ([] if tied else ["--model.head_bits=4"])
    run(recipe, tmp_path / "run", EPOCHS, "--model.final_pass.lr=1e-9", "--model.measure_initial=false", *options)
    found = summary_of(tmp_path / "run")
    # With such a step the scales stay, and both measurements are of the model that is exported.
    assert found["final_pass"]["after"] == pytest.approx(found["final_pass"]["before"], rel=1e-3)
    assert found["perplexity"]["reloaded"] == pytest.approx(found["perplexity"]["quantized"], rel=1e-4)
    run(recipe, tmp_path / "float", EPOCHS, "--model.final_pass.lr=1e-9", *BARE)
    assert summary_of(tmp_path / "float")["final_pass"]["before"] < 0.999 * found["final_pass"]["before"]


def test_a_scaled_linear_is_the_dequantized_one_and_has_its_gradients():
    random = torch.Generator().manual_seed(0)
    codes = torch.randint(-2, 2, (6, 8), generator=random, dtype=torch.int8)
    weight = QuantizedWeight(codes, torch.randn(6, 2, generator=random))
    linear = torch.nn.Linear(8, 6)
    inputs = torch.randn(5, 8, generator=random)
    scaled = ScaledLinear(linear, weight, torch.float32)
    assert torch.equal(scaled.hardened().dequantize(), weight.dequantize())
    scales = weight.scales.clone().requires_grad_()
    dense = codes.float() * scales.repeat_interleave(4, dim=1)
    expected = F.linear(inputs, dense, linear.bias)
    found = scaled(inputs)
    torch.testing.assert_close(found, expected)
    found.square().sum().backward()
    expected.square().sum().backward()
    # of a factor of the scale, not of the scale
    torch.testing.assert_close(scaled.gain.grad, scales.grad * weight.scales)


def test_divergence_is_kullback_leiblers_and_zero_of_the_same():
    random = torch.Generator().manual_seed(0)
    ours, theirs = torch.randn(2, 3, 700, 11, generator=random)  # more positions than are compared at once
    p, q = theirs.softmax(-1), ours.softmax(-1)
    torch.testing.assert_close(divergence(ours, theirs), (p * (p / q).log()).sum(), rtol=1e-4, atol=0)
    assert float(divergence(theirs, theirs)) == pytest.approx(0.0, abs=1e-4)
