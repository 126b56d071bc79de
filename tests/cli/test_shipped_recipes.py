"""Every shipped recipe goes through the real parser, with the commands its own header shows."""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from gsq_module.fingerprint import FREE_FIELDS

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
CARDS = sorted((ROOT / "recipes" / "cards").glob("*.yaml"))
COMMAND = "recipes/run.py "

pytestmark = pytest.mark.usefixtures("no_model")

each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)


def header(recipe: Path) -> dict[str, str]:
    """The paragraphs of the comment that a recipe opens with, by their first word."""
    paragraphs: dict[str, str] = {}
    for line in recipe.read_text().splitlines():
        if not line.startswith("#"):
            break
        word = re.match(r"# (\w+) {2,}", line)
        if word:
            paragraphs[word[1]] = line[word.end() :]
        elif paragraphs:
            paragraphs[list(paragraphs)[-1]] += " " + line.lstrip("# ")
    return paragraphs


def missing(wanted: Any, found: Any, key: str = "") -> list[str]:
    """Keys of a recipe that the parsed configuration lacks or has other values for."""
    if isinstance(wanted, dict):
        if not isinstance(found, dict):
            return [key]
        return [bad for name in wanted for bad in missing(wanted[name], found.get(name, "absent"), f"{key}.{name}")]
    if isinstance(wanted, list) and isinstance(found, list) and len(wanted) == len(found):
        return [bad for i in range(len(wanted)) for bad in missing(wanted[i], found[i], f"{key}[{i}]")]
    same = math.isclose(wanted, found) if isinstance(wanted, float) else wanted == found
    return [] if same else [key]


def test_the_recipes_are_there() -> None:
    assert {path.stem for path in RECIPES} >= {"smollm2_quickstart", "llama31_8b", "qwen3_8b", "qwen36_27b"}


@each_recipe
def test_the_parser_takes_every_key(recipe: Path, run_cli) -> None:
    outcome = run_cli("fit", "--config", recipe, "--print_config")
    assert outcome.status == 0, outcome.err
    written = yaml.safe_load(recipe.read_text())
    assert missing(written, yaml.safe_load(outcome.out)) == []
    assert written["run_dir"].startswith("runs/"), "two recipes in one folder would refuse each other"


@pytest.mark.parametrize("card", CARDS, ids=lambda path: path.stem)
@each_recipe
def test_a_cards_file_behind_a_recipe_changes_what_it_names_and_nothing_that_shapes_the_result(
    card: Path, recipe: Path, run_cli
) -> None:
    found = [
        yaml.safe_load(run_cli("fit", *configs, "--print_config").out)
        for configs in (("--config", recipe), ("--config", recipe, "--config", card))
    ]
    changes = yaml.safe_load(card.read_text())
    assert missing(changes, found[1]) == []
    for section, keys in changes.items():
        assert {f"{section}.{key}" for key in keys} <= set(FREE_FIELDS)
        for key in keys:
            found[0][section].pop(key)
            found[1][section].pop(key)
    assert found[0] == found[1]


def test_run_directories_differ() -> None:
    folders = [yaml.safe_load(recipe.read_text())["run_dir"] for recipe in RECIPES]
    assert len(set(folders)) == len(folders)


@each_recipe
def test_the_header_says_what_it_takes_and_its_commands_parse(recipe: Path, run_cli, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    paragraphs = header(recipe)
    assert list(paragraphs) == ["Makes", "Needs", "Run", "Override"]
    plain = f"fit --config {recipe.relative_to(ROOT).as_posix()}"
    run, override = paragraphs["Run"], paragraphs["Override"]
    assert run.endswith(COMMAND + plain) or run.startswith("make ")
    # In full, or as "... --key value": the command above with more options.
    _, in_full, options = override.partition(COMMAND + plain)
    if not in_full:
        options = override.partition("... ")[2]
    assert options.strip().startswith("--")
    for args in ([], shlex.split(options)):
        outcome = run_cli(*plain.split(), *args, "--print_config")
        assert outcome.status == 0, outcome.err


@each_recipe
def test_the_lines_for_wandb_parse_when_uncommented(recipe: Path, run_cli, tmp_path: Path) -> None:
    text = recipe.read_text()
    if "# logger:" not in text:
        pytest.skip("shows no W&B lines")
    before, _, block = text.partition("  # logger:\n")
    uncommented = re.sub(r"^  # ", "  ", "  # logger:\n" + block, flags=re.MULTILINE)
    changed = tmp_path / "with_wandb.yaml"
    changed.write_text(before + uncommented)
    outcome = run_cli("fit", "--config", changed, "--print_config")
    assert outcome.status == 0, outcome.err
    logger = yaml.safe_load(outcome.out)["trainer"]["logger"]
    assert logger["class_path"].endswith("WandbLogger")
    run_dir = yaml.safe_load(text)["run_dir"]
    assert logger["init_args"]["save_dir"] == run_dir, "nothing is written outside of the run directory"
    assert logger["init_args"]["id"], "without one a resumed run becomes a second W&B run"
