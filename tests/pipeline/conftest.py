from __future__ import annotations

import sys

import pytest
import torch
from toy_runs import toy_checkpoint, write_recipe


@pytest.fixture(autouse=True)
def no_arguments_of_pytest(monkeypatch):
    """LightningCLI warns where it finds both a list of arguments and sys.argv."""
    monkeypatch.setattr(sys, "argv", ["run.py"])


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    """Recipe of a two-block Llama checkpoint in float32. Nothing may be written beside it."""
    folder = tmp_path_factory.mktemp("llama")
    return write_recipe(folder, toy_checkpoint(folder / "checkpoint"))


@pytest.fixture(scope="session")
def recipes(tmp_path_factory):
    """Recipes by family, of two-block checkpoints in bfloat16, as models are published."""
    made = {}

    def recipe(name):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            checkpoint = toy_checkpoint(folder / "checkpoint", name, dtype=torch.bfloat16)
            made[name] = write_recipe(folder, checkpoint)
        return made[name]

    return recipe
