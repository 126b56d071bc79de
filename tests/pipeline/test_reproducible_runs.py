"""The seed decides everything; how a batch is divided decides nothing."""

from __future__ import annotations

import pytest
import torch
from toy_runs import ONE_BLOCK, contents, run, summary_of

from gsq_module.quantization.grid import GRIDS
from gsq_module.refinement import Outcome
from gsq_module.run_directory import RunDirectory
from gsq_module.streaming.model import StreamedModel


def test_same_seed_same_bytes(recipes, tmp_path):
    options = ("--model.refinement.logit_dtype=bfloat16", *ONE_BLOCK)
    for name in ("first", "second"):
        run(recipes("llama"), tmp_path / name, *options)
    run(recipes("llama"), tmp_path / "other", "--seed_everything=1", *options)
    first, second, other = (contents(tmp_path / name / "export") for name in ("first", "second", "other"))
    assert first == second
    assert first.keys() == other.keys()
    changed = {name for name in first if first[name] != other[name]}
    assert changed == {"model-00001-of-00001.safetensors", "gsq_export.json"}  # which has its checksum


def test_data_seed_chooses_the_samples(llama, tmp_path):
    run(llama, tmp_path / "first", *ONE_BLOCK)
    run(llama, tmp_path / "other", "--data.seed=1", *ONE_BLOCK)
    first, other = (contents(tmp_path / name / "export") for name in ("first", "other"))
    assert first != other


@pytest.mark.slow
def test_stores_on_disk_change_nothing(llama, tmp_path):
    for store in ("memory", "disk", "device"):
        run(llama, tmp_path / store, f"--model.store={store}", *ONE_BLOCK)
    memory, disk, device = (contents(tmp_path / store / "export") for store in ("memory", "disk", "device"))
    assert memory == disk == device
    assert not list((tmp_path / "disk").rglob("*.bin")), "hidden states stay behind"


@pytest.mark.slow
def test_microbatches_change_next_to_nothing(llama, tmp_path, monkeypatch):
    """A batch of 4 as 4x1, 2x2 and 1x4 gives the same steps; sums in another order may turn a sign of Lion's."""
    # So few steps do not pay; they are compared all the same.
    monkeypatch.setattr(Outcome, "improved", property(lambda outcome: True))
    weights = {}
    for size in (1, 2, 4):
        options = ("--data.batch_size=4", "--data.train_samples=48", "--model.units=[mlp]")
        cli = run(llama, tmp_path / str(size), f"--data.microbatch_size={size}", *options, *ONE_BLOCK)
        assert cli.trainer.accumulate_grad_batches == 4 // size
        assert cli.trainer.global_step == 48 // 4
        weights[size] = dict(RunDirectory(tmp_path / str(size)).units(GRIDS[2]).weights())
    (unit,) = summary_of(tmp_path / "4")["units"]
    assert unit["codes_changed"] > 0.02, "else equal codes would say nothing"
    for size in (1, 2):
        for name, weight in weights[4].items():
            assert (weights[size][name].codes == weight.codes).float().mean() > 0.995, (size, name)
            assert (weights[size][name].scales - weight.scales).abs().max() < 0.1 * weight.scales.abs().mean()


@pytest.mark.slow
def test_forward_batches_change_next_to_nothing(llama, tmp_path, monkeypatch):
    """Whatever passes through a block at once outside refinement; and the calls for just these sizes are recorded."""
    asked = set()
    record = StreamedModel.record_calls

    def watch(self, batch_size, seq_len):
        asked.add(batch_size)
        return record(self, batch_size, seq_len)

    monkeypatch.setattr(StreamedModel, "record_calls", watch)
    weights, perplexities, sizes = {}, {}, {}
    for size in (1, 7, None):
        asked.clear()
        options = () if size is None else (f"--data.forward_batch_size={size}",)
        cli = run(llama, tmp_path / str(size), "--data.microbatch_size=4", *options, *ONE_BLOCK)
        weights[size] = dict(RunDirectory(tmp_path / str(size)).units(GRIDS[2]).weights())
        perplexities[size] = cli.summary["perplexity"]["quantized"]
        sizes[size] = set(asked)
    # 128 training, 5 validation, 19 GPTQ and 9 evaluation samples of 32 tokens; validation microbatches of 2 and 3
    assert sizes == {1: {1, 2, 3, 4}, 7: {7, 2, 5, 3, 4}, None: {128, 5, 19, 9, 2, 3, 4}}
    assert max(unit["codes_changed"] for unit in summary_of(tmp_path / "1")["units"]) > 0.02
    for size in (1, 7):
        assert perplexities[size] == pytest.approx(perplexities[None], rel=1e-2)
        for name, weight in weights[None].items():
            assert (weights[size][name].codes == weight.codes).float().mean() > 0.995, (size, name)


@pytest.mark.slow
def test_accumulation_asked_of_the_trainer_is_the_same(llama, tmp_path):
    run(llama, tmp_path / "data", "--data.microbatch_size=2", *ONE_BLOCK)
    run(llama, tmp_path / "trainer", "--trainer.accumulate_grad_batches=4", *ONE_BLOCK)
    data, trainer = (contents(tmp_path / name / "export") for name in ("data", "trainer"))
    assert data == trainer


@pytest.mark.slow
def test_batch_size_is_no_detail(llama, tmp_path):
    """Else the tests above could not tell."""
    for size in (8, 16):
        run(llama, tmp_path / str(size), f"--data.batch_size={size}", *ONE_BLOCK)
    eight, sixteen = (dict(RunDirectory(tmp_path / str(size)).units(GRIDS[2]).weights()) for size in (8, 16))
    same = [(eight[name].codes == sixteen[name].codes).float().mean() for name in eight]
    assert torch.stack(same).max() < 0.99
