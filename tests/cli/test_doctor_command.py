"""`run.py doctor` needs no recipe; the allocator's policy comes before everything that could start CUDA."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gsq_module import cli, doctor
from gsq_module.memory.allocator import setting_in_force

ROOT = Path(__file__).parents[2]
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "GSQ_ALLOCATOR_POLICY")

pytestmark = pytest.mark.usefixtures("no_model", "unset")


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is set, as in a user's shell; what the command sets is gone after the test."""
    for name in ALLOCATOR:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> dict:
    """What the doctor says from now on, whatever the machine is."""
    report = {
        "versions": {"torch": "2.13.0"},
        "disk": {"run_dir_free_bytes": 3 * 2**30, "hub_cache": "/cache [full]"},
        "warnings": ["it is late", "it rains"],
    }
    monkeypatch.setattr(doctor, "diagnose", lambda run_dir: report | {"run_dir": str(run_dir)})
    return report


def test_without_a_recipe_it_prints_a_table_and_the_warnings_last(run_cli, report) -> None:
    outcome = run_cli("doctor")
    assert outcome.status == 0, outcome.err
    assert "run dir free" in outcome.out
    assert "3.00 GiB" in outcome.out
    assert "/cache [full]" in outcome.out  # no markup of rich's
    assert "runs/gsq" in outcome.out
    assert outcome.out.splitlines()[-2:] == ["warning: it is late", "warning: it rains"]


def test_json_is_the_whole_of_stdout(run_cli, report) -> None:
    outcome = run_cli("doctor", "--json", "--run_dir", "runs/mine")
    assert outcome.status == 0
    assert json.loads(outcome.out) == report | {"run_dir": "runs/mine"}


def test_an_unknown_option_is_named_with_status_2(run_cli, report) -> None:
    outcome = run_cli("doctor", "--jsonn")
    assert outcome.status == 2
    assert "jsonn" in outcome.error


def test_help_of_the_program_and_of_the_command_name_it(run_cli, report) -> None:
    outcome = run_cli("--help")
    assert outcome.status == 0
    assert "run.py doctor" in " ".join(outcome.out.split())
    outcome = run_cli("doctor", "--help")
    assert outcome.status == 0
    assert "--run_dir" in outcome.out
    assert "--json" in outcome.out


def test_the_readme_names_the_command() -> None:
    assert "recipes/run.py doctor" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize(("own", "origin"), [(None, "gsq-recipes"), ("max_split_size_mb:128", "user")])
def test_as_a_user_runs_it(own: str | None, origin: str, tmp_path: Path) -> None:
    environ = dict(os.environ) | ({"PYTORCH_ALLOC_CONF": own} if own else {})
    command = [sys.executable, "recipes/run.py", "doctor", "--json", "--run_dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    report = json.loads(done.stdout)
    assert report["disk"]["run_dir"] == str(tmp_path)
    assert origin in report["allocator"]["origin"]
    if own:
        assert report["allocator"]["text"] == own


def test_the_policy_is_in_force_before_the_cli_is_built(run_cli, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(cli, "GSQCLI", lambda args: seen.append(setting_in_force()))
    run_cli("fit", "--config", "none.yaml")
    (setting,) = seen
    assert setting.origin.startswith("set by gsq-recipes") or sys.platform != "linux"
    assert setting.expandable_segments is not setting.wsl or sys.platform != "linux"
