"""KL divergence to the original and agreement of the top token: as plain torch and plain transformers have them."""

from __future__ import annotations

import pytest
import torch
from toy_models import family, save
from toy_runs import BARE, run, summary_of, toy_checkpoint, write_recipe
from transformers import AutoModelForCausalLM

from gsq_module import evaluation
from gsq_module.export.loading import load_whole
from gsq_module.measures import Meter

POSITIONS, VOCABULARY = 50, 300


def compared(logits, original):
    """By definition, in float64: KL(original || model) in nats a position, and the fraction of equal top tokens."""
    log_p, log_q = (part.double().log_softmax(-1).flatten(0, -2) for part in (original, logits))
    divergence = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    return float(divergence), float((log_p.argmax(-1) == log_q.argmax(-1)).double().mean())


def test_a_meter_adds_up_parts():
    generator = torch.Generator().manual_seed(0)
    original = 3 * torch.randn(2, POSITIONS, VOCABULARY, generator=generator)
    logits = original + torch.randn(original.shape, generator=generator)
    targets = torch.randint(VOCABULARY, (2, POSITIONS), generator=generator)
    meter = Meter(torch.device("cpu"), compares=True)
    for part in (slice(0, 7), slice(7, POSITIONS)):
        meter.update(logits[:, part].clone(), targets[:, part], original[:, part].clone())
    measured, (divergence, agreement) = meter.compute(), compared(logits, original)
    assert 0.2 < divergence < 2
    assert 0.1 < agreement < 0.9, "the toy would show nothing"
    assert measured.kl_divergence == pytest.approx(divergence, rel=1e-5)
    assert measured.top1_agreement == pytest.approx(agreement)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    assert measured.perplexity == pytest.approx(float(loss.exp()), rel=1e-5)


def test_without_an_original_there_is_perplexity_alone():
    meter = Meter(torch.device("cpu"))
    meter.update(torch.zeros(1, 3, 8), torch.zeros(1, 3, dtype=torch.int64))
    measured = meter.compute()
    assert measured.perplexity == pytest.approx(8)
    assert measured.kl_divergence is measured.top1_agreement is None


@pytest.mark.parametrize("store", ["memory", "disk"])
def test_a_run_compares_with_its_original(store, llama, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation, "HEAD_TOKENS", 10)  # parts with a remainder
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
