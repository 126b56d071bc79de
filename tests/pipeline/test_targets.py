"""What a unit is fitted to, computed again by other means; and the block loop on blocks of other shapes."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from toy_models import CPU, family, open_streamed, save, streamed_toy, tokens
from toy_runs import ONE_BLOCK, run, summary_of

from gsq_module import pipeline
from gsq_module.data.samples import Samples
from gsq_module.memory.stages import StageClock
from gsq_module.module import GSQModule, UnitProblem
from gsq_module.pipeline import BlockLoop
from gsq_module.quantization.gptq import gptq
from gsq_module.refinement import Outcome
from gsq_module.streaming.activations import UnitSamples
from gsq_module.unit_shards import UnitShards

SEQ_LEN = 16
TRAIN, VALIDATION, GPTQ = 5, 2, 3
BATCH = 2
MICROBATCHES = [[0], [1, 2], [3, 4]], [[0, 1]]
"""Of the training and of the validation samples."""


@dataclass
class Seen:
    """What the refinement of one unit was given; `untouched` is the student's output with its original weights."""

    problem: UnitProblem
    untouched: Tensor
    inputs: Tensor
    targets: Tensor
    validation_inputs: Tensor
    validation_targets: Tensor


@dataclass
class Spy:
    """In the refinement's place: looks, and keeps the initial codes."""

    seen: list[Seen] = field(default_factory=list)

    def __call__(self, problem: UnitProblem, train: UnitSamples, validation: UnitSamples) -> Outcome:
        given = []
        for part, indices in zip((train, validation), MICROBATCHES, strict=True):
            prepared = [problem.prepare(microbatch) for microbatch in part.batches(indices)]
            given.append([torch.cat(tensors) for tensors in zip(*prepared, strict=True)])
        with torch.no_grad():
            untouched = [problem.student(part) for part in given[0][0].split([1, BATCH, BATCH])]
        self.seen.append(Seen(problem, torch.cat(untouched), *(tensor for pair in given for tensor in pair)))
        return Outcome(problem.initial, 1.0, None, 0.0, 0, 0.0)


def loop_over(model, folder: Path, **settings):
    """Run the block loop with a spy; returns what it saw and the calibration rows."""
    recipe = GSQModule("unused", group_size=32, **settings)
    rows = tokens(TRAIN + VALIDATION + GPTQ, SEQ_LEN)
    samples = Samples.of(*rows.split([TRAIN, VALIDATION, GPTQ]))
    spy = Spy()
    loop = BlockLoop(
        recipe=recipe,
        model=model,
        samples=samples,
        batch_size=BATCH,
        loader_sizes={1, BATCH},
        clock=StageClock(CPU),
        scratch=folder / "scratch",
        target=recipe.target,
        steps=0,
    )
    loop.run(UnitShards(folder / "units", recipe.grid), spy)
    return spy.seen, rows


@torch.no_grad()
def inputs_and_outputs(model, rows, *paths):
    """First input and output of modules in a whole forward pass, by path."""
    found = {}

    def watch(path):
        def hook(module, args, kwargs, result):
            given = args[0] if args else kwargs["hidden_states"]
            found[path] = (given, result[0] if isinstance(result, tuple) else result)

        return hook

    handles = [model.get_submodule(path).register_forward_hook(watch(path), with_kwargs=True) for path in paths]
    model(input_ids=rows, use_cache=False)
    for handle in handles:
        handle.remove()
    return found


@torch.no_grad()
def put(model, weights):
    for name, weight in weights.items():
        model.get_submodule(name).weight.copy_(weight.dequantize())


@pytest.mark.parametrize("targets", ["cached", "recomputed"])
@pytest.mark.parametrize("target", ["original_stream", "original_unit"])
def test_targets_by_other_means(target, targets, tmp_path):
    """In float64: original block output - quantized residual, or the original unit on the quantized input."""
    model = family("llama", num_hidden_layers=2)
    streamed = open_streamed(save(model, tmp_path / "checkpoint"), torch.float64)
    seen, rows = loop_over(streamed, tmp_path, target=target, targets=targets, dtype="float64")
    original, quantized = model.double(), copy.deepcopy(model).double()
    assert len(seen) == 4

    for index, entry in enumerate(seen):
        block, kind = f"model.layers.{index // 2}", ("self_attn", "mlp")[index % 2]
        norm = f"{block}.{('input_layernorm', 'post_attention_layernorm')[index % 2]}"
        paths = (block, norm, f"{block}.post_attention_layernorm", f"{block}.{kind}")
        untouched = inputs_and_outputs(original, rows, *paths)
        now = inputs_and_outputs(quantized, rows, *paths)  # every unit before this one is quantized
        if target == "original_stream":
            goal = untouched[block][1] if kind == "mlp" else untouched[f"{block}.post_attention_layernorm"][0]
            expected = goal - now[norm][0]
        else:
            expected = now[f"{block}.{kind}"][1]
        for rows_of, given, wanted in (
            (slice(0, TRAIN), entry.inputs, entry.targets),
            (slice(TRAIN, TRAIN + VALIDATION), entry.validation_inputs, entry.validation_targets),
        ):
            torch.testing.assert_close(given, now[norm][1][rows_of], rtol=1e-9, atol=1e-9)
            # The difference is taken in float32.
            torch.testing.assert_close(wanted.double(), expected[rows_of], rtol=1e-5, atol=1e-5)
        assert entry.problem.target_power == pytest.approx(float(expected[:TRAIN].square().mean()), rel=1e-5)
        put(quantized, entry.problem.initial)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, True),
        ({"token_weights": "inverse_square"}, False),  # the remedy
        ({"target": "original_unit"}, False),  # has no remedy
    ],
    ids=["uniform", "inverse_square", "original_unit"],
)
def test_a_token_that_outweighs_all_others_is_told_once(settings, told, tmp_path, caplog):
    """Massive activations: the first token's input to the MLP is one large number, which its output has the cube of."""
    model = family("llama", num_hidden_layers=2)
    rows = tokens(TRAIN + VALIDATION + GPTQ, SEQ_LEN)
    rows[:, 0] = rows[0, 0]
    with torch.no_grad():
        model.model.embed_tokens.weight[rows[0, 0]] = 0.0
        model.model.embed_tokens.weight[rows[0, 0], 0] = 100.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= 0.0
            layer.mlp.gate_proj.weight[:, 0] *= 50.0
            layer.mlp.up_proj.weight[:, 0] *= 50.0
    streamed = open_streamed(save(model, tmp_path / "checkpoint"))
    recipe = GSQModule("unused", group_size=32, units=["mlp"], **settings)
    samples = Samples.of(*rows.split([TRAIN, VALIDATION, GPTQ]))
    loop = BlockLoop(recipe, streamed, samples, BATCH, {1, BATCH}, StageClock(CPU), tmp_path / "s", recipe.target, 0)
    shards = UnitShards(tmp_path / "units", recipe.grid)
    results = loop.run(shards, lambda problem, *samples: Outcome(problem.initial, 1.0, None, 0.0, 0, 0.0))
    notes = [result.notes.get(result.name, "") for result in results]
    assert all(("--model.token_weights inverse_square" in note) is told for note in notes), notes
    logged = [record.message for record in caplog.records if "massive activations" in record.message]
    assert [message.split(":")[0] for message in logged] == (["model.layers.0.mlp"] if told else [])


def test_ordinary_activations_are_not_called_massive(tmp_path):
    model = family("llama", num_hidden_layers=1)
    streamed = open_streamed(save(model, tmp_path / "checkpoint"))
    rows = tokens(TRAIN + VALIDATION + GPTQ, SEQ_LEN)
    samples = Samples.of(*rows.split([TRAIN, VALIDATION, GPTQ]))
    recipe = GSQModule("unused", group_size=32)
    loop = BlockLoop(recipe, streamed, samples, BATCH, {1, BATCH}, StageClock(CPU), tmp_path / "s", recipe.target, 0)
    for result in loop.run(UnitShards(tmp_path / "units", recipe.grid), Spy()):
        assert result.name not in result.notes


@pytest.mark.parametrize("targets", ["cached", "recomputed"])
def test_token_weights_are_the_inverse_mean_square_of_the_original_stream(targets, tmp_path):
    """And a unit's relative error is the weighted one, by its definition; uniform weights give another."""
    model = family("llama", num_hidden_layers=1)
    rows = tokens(TRAIN + VALIDATION + GPTQ, SEQ_LEN)
    with torch.no_grad():
        model.model.embed_tokens.weight[rows[0, 0]] *= 300.0  # one token with a massive state
    streamed = open_streamed(save(model, tmp_path / "checkpoint"), torch.float64)
    caught = {}

    def spy(problem: UnitProblem, train: UnitSamples, validation: UnitSamples) -> Outcome:
        batch = next(train.batches([list(range(TRAIN))]))
        recipe = GSQModule("unused", group_size=32)
        recipe.bind(problem, 0)
        recipe.place(problem.initial)
        problem.student.calls[TRAIN] = problem.student.calls[BATCH]
        prepared = problem.prepare(batch)
        with torch.no_grad():
            output = problem.student(prepared[0])
        caught[len(caught)] = (prepared, output, problem.target_power, recipe.relative_error(batch))
        recipe.release()
        return Outcome(problem.initial, 1.0, None, 0.0, 0, 0.0)

    settings = {"units": ["mlp"], "dtype": "float64", "token_weights": "inverse_square", "targets": targets}
    recipe = GSQModule("unused", group_size=32, **settings)
    samples = Samples.of(*rows.split([TRAIN, VALIDATION, GPTQ]))
    loop = BlockLoop(recipe, streamed, samples, BATCH, {1, BATCH}, StageClock(CPU), tmp_path / "s", recipe.target, 0)
    loop.run(UnitShards(tmp_path / "units", recipe.grid), spy)

    (_, targets, weights), output, power, error = caught[0]
    goal = inputs_and_outputs(model.double(), rows, "model.layers.0")["model.layers.0"][1][:TRAIN]
    expected = 1 / goal.square().mean(-1)
    torch.testing.assert_close(weights.double(), expected, rtol=1e-5, atol=0)
    assert expected.max() > 1e3 * expected.min()
    assert power == pytest.approx(float((targets.square().mean(-1) * expected).mean()), rel=1e-4)
    by_hand = ((output - targets).square().mean(-1) * expected).mean() / power
    assert float(error) == pytest.approx(float(by_hand), rel=1e-4)
    assert float(by_hand) != pytest.approx(
        float((output - targets).square().mean() / targets.square().mean()), rel=0.05
    )


def test_token_weights_need_the_original_stream():
    with pytest.raises(ValueError, match="original_stream"):
        GSQModule("unused", target="original_unit", token_weights="inverse_square")


def test_the_streams_differ_where_they_should(tmp_path):
    """Else the two targets above could be one."""
    model = family("llama", num_hidden_layers=2)
    folder = save(model, tmp_path / "checkpoint")
    stream, _ = loop_over(open_streamed(folder), tmp_path / "stream", target="original_stream")
    unit, _ = loop_over(open_streamed(folder), tmp_path / "unit", target="original_unit")
    torch.testing.assert_close(stream[0].targets, unit[0].targets, rtol=0, atol=1e-5)
    for index in (1, 2, 3):
        assert (stream[index].targets - unit[index].targets).square().mean() > 1e-3


def test_hessians_by_other_means(tmp_path, monkeypatch):
    """Of the GPTQ rows alone, on the quantized stream, the unit itself untouched; one for linears of one input."""
    used = {}

    def watch(weight, hessian, *arguments, keep):
        used[len(used)] = hessian
        return gptq(weight, hessian, *arguments)  # and so keeps it

    monkeypatch.setattr(pipeline, "gptq", watch)
    model = family("llama", num_hidden_layers=2)
    seen, rows = loop_over(open_streamed(save(model, tmp_path / "checkpoint")), tmp_path)
    names = [name for entry in seen for name in entry.problem.weights]
    hessians = dict(zip(names, used.values(), strict=True))
    for entry in seen:
        unit = list(entry.problem.weights)
        given = inputs_and_outputs(model, rows[TRAIN + VALIDATION :], *unit)
        for name in unit:
            inputs = given[name][0].flatten(0, 1)
            assert hessians[name].num_tokens == len(inputs) == GPTQ * SEQ_LEN
            torch.testing.assert_close(hessians[name].matrix, inputs.T @ inputs, rtol=1e-4, atol=1e-4)
        put(model, entry.problem.initial)
    block = "model.layers.1"
    assert hessians[f"{block}.self_attn.q_proj"] is hessians[f"{block}.self_attn.v_proj"]
    assert hessians[f"{block}.mlp.gate_proj"] is hessians[f"{block}.mlp.up_proj"]
    assert hessians[f"{block}.mlp.gate_proj"] is not hessians[f"{block}.self_attn.q_proj"]


@pytest.mark.parametrize("targets", ["cached", "recomputed"])
@pytest.mark.parametrize("name", ["llama", "qwen3_5", "gemma2", "gemma3"])
def test_the_student_is_the_branch_of_its_block(name, targets, tmp_path):
    """Up to the first quantized unit both streams agree: the untouched student meets its target, post-norm and all."""
    folder = save(family(name, num_hidden_layers=2), tmp_path / "checkpoint")
    for unit in ("attention", "mlp"):
        settings = {"num_blocks": 1, "units": [unit], "targets": targets}
        (seen,), _ = loop_over(open_streamed(folder), tmp_path / unit, **settings)
        torch.testing.assert_close(seen.untouched, seen.targets, rtol=0, atol=1e-5)
        assert seen.targets.std() > 1e-2


@pytest.mark.parametrize("target", ["original_stream", "original_unit"])
def test_a_target_that_is_met_has_no_error(target, tmp_path):
    """The student with post-norm for the one target, without for the other."""
    folder = save(family("gemma3", num_hidden_layers=2), tmp_path / "checkpoint")
    seen, _ = loop_over(open_streamed(folder), tmp_path, target=target)
    same = [(entry.untouched - entry.targets).abs().max() < 1e-5 for entry in seen]
    assert same == [True, target == "original_unit", target == "original_unit", target == "original_unit"]


FORMS = [
    {"returns": "tuple", "passing": "positional"},
    {"returns": "tensor", "passing": "all_keywords"},
    {"returns": "tensor", "passing": "keyword", "nested": True},
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(map(str, form.values())))
@pytest.mark.parametrize("target", ["original_stream", "original_unit"])
def test_forms_of_blocks_give_the_same_codes(form, target, tmp_path):
    plain, whole = streamed_toy(tmp_path / "plain")
    other, different = streamed_toy(tmp_path / "other", **form)
    if "nested" in form:  # its weights are drawn in another order
        different.model.language_model.load_state_dict(whole.model.state_dict())
        different.lm_head.load_state_dict(whole.lm_head.state_dict())
        save_file(different.state_dict(), tmp_path / "other" / "model.safetensors")
    expected, _ = loop_over(plain, tmp_path / "plain", target=target)
    found, _ = loop_over(other, tmp_path / "other", target=target)
    assert len(found) == len(expected) == 6
    for one, two in zip(found, expected, strict=True):
        assert torch.equal(one.inputs, two.inputs)
        assert torch.equal(one.targets, two.targets)
        weights = zip(one.problem.initial.values(), two.problem.initial.values(), strict=True)
        assert all(torch.equal(a.codes, b.codes) and torch.equal(a.scales, b.scales) for a, b in weights)


def test_parallel_residual_needs_the_other_target(tmp_path):
    streamed, _ = streamed_toy(tmp_path / "toy", parallel=True)
    with pytest.raises(ValueError, match=r"--model\.target original_unit"):
        loop_over(streamed, tmp_path / "refused", target="original_stream")
    seen, _ = loop_over(streamed, tmp_path / "works", target="original_unit")
    assert len(seen) == 6
    # Both units of a block read the same normed input.
    assert torch.equal(seen[0].inputs, seen[1].inputs)


def test_units_in_the_order_of_the_recipe(tmp_path):
    streamed = open_streamed(save(family("llama", num_hidden_layers=2), tmp_path / "checkpoint"))
    seen, _ = loop_over(streamed, tmp_path, units=["mlp", "attention"])
    assert [next(iter(entry.problem.weights)).split(".")[3] for entry in seen] == ["mlp", "self_attn"] * 2


def test_weights_are_dropped_after_their_block(tmp_path):
    streamed = open_streamed(save(family("llama"), tmp_path / "checkpoint"))
    loop_over(streamed, tmp_path, num_blocks=2)
    assert all(parameter.is_meta for parameter in streamed.model.parameters())


def test_both_targets_run_to_the_end(llama, tmp_path):
    errors = {}
    for target in ("original_unit", "original_stream"):
        run(llama, tmp_path / target, f"--model.target={target}", *ONE_BLOCK)
        errors[target] = [unit["refined_error"] for unit in summary_of(tmp_path / target)["units"]]
    assert errors["original_unit"][0] == pytest.approx(errors["original_stream"][0], rel=1e-3)
    assert errors["original_unit"][1] < errors["original_stream"][1], "the stream's target holds the attention's error"
