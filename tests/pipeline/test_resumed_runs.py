"""The same command goes on where a run was killed; other settings do not mix with it (case 41)."""

from __future__ import annotations

import shutil

import pytest
from toy_runs import BARE, contents, run, summary_of

from gsq_module.quantization.grid import GRIDS
from gsq_module.refinement import UnitRefiner
from gsq_module.run_directory import RunDirectory
from gsq_module.streaming.model import StreamedModel

LAST = "units/block_0001.mlp.safetensors"


@pytest.fixture(scope="module")
def finished(llama, tmp_path_factory):
    """A run that nothing disturbed. Not to be written to."""
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["run.py"])
        run(llama, run_dir, *BARE)
    return run_dir


@pytest.fixture
def disturbed(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


@pytest.fixture
def refined(monkeypatch):
    """Names of the units' first linears, in the order in which they are refined."""
    names = []
    refine = UnitRefiner.__call__

    def counting(self, problem, *samples):
        names.append(next(iter(problem.weights)).rpartition(".")[0])
        return refine(self, problem, *samples)

    monkeypatch.setattr(UnitRefiner, "__call__", counting)
    return names


def cut(length):
    def change(file):
        content = file.read_bytes()
        file.write_bytes(content[: length(len(content))])

    return change


HARM = {
    "gone": lambda file: file.unlink(),
    "0 bytes": cut(lambda size: 0),
    "4 bytes": cut(lambda size: 4),
    "half": cut(lambda size: size // 2),
    "one byte short": cut(lambda size: size - 1),
    "no result": lambda file: file.write_bytes(b"\x02\0\0\0\0\0\0\0{}"),
    "noise": lambda file: file.write_bytes(bytes(range(256)) * 8),
}


@pytest.mark.parametrize("harm", HARM)
def test_only_the_harmed_unit_is_done_again(harm, finished, disturbed, llama, refined):
    HARM[harm](disturbed / LAST)
    run(llama, disturbed, *BARE)
    assert refined == ["model.layers.1.mlp"]
    assert contents(disturbed / "export") == contents(finished / "export")
    before, after = (summary_of(folder) for folder in (finished, disturbed))
    assert after["perplexity"] == before["perplexity"]
    timeless = [{key: value for key, value in unit.items() if key != "seconds"} for unit in before["units"]]
    assert [{key: value for key, value in unit.items() if key != "seconds"} for unit in after["units"]] == timeless


def test_a_unit_in_the_middle_is_done_again(finished, disturbed, llama, refined):
    (disturbed / "units/block_0000.mlp.safetensors").unlink()
    run(llama, disturbed, *BARE)
    assert refined == ["model.layers.0.mlp"]
    assert contents(disturbed / "export") == contents(finished / "export")


def test_blocks_behind_the_last_open_unit_are_left_alone(finished, disturbed, llama, refined, monkeypatch):
    (disturbed / "units/block_0000.attention.safetensors").unlink()
    loaded = []
    load_block = StreamedModel.load_block
    monkeypatch.setattr(
        StreamedModel, "load_block", lambda self, index: loaded.append(index) or load_block(self, index)
    )
    run(llama, disturbed, *BARE)
    assert refined == ["model.layers.0.self_attn"]
    assert contents(disturbed / "export") == contents(finished / "export")
    evaluation = [0, 1]
    assert loaded == [*evaluation, 0, *evaluation]


def test_the_initial_quantization_is_not_done_twice(llama, tmp_path, refined):
    run(llama, tmp_path / "run", "--model.num_blocks=1", "--reload_max_gib=0")
    assert refined == ["model.layers.0.self_attn", "model.layers.0.mlp"] * 2
    before = summary_of(tmp_path / "run")
    (tmp_path / "run/initial/block_0000.mlp.safetensors").write_bytes(b"")
    run(llama, tmp_path / "run", "--model.num_blocks=1", "--reload_max_gib=0")
    assert refined[4:] == ["model.layers.0.mlp"]
    run(llama, tmp_path / "run", "--model.num_blocks=1", "--reload_max_gib=0")
    assert len(refined) == 5
    assert summary_of(tmp_path / "run")["perplexity"] == before["perplexity"]


def test_a_killed_run_goes_on(finished, llama, tmp_path, monkeypatch, refined):
    refine = UnitRefiner.__call__

    def killed(self, *arguments):
        if len(refined) == 2:
            raise KeyboardInterrupt
        return refine(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(UnitRefiner, "__call__", killed)
        with pytest.raises(KeyboardInterrupt):
            run(llama, tmp_path / "run", "--model.store=disk", *BARE)
    assert not list(tmp_path.rglob("*.bin"))
    assert not (tmp_path / "run" / "export").exists()
    assert refined == ["model.layers.0.self_attn", "model.layers.0.mlp"]
    run(llama, tmp_path / "run", "--model.store=disk", *BARE)
    assert refined[2:] == ["model.layers.1.self_attn", "model.layers.1.mlp"]
    assert contents(tmp_path / "run" / "export") == contents(finished / "export")


def test_a_finished_run_is_only_exported_again(finished, disturbed, llama, refined):
    shutil.rmtree(disturbed / "export")
    run(llama, disturbed, *BARE)
    assert refined == []
    assert contents(disturbed / "export") == contents(finished / "export")
    summary = summary_of(disturbed)
    assert summary["units"] == summary_of(finished)["units"]
    before = summary_of(finished)["seconds"]
    assert summary["seconds"]["embed"] == before["embed"], "the streams are of no use any more"
    assert summary["seconds"]["total"] > before["total"], "of both sessions"
    shutil.rmtree(disturbed / "export")
    run(llama, disturbed, *BARE, command="export")
    assert contents(disturbed / "export") == contents(finished / "export")


@pytest.mark.parametrize(
    "option",
    [
        "model.bits=3",
        "model.group_size=64",
        "model.units=[mlp]",
        "model.target=original_unit",
        "model.refinement.lr=0.001",
        "data.batch_size=16",
        "data.seed=1",
        "data.calibration.init_args.column=body",
        "seed_everything=7",
    ],
)
def test_a_field_that_matters_is_refused_by_name(option, disturbed, llama, refined, capsys):
    before = contents(disturbed)
    with pytest.raises(SystemExit) as caught:
        run(llama, disturbed, f"--{option}", *BARE)
    assert caught.value.code == 2
    field = option.partition("=")[0]
    message = capsys.readouterr().err
    assert f"  {field}: " in message
    assert message.count(" there, ") == 1, "only the field that differs is listed"
    assert f"--run_dir {disturbed}-2" in message
    assert refined == []
    assert contents(disturbed) == before


@pytest.mark.slow
@pytest.mark.parametrize("option", ["data.microbatch_size=4", "model.store=disk", "data.pin_memory=false"])
def test_a_field_that_does_not_matter_is_free(option, disturbed, llama, refined):
    (disturbed / LAST).unlink()
    config = (disturbed / "config.yaml").read_text()
    run(llama, disturbed, f"--{option}", *BARE)
    assert refined == ["model.layers.1.mlp"]
    assert (disturbed / "config.1.yaml").read_text() == config, "the earlier configuration is kept"
    assert (disturbed / "config.yaml").read_text() != config


def test_shards_hold_what_was_quantized(finished, llama):
    shards = RunDirectory(finished).units(GRIDS[2])
    results = shards.results()
    assert [(result.block, result.unit) for result in results] == [
        (block, unit) for block in (0, 1) for unit in ("attention", "mlp")
    ]
    weights = shards.weights()
    assert len(weights) == 14
    result, loaded = shards.load(1, "mlp")
    assert result == results[3]
    assert set(loaded) == {f"model.layers.1.mlp.{linear}_proj" for linear in ("gate", "up", "down")}
    for name, weight in loaded.items():
        assert (weight.codes == weights[name].codes).all()
        assert (weight.scales == weights[name].scales).all()
    assert shards.load(2, "mlp") is None
