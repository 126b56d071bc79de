"""`run.py rehearse` on a CPU: one block of each kind through every stage, and nothing of it stays."""

from __future__ import annotations

import json
import math
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.checkpoint import checkpoint
from toy_models import family
from toy_runs import ONE_BLOCK, contents, run, summary_of, write_recipe

from gsq_module import scale_tuning
from gsq_module.data import TextFiles
from gsq_module.data.module import CalibrationData
from gsq_module.geometry import find_units
from gsq_module.module import GSQModule
from gsq_module.planning import plan_run
from gsq_module.quantization.grid import QuantizedWeight
from gsq_module.rehearsal import Rehearsed, _joined, left_out
from gsq_module.rehearsal_final_pass import missing_bytes
from gsq_module.rehearsal_times import Evaluation, FinalPassTimes
from gsq_module.scale_tuning import quantized_whole
from gsq_module.settings import FinalPass
from gsq_module.streaming.model import StreamedModel
from gsq_module.streaming.module_weights import ModuleWeights
from gsq_module.streaming.synthetic import SyntheticCheckpoint

UNIT_STAGES = ("capture", "initialize", "refine")
KINDS = (0, 1)
"""First blocks of the toy's kinds: linear attention (blocks 0, 2) and full attention (block 1)."""


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """Recipe of a model of two kinds of block of which there is a config.json only."""
    folder = tmp_path_factory.mktemp("hybrid")
    config = family("qwen3_5", num_hidden_layers=3).config
    config.dtype = torch.bfloat16
    config.save_pretrained(folder / "checkpoint")
    assert [path.name for path in (folder / "checkpoint").iterdir()] == ["config.json"]
    return write_recipe(folder, folder / "checkpoint")


@pytest.fixture(scope="module")
def rehearsed(hybrid, tmp_path_factory):
    """The rehearsal, the blocks it loaded, and its run directory, in which something of the user's was before."""
    run_dir = tmp_path_factory.mktemp("run")
    (run_dir / "mine.txt").write_text("kept")
    loaded = []
    load_block = StreamedModel.load_block

    def noted(model, index):
        loaded.append(index)
        return load_block(model, index)

    load, passes = ModuleWeights.load, []
    options = (f"--json={run_dir / 'rehearsal.json'}", "--model.store=disk", "--data.forward_batch_size=4")
    options += ("--model.final_pass.epochs=2",)

    def noted_whole(weights, path):
        if path.rpartition(".")[2].isdecimal():
            loaded.append(int(path.rpartition(".")[2]))
        return load(weights, path)

    def noted_pass(function, *args, **settings):
        passes.append(getattr(function, "__self__", None))
        return checkpoint(function, *args, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["run.py"])
        patch.setattr(StreamedModel, "load_block", noted)
        patch.setattr(ModuleWeights, "load", noted_whole)
        patch.setattr(scale_tuning, "checkpoint", noted_pass)
        cli = run(hybrid, run_dir, *options, command="rehearse")
    return SimpleNamespace(rows=cli.rehearsed, loaded=loaded, passes=passes, run_dir=run_dir)


def test_every_stage_comes_once_for_each_kind_of_block_and_unit(rehearsed):
    """All that a run does with a block, the pass on to the next one included: its time and memory count too."""
    found = [(row.stage, row.block, row.unit) for row in rehearsed.rows]
    expected: list[tuple] = [("embed", None, None)]
    for block in KINDS:
        expected.append(("original", block, None))
        expected += [(stage, block, unit) for unit in ("attention", "mlp") for stage in UNIT_STAGES]
        expected.append(("propagate", block, None))
    assert found == [*expected, ("final_pass", None, None), ("evaluate", None, None)]


def test_one_block_of_each_kind_is_loaded_and_no_other(rehearsed):
    assert set(rehearsed.loaded) == set(KINDS)


def test_all_blocks_take_part_in_the_final_pass(rehearsed):
    """Those that are not loaded by the ones that are: a step takes as long as in the run."""
    blocks = [module for module in rehearsed.passes if module is not None]
    first, second, third = blocks[:3]
    assert first is third is not second
    assert blocks == [first, second, third] * (len(blocks) // 3)


@pytest.mark.parametrize("tied", [False, True])
def test_ballast_is_what_the_other_blocks_would_take(tied, tmp_path):
    """Four blocks, of which three are quantized: one is loaded and quantized, the others are that one again."""
    config = family("llama", num_hidden_layers=4, tie_word_embeddings=tied).config
    config.save_pretrained(tmp_path / "checkpoint")
    module = GSQModule(
        str(tmp_path / "checkpoint"), group_size=32, num_blocks=3, dtype="float32", final_pass=FinalPass(epochs=1)
    )
    data = CalibrationData(TextFiles(["no.txt"]), {}, seq_len=16, train_samples=8, batch_size=4)
    cpu = torch.device("cpu")
    plan = plan_run(tmp_path / "checkpoint", module, data, cpu, None)

    def tree() -> StreamedModel:
        return StreamedModel.from_checkpoint(SyntheticCheckpoint(tmp_path / "checkpoint"), cpu, torch.float32)

    def held(others: dict[int, int]) -> int:
        """Bytes of both models, and of gradient and Adam's moments of the gains."""
        original, other = tree(), tree()
        original.stand_in(others)
        other.stand_in(others)
        weights = {
            unit.full_name(path): QuantizedWeight(
                torch.zeros(linear.weight.shape, dtype=torch.int8),
                torch.ones(len(linear.weight), linear.in_features // 32),
            )
            for index in range(3)
            if index not in others
            for unit in find_units(other, index, module)
            for path, linear in unit.linears.items()
        }
        with original.whole() as model, quantized_whole(other, weights, {}) as scaled:
            codes = sum(weight.codes.nbytes + weight.scales.nbytes for weight in weights.values())
            gains = sum(linear.gain.nbytes for linear in scaled.values())
            first = sum(value.nbytes for value in model.parameters())
            if not others:
                buffers = sum(value.nbytes for value in model.buffers())
                assert plan.job.whole_bytes == first + buffers
            # The parameters of the quantized model are the gains and what stays in float.
            return first + sum(value.nbytes for value in other.model.parameters()) + codes + 3 * gains

    others = {1: 0, 2: 0, 3: 0}
    assert held(others) + missing_bytes(tree(), plan, others) == held({})


def test_each_stage_has_what_the_plan_says_and_no_device_figures_on_a_cpu(rehearsed):
    for row in rehearsed.rows:
        assert row.predicted is not None, row
        assert row.predicted > 0
        assert (row.allocated, row.reserved, row.margin) == (None, None, None)


def test_seconds_and_estimates_are_positive_and_for_all_blocks_of_a_kind(rehearsed):
    for row in rehearsed.rows:
        assert row.seconds > 0, row
        assert 0 < row.full_seconds < math.inf, row
    times = {(row.stage, row.block, row.unit): row.full_seconds / row.seconds for row in rehearsed.rows}
    for (stage, block, unit), factor in times.items():
        # Six steps were made, and the run makes sixteen; it has 152 calibration sequences, which are more, too.
        assert factor > 1, (stage, block, unit)
        if block == 0 and stage in ("original", "capture", "initialize"):
            assert factor == pytest.approx(2 * times[stage, 1, unit]), "blocks 0 and 2 are of this kind, 1 of the other"


def test_the_file(rehearsed):
    found = json.loads((rehearsed.run_dir / "rehearsal.json").read_text())
    assert [(row["stage"], row["block"], row["unit"]) for row in found["stages"]] == [
        (row.stage, row.block, row.unit) for row in rehearsed.rows
    ]
    timed = [row["stage"] for row in found["stages"] if row["step_seconds"]]
    assert timed == ["refine"] * 4 + ["final_pass"]  # two kinds of block, two units
    assert found["hours"] == pytest.approx(sum(row.full_seconds for row in rehearsed.rows) / 3600)
    assert found["host_peak"] > 2**20
    assert found["fits"] is True
    assert 0 < found["disk"] < found["disk_free"]
    assert found["host"] > 0
    assert found["verdict"][-1] == "verdict: the run fits this machine"


def test_what_the_disk_has_no_room_for_does_not_fit(hybrid, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    run(hybrid, tmp_path, f"--json={tmp_path / 'found.json'}", "--model.store=memory", command="rehearse")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["fits"] is False
    assert "NOT ENOUGH; --run_dir on a larger disk" in found["verdict"][0]


@pytest.mark.slow
def test_the_head_is_quantized_and_evaluated_beside_the_originals(hybrid, tmp_path, monkeypatch):
    loaded = []
    head = StreamedModel.head

    def noted(model, quantized=None, part=None):
        loaded.append((id(model), model.replaces_head(quantized)))
        return head(model, quantized, part)

    monkeypatch.setattr(StreamedModel, "head", noted)
    cli = run(hybrid, tmp_path, "--model.head_bits=4", "--model.store=memory", command="rehearse")
    (evaluate,) = [row for row in cli.rehearsed if row.stage == "evaluate"]
    assert evaluate.predicted
    (ours, replaced), (other, kept) = loaded
    assert ours != other
    assert (replaced, kept) == (True, False)


def test_of_several_ranks_each_figure_is_the_worst():
    def row(seconds: float, allocated: int, margin: int) -> Rehearsed:
        return Rehearsed("refine", 0, "mlp", seconds, allocated, allocated + 1, margin, 7, 10 * seconds)

    (joined,) = _joined([[row(1.0, 5, 90)], [row(2.0, 4, 80)]])
    assert (joined.seconds, joined.full_seconds, joined.allocated, joined.margin) == (2.0, 20.0, 5, 80)
    assert joined.by_rank == [5, 4]
    assert joined.reserved == 6


def test_nothing_stays_in_the_run_directory(rehearsed):
    assert set(contents(rehearsed.run_dir)) == {"mine.txt", "rehearsal.json"}
    assert not (rehearsed.run_dir / "rehearsal").exists()


def test_a_rehearsal_that_fails_leaves_nothing_either(llama, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("in the middle")

    monkeypatch.setattr("gsq_module.pipeline.gptq", fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        run(llama, tmp_path, *ONE_BLOCK, "--model.store=disk", command="rehearse")
    assert contents(tmp_path) == {}


@pytest.mark.slow
def test_a_run_after_a_rehearsal_is_the_run_without_it(llama, tmp_path):
    alone = tmp_path / "alone"
    run(llama, alone, *ONE_BLOCK)
    both = tmp_path / "both"
    cli = run(llama, both, *ONE_BLOCK, command="rehearse")
    assert {row.block for row in cli.rehearsed} == {None, 0}
    assert contents(both) == {}
    run(llama, both, *ONE_BLOCK)
    assert shards(alone) == shards(both)
    assert summary_of(alone)["perplexity"] == summary_of(both)["perplexity"]


def shards(run_dir):
    """Tensors of the unit shards; their metadata has seconds in it."""
    return {
        (path.name, name): tensor.tolist()
        for path in sorted((run_dir / "units").iterdir())
        for name, tensor in load_file(path).items()
    }


def test_synthetic_weights_are_of_the_checkpoints_geometry(hybrid, tmp_path):
    checkpoint = SyntheticCheckpoint(hybrid.parent / "checkpoint")
    whole = family("qwen3_5", num_hidden_layers=3).state_dict()
    assert set(checkpoint.names()) == set(whole)
    assert checkpoint.dtype() == torch.bfloat16
    for name, tensor in whole.items():
        made = checkpoint.tensor(name)
        assert name in checkpoint
        assert made.shape == tensor.shape == checkpoint.shape(name)
        assert made.dtype == torch.bfloat16
        assert made.isfinite().all()
        if made.ndim > 1:
            assert made.float().std() > 0, "a constant weight would make Hessians and refinement trivial"
    assert "lm_head.bias" not in checkpoint
    shutil.copy(hybrid.parent / "checkpoint" / "config.json", tmp_path)
    names = list(whole)[:3]
    assert set(SyntheticCheckpoint(tmp_path).tensors(names)) == set(names)


def test_an_evaluation_counts_embedding_blocks_and_heads_each_by_their_own_number():
    kinds = [SimpleNamespace(indices=range(24)), SimpleNamespace(indices=range(8))]
    plan = SimpleNamespace(job=SimpleNamespace(evaluation_samples=80), blocks=kinds)
    # 8 samples of 80, one of 16 blocks on the average; the original's stream and a quantized one, compared once
    found = Evaluation(samples=8, embedding=3.0, blocks=2.0).of_run(10.0, plan, passes=1)
    assert found == 2 * 3.0 + 10 * (2 * 16 * 2.0 + 5.0)


def test_a_final_pass_counts_steps_measurements_and_loading_each_by_their_own_number():
    plan = SimpleNamespace(job=SimpleNamespace(float_blocks=4), blocks=[SimpleNamespace(indices=range(16))])
    # Before the steps 0.5 s of loading beside the measurement; the run loads 20 blocks, and has 8 times the rows.
    assert FinalPassTimes(step=2.0, before=0.75, after=0.25).of_run(100, plan, rows=8) == 200 + 2 * 8 * 0.25 + 10


@pytest.mark.parametrize(
    ("samples", "of_run", "place", "expected"),
    [(4, 16, "device", 600), (16, 16, "device", 0), (16, 8, "device", 0), (4, 16, "memory", 0), (1, 0, "device", 0)],
)
def test_stores_of_samples_left_out_take_their_place_on_the_device(samples, of_run, place, expected):
    assert left_out(800, samples, of_run, place, torch.device("cpu")).nbytes == expected
