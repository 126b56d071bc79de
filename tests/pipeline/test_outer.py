"""Embedding and head: quantized around the blocks, evaluated as exported, resumed, refused where they do not fit."""

from __future__ import annotations

import shutil

import pytest
import torch
from toy_models import family, open_streamed, save
from toy_runs import BARE, contents, run, summary_of, toy_checkpoint, write_recipe

from gsq_module import outer
from gsq_module.coverage import check_geometry, measure_coverage
from gsq_module.data.samples import Samples
from gsq_module.export.loading import load_whole
from gsq_module.module import GSQModule
from gsq_module.outer import OuterQuantizer
from gsq_module.quantization.grid import GRIDS
from gsq_module.run_directory import RunDirectory
from gsq_module.streaming.checkpoint import Checkpoint
from gsq_module.streaming.model import StreamedModel

BOTH = ("--model.embedding_bits=8", "--model.head_bits=4", "--model.outer_group_size=32")
WITHOUT_REFINEMENT = ("--model.refinement.epochs=0", "--reload_max_gib=0")


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    """A finished run, and its recipe. Not to be written to."""
    folder = tmp_path_factory.mktemp("untied")
    recipe = write_recipe(folder, toy_checkpoint(folder / "checkpoint"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["run.py"])
        cli = run(recipe, folder / "run", *BOTH)
    return recipe, folder / "run", cli


@pytest.fixture
def tied(tmp_path):
    return write_recipe(tmp_path, toy_checkpoint(tmp_path / "checkpoint", tie_word_embeddings=True))


def assert_evaluated_as_exported(summary):
    perplexity = summary["perplexity"]
    assert perplexity["reloaded"] == pytest.approx(perplexity["quantized"], rel=1e-6)


def test_what_is_evaluated_is_what_is_exported(untied):
    _, run_dir, _ = untied
    summary = summary_of(run_dir)
    assert set(summary["perplexity"]) == {"original", "initial", "quantized", "reloaded"}
    assert_evaluated_as_exported(summary)
    assert sorted(path.name for path in (run_dir / "units").glob("[eh]*")) == [
        "embedding.safetensors",
        "head.safetensors",
    ]
    assert summary["seconds"].keys() >= {"embedding", "head"}


def test_perplexity_is_that_of_the_quantized_embedding_and_head(untied):
    """Not of the float ones: the export with these put back measures differently."""
    recipe, run_dir, _ = untied
    export = load_whole(run_dir / "export").state_dict()
    assert "model.embed_tokens.weight_packed" in export
    assert "lm_head.weight_packed" in export
    evaluated = run(recipe, run_dir, *BOTH, command="evaluate").measured["held_out"].perplexity
    assert evaluated == pytest.approx(summary_of(run_dir)["perplexity"]["quantized"], rel=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("num_blocks", [1, 2])
def test_the_heads_error_is_that_of_its_output_on_the_quantized_stream(untied, num_blocks, tmp_path):
    """Measured through transformers, on the whole model: also where blocks behind the quantized ones are float."""
    recipe, run_dir, cli = untied
    if num_blocks == 1:
        run_dir = tmp_path / "run"
        cli = run(recipe, run_dir, *BOTH, *WITHOUT_REFINEMENT, "--model.num_blocks=1")
    (_, head) = summary_of(run_dir)["outer"]
    exported = load_whole(run_dir / "export", torch.float32)
    given = []
    exported.lm_head.register_forward_pre_hook(lambda module, args: given.append(args[0].double().flatten(0, 1)))
    exported(cli.datamodule.gptq)
    inputs = given[0]
    original = Checkpoint(recipe.parent / "checkpoint").tensor("lm_head.weight").double()
    difference = exported.lm_head.weight.double() - original
    error = (inputs @ difference.T).square().sum() / (inputs @ original.T).square().sum()
    assert head["refined_error"] == pytest.approx(float(error), rel=1e-3)
    assert head["refined_error"] < 0.9 * head["initial_error"], "GPTQ is better than rounding on the head's own inputs"
    assert head["kept"] == "refined"


def test_the_embeddings_error(untied):
    _, run_dir, _ = untied
    (embedding, _) = summary_of(run_dir)["outer"]
    assert embedding["unit"] == "embedding"
    # 255 steps over some five standard deviations, each with an error of a step / sqrt(12)
    assert 1e-6 < embedding["refined_error"] < 1e-4
    assert embedding["kept"] == "initial"


@pytest.mark.parametrize("bits", [4, 8])
def test_a_tied_model(tied, tmp_path, bits):
    run(tied, tmp_path / "run", f"--model.embedding_bits={bits}", "--model.measure_initial=false")
    summary = summary_of(tmp_path / "run")
    assert_evaluated_as_exported(summary)
    assert [part["unit"] for part in summary["outer"]] == ["embedding"]
    assert [path.name for path in (tmp_path / "run/units").glob("[eh]*")] == ["embedding.safetensors"]
    loaded = Checkpoint(tmp_path / "run/export")
    for kind in ("weight_packed", "weight_scale"):
        assert torch.equal(loaded.tensor(f"lm_head.{kind}"), loaded.tensor(f"model.embed_tokens.{kind}"))


@pytest.mark.slow
@pytest.mark.parametrize("missing", [["head"], ["embedding"], ["embedding", "head"]])
def test_only_what_is_missing_is_done_again(untied, tmp_path, monkeypatch, missing):
    recipe, finished, _ = untied
    run_dir = shutil.copytree(finished, tmp_path / "run")
    done = []
    quantize = OuterQuantizer._quantize
    monkeypatch.setattr(
        OuterQuantizer, "_quantize", lambda self, kind, *rest: done.append(kind) or quantize(self, kind, *rest)
    )
    run(recipe, run_dir, *BOTH, *BARE)
    assert done == []
    for kind in missing:
        (run_dir / f"units/{kind}.safetensors").write_bytes(b"cut")
    run(recipe, run_dir, *BOTH, *BARE)
    assert done == missing
    assert contents(run_dir / "export") == contents(finished / "export")


def test_embedding_and_head_change_the_run(untied, tmp_path, capsys):
    recipe, finished, _ = untied
    run_dir = shutil.copytree(finished, tmp_path / "run")
    with pytest.raises(SystemExit):
        run(recipe, run_dir, "--model.embedding_bits=4", *BOTH[1:])
    assert "model.embedding_bits: 8 there, 4 now" in capsys.readouterr().err


def test_rounding_alone_passes_no_stream(untied, tmp_path, monkeypatch):
    recipe, _, _ = untied
    monkeypatch.setattr(StreamedModel, "head_inputs", lambda self: pytest.fail("no inputs are needed"))
    run(recipe, tmp_path / "run", *BOTH, *WITHOUT_REFINEMENT, "--model.initializer=rtn")
    summary = summary_of(tmp_path / "run")
    assert [part["kept"] for part in summary["outer"]] == ["initial", "initial"]


@pytest.mark.slow
def test_row_chunks_do_not_matter(untied, tmp_path, monkeypatch):
    recipe, finished, _ = untied
    run_dir = shutil.copytree(finished, tmp_path / "run")
    for kind in ("embedding", "head"):
        (run_dir / f"units/{kind}.safetensors").unlink()
    monkeypatch.setattr(outer, "ROW_CHUNK_WEIGHTS", 10 * 64 + 63)  # 97 rows, ten at a time
    run(recipe, run_dir, *BOTH, *BARE)
    before, after = (RunDirectory(folder) for folder in (finished, run_dir))
    model = open_streamed(recipe.parent / "checkpoint")
    settings = GSQModule("unused", embedding_bits=8, head_bits=4, outer_group_size=32)
    one, other = (OuterQuantizer(model, settings, folder.units(GRIDS[2])).weights({}) for folder in (before, after))
    assert set(one) == set(other) == {"model.embed_tokens", "lm_head"}
    for name in one:
        assert (one[name].codes == other[name].codes).float().mean() > 0.999, name
        assert other[name].codes.shape == (97, 64)


def test_the_original_stream_begins_with_the_original_embedding(untied, tmp_path, monkeypatch):
    from gsq_module.pipeline import BlockLoop

    recipe, finished, _ = untied
    seen = {}

    def stop(self, indices, *rest):
        raise KeyboardInterrupt

    opened = BlockLoop._open_stores

    def open_stores(self):
        seen["stores"] = stores = opened(self)
        seen["samples"] = self.samples
        return stores

    monkeypatch.setattr(BlockLoop, "_open_stores", open_stores)
    monkeypatch.setattr("gsq_module.pipeline._BlockStep", stop)
    monkeypatch.setattr("gsq_module.streaming.activations.Stores.close", lambda self: None)
    with pytest.raises(KeyboardInterrupt):
        run(recipe, tmp_path / "run", *BOTH, *BARE)
    samples: Samples = seen["samples"]
    table = Checkpoint(recipe.parent / "checkpoint").tensor("model.embed_tokens.weight")
    fitted = samples.tokens[: samples.validation.stop]
    assert torch.equal(seen["stores"]["original"].data[: len(fitted)], table[fitted])
    quantized = load_whole(finished / "export")
    quantized(fitted[:1])
    expected = quantized.model.embed_tokens.weight[samples.tokens]
    assert torch.equal(seen["stores"]["quantized"].data, expected)


# --- refusals and coverage --------------------------------------------------------------------------------------------


def problems(tmp_path, tie=False, hidden_size=64, **settings):
    model = open_streamed(save(family("llama", tie_word_embeddings=tie, hidden_size=hidden_size), tmp_path / "model"))
    return check_geometry(model, GSQModule("unused", group_size=8, **settings))


def test_a_group_that_does_not_divide_the_hidden_size(tmp_path):
    (problem,) = problems(tmp_path, embedding_bits=8, outer_group_size=48)
    assert "model.outer_group_size=48 does not divide the hidden size 64" in problem
    assert problems(tmp_path, outer_group_size=48) == [], "not used"


@pytest.mark.parametrize(("hidden_size", "expected"), [(256, 128), (192, 64), (96, 32)])
def test_the_default_group_is_the_largest_that_divides(tmp_path, hidden_size, expected):
    model = open_streamed(save(family("llama", hidden_size=hidden_size), tmp_path / "model"))
    (part,) = outer.outer_parts(model, GSQModule("unused", head_bits=8))
    assert part.group_size == expected


def test_no_default_group_divides(tmp_path):
    (problem,) = problems(tmp_path, hidden_size=72, embedding_bits=8)
    assert "does not divide the hidden size 72" in problem


@pytest.mark.parametrize("embedding_bits", [None, 4])
def test_a_tied_head_with_bits_of_its_own(tmp_path, embedding_bits):
    (problem,) = problems(tmp_path, tie=True, embedding_bits=embedding_bits, head_bits=8)
    assert "model.head_bits=8" in problem
    assert f"--model.embedding_bits {embedding_bits or 8}" in problem


def test_a_tied_head_with_the_embeddings_bits(tmp_path):
    assert problems(tmp_path, tie=True, embedding_bits=8, head_bits=8) == []


@pytest.mark.parametrize("tie", [False, True])
def test_coverage(tmp_path, tie):
    model = open_streamed(save(family("llama", tie_word_embeddings=tie), tmp_path))
    recipe = GSQModule("unused", group_size=32, embedding_bits=8, head_bits=None if tie else 8)
    coverage = measure_coverage(model, recipe)
    assert coverage.quantized[-2 + tie :] == ["model.embed_tokens"] + ([] if tie else ["lm_head"])
    assert not {"embedding", "head", "embedding, tied with the head"} & set(coverage.float_parameters)
    assert coverage.float_linears == []
    total = sum(parameter.numel() for parameter in model.model.parameters())
    assert coverage.quantized_parameters + sum(coverage.float_parameters.values()) == total
