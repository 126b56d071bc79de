"""`evaluate --tasks`: the harness is an extra, and is called with the checkpoint that was measured."""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace
from typing import Any

import pytest

ABSENT = importlib.util.find_spec("lm_eval") is None


@pytest.mark.usefixtures("no_model")
@pytest.mark.skipif(not ABSENT, reason="lm-evaluation-harness is installed")
def test_without_the_extra_it_says_how_to_get_it_before_anything_loads(toy, run_cli) -> None:
    outcome = run_cli("evaluate", "--config", toy.recipe, "--tasks", "arc_easy")
    assert outcome.status == 2
    assert "pip install 'gsq-recipes[eval]'" in outcome.error


def test_the_harness_gets_the_export_and_its_figures_are_shown(finished_toy, run_cli, monkeypatch) -> None:
    asked: dict[str, Any] = {}

    def simple_evaluate(**arguments: Any) -> dict[str, Any]:
        asked.update(arguments)
        return {"results": {"arc_easy": {"alias": "arc_easy", "acc,none": 0.5, "sample_len": 20}}}

    harness = SimpleNamespace(simple_evaluate=simple_evaluate, __spec__=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "lm_eval", harness)
    outcome = run_cli("evaluate", "--config", finished_toy.recipe, "--tasks", "arc_easy, piqa")
    assert outcome.status == 0, outcome.err
    assert asked["tasks"] == ["arc_easy", "piqa"]
    assert asked["model_args"] == {"pretrained": str(finished_toy.run_dir / "export"), "dtype": "float32"}
    assert outcome.cli.task_results == {"arc_easy": {"acc,none": 0.5}}
    assert "arc_easy: acc,none 0.5000" in outcome.out
