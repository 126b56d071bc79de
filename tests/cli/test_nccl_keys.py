"""The recipe's `nccl` keys are NCCL's environment variables, but never in the place of one that the user has set."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gsq_module import recipe_run

VARIABLES = ("NCCL_BUFFSIZE", "NCCL_MAX_CTAS", "NCCL_NVLS_ENABLE", "NCCL_CUMEM_ENABLE")


@pytest.fixture
def environment(toy, run_cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """NCCL's variables as a fit with some options finds them where its processes would start."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)

    def of(*options: str) -> dict[str, str]:
        found: dict[str, str] = {}

        def note(run: recipe_run.Run) -> None:
            found.update({name: os.environ[name] for name in VARIABLES if name in os.environ})
            raise ValueError("the model would be opened now")

        monkeypatch.setattr(recipe_run.Run, "open_model", note)
        outcome = run_cli("fit", "--config", toy.recipe, "--run_dir", tmp_path / "run", *options)
        assert outcome.error == "error: the model would be opened now\n"
        return found

    return of


def test_unset_keys_leave_all_to_nccl(environment) -> None:
    assert environment() == {}


def test_each_key_is_its_variable(environment) -> None:
    options = ("--nccl.buffsize=1048576", "--nccl.max_ctas=4", "--nccl.nvls=false", "--nccl.cumem=false")
    assert environment(*options) == dict(zip(VARIABLES, ("1048576", "4", "0", "0"), strict=True))


def test_what_the_user_has_exported_stays(environment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    monkeypatch.setenv("NCCL_MAX_CTAS", "2")
    found = environment("--nccl.nvls=true", "--nccl.max_ctas=8", "--nccl.buffsize=65536")
    assert found == {"NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "2", "NCCL_BUFFSIZE": "65536"}


@pytest.mark.parametrize("option", ["--nccl.buffsize=0", "--nccl.max_ctas=-1", "--nccl.nvls=2", "--nccl.algo=Ring"])
def test_other_values_are_refused(toy, run_cli, option: str) -> None:
    outcome = run_cli("fit", "--config", toy.recipe, option)
    assert outcome.status == 2
    assert "nccl" in outcome.error
