"""What the parser itself refuses, and what `--help` says (cases 34 and 35)."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

from gsq_module.data.module import CalibrationData
from gsq_module.module import GSQModule, Refinement

pytestmark = pytest.mark.usefixtures("no_model")


def refused(outcome, *words: str) -> None:
    assert outcome.status == 2
    for word in words:
        assert word in outcome.error
    assert len(outcome.err.splitlines()) < 15, "the message drowns in the usage"


def test_an_unknown_key_is_named(run_cli, tmp_path: Path) -> None:
    recipe = tmp_path / "bitz.yaml"
    recipe.write_text("model: {bitz: 2}\n")
    refused(run_cli("fit", "--config", recipe), "model.bitz")


def test_an_unknown_key_inside_a_class_is_named(toy, run_cli) -> None:
    refused(run_cli("fit", "--config", toy.recipe, "--data.calibration.init_args.pathz", "x"), "pathz")


def test_an_unknown_option_is_named(toy, run_cli) -> None:
    refused(run_cli("fit", "--config", toy.recipe, "--model.bitz", "2"), "model.bitz")


@pytest.mark.parametrize("content", ["", "# nothing yet\n", "model\n"])
def test_an_empty_recipe_names_what_is_missing(run_cli, tmp_path: Path, content: str) -> None:
    recipe = tmp_path / "empty.yaml"
    recipe.write_text(content)
    refused(run_cli("fit", "--config", recipe), "--config", "model.path", "data.calibration", "data.evaluation")


def test_a_recipe_without_required_keys_names_them(run_cli, tmp_path: Path) -> None:
    recipe = tmp_path / "short.yaml"
    recipe.write_text("model: {bits: 2}\n")
    refused(run_cli("fit", "--config", recipe), "model.path", "data.calibration", "data.evaluation")


def test_a_missing_recipe_is_named(run_cli, tmp_path: Path) -> None:
    refused(run_cli("fit", "--config", tmp_path / "none.yaml"), "none.yaml")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("model.bits", value) for value in ("0", "9", "2.5", "-2", "two")],
        *[("model.group_size", value) for value in ("-1", "0", "32.5")],
        ("model.units", "[experts]"),
        ("model.num_blocks", "0"),
        ("model.refinement.lr", "0"),
        ("data.batch_size", "0"),
        ("data.seq_len", "-8"),
    ],
)
def test_an_impossible_value_is_refused(toy, run_cli, key: str, value: str) -> None:
    refused(run_cli("fit", "--config", toy.recipe, f"--{key}={value}", "--run_dir", "nowhere"), key)
    assert not Path("nowhere").exists()


@pytest.mark.parametrize("value", ["1", "ternary", "2", "3", "4"])
def test_the_bits_of_all_grids_are_taken(toy, run_cli, value: str) -> None:
    outcome = run_cli("fit", "--config", toy.recipe, "--model.bits", value, "--print_config")
    assert outcome.status == 0
    assert re.search(rf"^  bits: {value}$", outcome.out, re.MULTILINE)


def help_texts(text: str) -> dict[str, str]:
    """First line of help by option, without the type and the default that jsonargparse adds."""
    found = re.findall(r"^  --(\S+)[^\n]*?(?:\n {10,}| {2,})(.*)$", text, flags=re.MULTILINE)
    return {key: re.sub(r"\((required, )?type:.*", "", line) for key, line in found}


@pytest.mark.parametrize("command", ["fit", "export", "evaluate"])
def test_help_documents_every_key(run_cli, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    outcome = run_cli(command, "--help")
    assert outcome.status == 0
    texts = help_texts(outcome.out)
    keys = {"run_dir", "export_dir", "reload_max_gib"}
    keys |= {f"model.{name}" for name in inspect.signature(GSQModule).parameters}
    keys |= {f"model.refinement.{field.name}" for field in dataclasses.fields(Refinement)}
    keys |= {f"data.{name}" for name in inspect.signature(CalibrationData).parameters}
    if command == "evaluate":
        keys |= {"checkpoint", "whole_model"}
    assert sorted(keys - texts.keys()) == []
    assert [key for key in sorted(keys) if len(texts[key].split()) < 3] == []


def test_help_of_the_text_sources_documents_every_argument(run_cli) -> None:
    outcome = run_cli("fit", "--data.calibration.help", "gsq_module.data.HubDataset")
    assert outcome.status == 0
    for text in ("Repository such as", "Configuration, such as", "Read at most this many rows"):
        assert text in " ".join(outcome.out.split())
