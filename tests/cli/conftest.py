from __future__ import annotations

import random
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from gsq_module import cli, recipe_run
from gsq_module.streaming import source

WORDS = 64


@dataclass
class Toy:
    """A folder with a two-block model, a text, a recipe of both, and (in `toy_run`) the run that the recipe makes."""

    folder: Path

    @property
    def recipe(self) -> Path:
        return self.folder / "toy.yaml"

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def text(self) -> Path:
        return self.folder / "text.txt"

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"


@dataclass
class Outcome:
    """What a command came to: exit status, the CLI where it ran to the end, and what it printed."""

    status: int
    cli: cli.GSQCLI | None
    out: str
    err: str

    @property
    def error(self) -> str:
        """The message without the usage before it."""
        return self.err[self.err.rindex("error:") :]


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    toy = Toy(tmp_path_factory.mktemp("toy"))
    torch.manual_seed(0)
    # Large weights: perplexities far from the vocabulary's size, which any wrong weight moves by much.
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.5,
        eos_token_id=0,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(toy.model)
    words = Tokenizer(WordLevel({"<eos>": 0, "<unk>": 1} | {f"w{n}": n for n in range(2, WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", unk_token="<unk>").save_pretrained(toy.model)
    numbers = random.Random(0)
    toy.text.write_text(" ".join(f"w{numbers.randrange(2, WORDS)}" for _ in range(600)))
    text = {"class_path": "gsq_module.data.TextFiles", "init_args": {"paths": [str(toy.text)]}}
    recipe = {
        "run_dir": str(toy.run_dir),
        "model": {
            "path": str(toy.model),
            "group_size": 32,
            "units": ["mlp"],
            "refinement": {"epochs": 2, "lr": 1e-2},
        },
        "data": {
            "calibration": text,
            "evaluation": {"words": text},
            "seq_len": 16,
            "train_samples": 16,
            "validation_samples": 4,
            "gptq_samples": 4,
            "evaluation_samples": 3,
            "batch_size": 4,
        },
        "trainer": {"accelerator": "cpu", "log_every_n_steps": 1, "limit_val_batches": 0},
    }
    toy.recipe.write_text(yaml.safe_dump(recipe))
    return toy


@pytest.fixture
def run_cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """Run a command in this process: `run_cli("fit", "--config", path, ...)`."""

    def run(*args: Any) -> Outcome:
        # LightningCLI warns of arguments beside those of the process.
        monkeypatch.setattr(sys, "argv", ["run.py"])
        capsys.readouterr()
        status, finished = 0, None
        try:
            finished = cli.main([str(arg) for arg in args])
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else 1
        printed = capsys.readouterr()
        return Outcome(status, finished, printed.out, printed.err)

    return run


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Touching the checkpoint fails the test."""

    def touched(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the model was loaded")

    for owner, name in (
        (source, "fetch"),
        (recipe_run, "open_checkpoint"),
        (recipe_run.StreamedModel, "from_checkpoint"),
        (recipe_run.AutoTokenizer, "from_pretrained"),
    ):
        monkeypatch.setattr(owner, name, touched)


@pytest.fixture(scope="session")
def finished_toy(toy: Toy) -> Toy:
    """The toy with its finished run. Read it only; `toy_run` is a copy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["run.py"])
        cli.main(["fit", "--config", str(toy.recipe)])
    return toy


@pytest.fixture
def toy_run(finished_toy: Toy, tmp_path: Path) -> Path:
    """Run directory of a finished run, to be changed at will."""
    return Path(shutil.copytree(finished_toy.run_dir, tmp_path / "run"))
