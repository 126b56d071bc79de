"""KL divergence to the original and agreement of the top token: as plain torch and plain transformers have them."""

from __future__ import annotations

import math

import pytest
import torch
from toy_models import family, save
from toy_runs import BARE, run, summary_of, toy_checkpoint, write_recipe
from transformers import AutoModelForCausalLM

from gsq_module import evaluation
from gsq_module.export.loading import load_whole
from gsq_module.measures import Predictions

POSITIONS, VOCABULARY = 50, 300


def compared(logits, original):
    """By definition, in float64: KL(original || model) in nats a position, and the fraction of equal top tokens."""
    log_p, log_q = (part.double().log_softmax(-1).flatten(0, -2) for part in (original, logits))
    divergence = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    return float(divergence), float((log_p.argmax(-1) == log_q.argmax(-1)).double().mean())


@pytest.mark.parametrize("tokens", [VOCABULARY, 77, 1])
def test_parts_of_positions_and_of_the_vocabulary_add_up(tokens):
    generator = torch.Generator().manual_seed(0)
    original = 3 * torch.randn(2, POSITIONS, VOCABULARY, generator=generator)
    logits = original + torch.randn(original.shape, generator=generator)
    targets = torch.randint(VOCABULARY, (2, POSITIONS), generator=generator)
    predictions = Predictions((2, POSITIONS), torch.device("cpu"), compares=True)
    for first in range(0, VOCABULARY, tokens):
        some = slice(first, first + tokens)
        for where in (
            (slice(0, 2), slice(0, 7)),
            (slice(0, 1), slice(7, POSITIONS)),
            (slice(1, 2), slice(7, POSITIONS)),
        ):
            predictions.update(
                where, logits[where][..., some].clone(), targets[where], original[where][..., some].clone(), first
            )
    measured, (divergence, agreement) = predictions.measured(), compared(logits, original)
    assert 0.2 < divergence < 2
    assert 0.1 < agreement < 0.9, "the toy would show nothing"
    assert measured.kl_divergence == pytest.approx(divergence, rel=1e-5)
    assert measured.top1_agreement == pytest.approx(agreement)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    assert measured.perplexity == pytest.approx(float(loss.exp()), rel=1e-5)


def test_without_an_original_there_is_perplexity_alone():
    predictions = Predictions((1, 3), torch.device("cpu"))
    predictions.update((slice(0, 1), slice(0, 3)), torch.zeros(1, 3, 8), torch.zeros(1, 3, dtype=torch.int64))
    measured = predictions.measured()
    assert measured.perplexity == pytest.approx(8)
    assert measured.kl_divergence is measured.top1_agreement is None


def test_logits_that_are_not_numbers_are_not_hidden():
    predictions = Predictions((1, 2), torch.device("cpu"), compares=True)
    logits = torch.zeros(1, 2, 8)
    logits[0, 1, 3] = torch.nan
    predictions.update((slice(0, 1), slice(0, 2)), logits, torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 2, 8))
    measured = predictions.measured()
    assert math.isnan(measured.perplexity)
    assert math.isnan(measured.kl_divergence)


@pytest.mark.parametrize("store", ["memory", "disk"])
def test_a_run_compares_with_its_original(store, llama, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation, "HEAD_TOKENS", 10)  # parts with a remainder
    monkeypatch.setattr(evaluation, "HEAD_WEIGHTS", 5000)
    cli = run(llama, tmp_path / "run", f"--model.store={store}", "--reload_max_gib=0")
    summary = summary_of(tmp_path / "run")
    tokens = cli.datamodule.evaluation_tokens["held_out"]
    with torch.no_grad():
        original, exported = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(input_ids=tokens).logits[:, :-1]
            for folder in (cli.model.path, tmp_path / "run" / "export")
        )
    divergence, agreement = compared(exported, original)
    assert divergence > 1e-4
    assert agreement < 1
    divergences, agreements = (summary[f"{name}_by_text"]["held_out"] for name in ("kl_divergence", "top1_agreement"))
    assert divergences.keys() == agreements.keys() == {"initial", "quantized"}
    assert divergences["quantized"] == pytest.approx(divergence, rel=1e-2)
    assert agreements["quantized"] == pytest.approx(agreement, abs=0.01)
    assert divergences["initial"] != divergences["quantized"]
    assert not list((tmp_path / "run").rglob("*.bin")), "hidden states stay behind"

    evaluated = run(llama, tmp_path / "run", command="evaluate").measured["held_out"]
    assert evaluated.kl_divergence == pytest.approx(divergence, rel=1e-2)
    assert evaluated.top1_agreement == pytest.approx(agreement, abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_quantized_embedding_and_head_are_compared_with_the_float_ones(tied, tmp_path, monkeypatch):
    """As the whole models give it: the quantized head's logits beside those of the original's own."""
    monkeypatch.setattr(evaluation, "HEAD_TOKENS", 10)
    monkeypatch.setattr(evaluation, "HEAD_WEIGHTS", 999)
    recipe = write_recipe(tmp_path, toy_checkpoint(tmp_path / "checkpoint", tie_word_embeddings=tied))
    options = ["--model.embedding_bits=4"] + ([] if tied else ["--model.head_bits=4"])
    cli = run(recipe, tmp_path / "run", *options, "--reload_max_gib=0")
    tokens = cli.datamodule.evaluation_tokens["held_out"]
    with torch.no_grad():
        original, exported = (
            load_whole(folder, torch.float32)(input_ids=tokens).logits[:, :-1]
            for folder in (cli.model.path, tmp_path / "run" / "export")
        )
    divergence, agreement = compared(exported, original)
    summary = summary_of(tmp_path / "run")
    divergences, agreements = (summary[f"{name}_by_text"]["held_out"] for name in ("kl_divergence", "top1_agreement"))
    assert divergences["quantized"] == pytest.approx(divergence, rel=1e-4)
    assert agreements["quantized"] == pytest.approx(agreement, abs=1e-6)
    # The initial codes go with the same embedding and, tied, with the same head.
    assert divergences["initial"] == pytest.approx(divergence, rel=0.5)
    evaluated = run(recipe, tmp_path / "run", *options, command="evaluate").measured["held_out"]
    assert evaluated.kl_divergence == pytest.approx(divergence, rel=1e-4)


def test_a_model_agrees_with_itself(llama, tmp_path):
    original = run(llama, tmp_path / "run", "--checkpoint=original", command="evaluate")
    assert original.measured["held_out"].kl_divergence is None
    same = run(llama, tmp_path / "run", f"--checkpoint={original.model.path}", command="evaluate")
    assert same.measured["held_out"].kl_divergence == 0
    assert same.measured["held_out"].top1_agreement == 1
    alone = run(llama, tmp_path / "run", f"--checkpoint={original.model.path}", "--compare=false", command="evaluate")
    assert alone.measured == original.measured


def test_models_with_other_tokens_are_not_compared(llama, tmp_path, capsys):
    other = save(family("llama", num_hidden_layers=1, vocab_size=1024), tmp_path / "other", torch.float32)
    with pytest.raises(SystemExit):
        run(llama, tmp_path / "run", f"--checkpoint={other}", *BARE, command="evaluate")
    assert "--compare false" in capsys.readouterr().err
