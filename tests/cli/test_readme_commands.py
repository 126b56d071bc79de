"""The README's commands go through the real parser, and what it says is there is there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
COMMAND = re.compile(r"^\.venv/bin/python recipes/run\.py (.*)$", re.MULTILINE)
COMMANDS = COMMAND.findall(README.replace("\\\n", " "))
OVERRIDES = re.findall(r"^\| `(--[^`]*)` \|", README, re.MULTILINE)

pytestmark = pytest.mark.usefixtures("no_model")


def test_commands_were_found() -> None:
    assert len(COMMANDS) >= 8
    assert len(OVERRIDES) >= 8


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_parses(run_cli, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.chdir(ROOT)
    outcome = run_cli(*shlex.split(command, comments=True), "--print_config")
    assert outcome.status == 0, outcome.err


def test_the_overrides_parse_together(run_cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    args = [arg for override in OVERRIDES for arg in shlex.split(override)]
    outcome = run_cli("fit", "--config", "recipes/qwen3_8b.yaml", *args, "--print_config")
    assert outcome.status == 0, outcome.err


def test_the_layout_names_what_is_there() -> None:
    tree = README.partition("## Layout")[2].split("```")[1]
    names = re.findall(r"[\w/]+\.py\b|[\w]+/(?= )", tree)
    assert len(names) >= 15
    folders = [ROOT, ROOT / "gsq_module", ROOT / "recipes"]
    assert [name for name in names if not any((folder / name).exists() for folder in folders)] == []
    listed = set(names)
    modules = {path.name for path in (ROOT / "gsq_module").glob("*.py") if not path.name.startswith("__")}
    packages = {f"{path.parent.name}/" for path in (ROOT / "gsq_module").glob("*/__init__.py")}
    assert (modules | packages) - listed == set()
