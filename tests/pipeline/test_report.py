"""The report of a run: complete, one file, nothing from a network."""

from __future__ import annotations

import base64
import json
import runpy
import subprocess
import sys
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image
from toy_runs import BARE, run, summary_of, toy_checkpoint, write_recipe

from gsq_module.report.page import PICTURES, write_report
from gsq_module.report.record import Record

SECTIONS = {"figures", *PICTURES, "coverage", "continuations"}
ON_A_GPU = {"memory_by_stage", "memory_over_time"}


class Page(HTMLParser):
    """Sections by id, with their text and pictures; refuses what a browser would fetch."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.text: dict[str, str] = {}
        self.pictures: dict[str, Image.Image] = {}
        content = file.read_text()
        assert "http" not in content
        self.feed(content)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "iframe", "object")
        values = dict(attrs)
        if tag == "section":
            self.section = values["id"]
            self.text[self.section] = ""
        if tag == "img":
            kind, _, data = values["src"].partition(",")
            assert kind == "data:image/png;base64"
            picture = Image.open(BytesIO(base64.b64decode(data, validate=True)))
            picture.load()
            assert len(picture.convert("RGB").getcolors(1 << 24)) > 20, "an empty picture"
            self.pictures[self.section] = picture

    def handle_data(self, data: str) -> None:
        if hasattr(self, "section"):
            self.text[self.section] += data


@pytest.fixture(scope="module")
def finished(llama, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["run.py"])
        run(llama, folder / "run")
    return folder / "run"


def test_a_run_ends_with_a_whole_report(finished):
    page, summary = Page(finished / "report" / "index.html"), summary_of(finished)
    assert set(page.text) == SECTIONS
    assert set(page.pictures) == SECTIONS - ON_A_GPU - {"figures", "coverage", "continuations"}
    for name in ON_A_GPU:
        assert "CPU" in page.text[name], "why there is no picture"
    for model, value in summary["perplexity"].items():
        assert model in page.text["figures"]
        assert f"{value:.2f}" in page.text["figures"]
    assert f"{summary['kl_divergence_by_text']['held_out']['quantized']:.4f}" in page.text["figures"]
    assert f"{summary['top1_agreement_by_text']['held_out']['quantized']:.1%}" in page.text["figures"]
    for reason in summary["coverage"]["float_parameters"]:
        assert reason in page.text["coverage"]
    assert len(summary["continuations"]) == 4
    for row in summary["continuations"]:
        assert row["original"].split()
        for column in ("prompt", "original", "quantized"):
            assert row[column] in page.text["continuations"]


def test_loss_curves_are_cut_where_units_end(finished):
    curves = Record.of(finished).loss_curves()
    assert [block for block, _, _ in curves] == [0, 0, 1, 1]
    for _, steps, values in curves:
        assert steps == list(range(16))
        assert all(value > 0 for value in values)


def test_a_run_on_a_gpu_shows_its_memory(finished, tmp_path):
    """Of a record as a GPU leaves it, its log cut off; what another logger has written beside it is not the run's."""
    summary = summary_of(finished)
    summary["peak_memory"]["device_bytes_by_stage"] = {"refine": 5 << 30, "capture": 2 << 30}
    summary["peak_memory"]["predicted_bytes_by_stage"] = {"refine": 6 << 30, "capture": 2 << 30, "reload": 1 << 30}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    for version in (0, 1):
        (tmp_path / "metrics" / f"version_{version}").mkdir(parents=True)
        rows = [f"{step},{4 + step / 10},{5 + step / 10}" for step in range(0, 100, 10)]
        text = "\n".join(["step,memory/allocated_gib,memory/peak_allocated_gib", *rows, "100,4."])
        (tmp_path / "metrics" / f"version_{version}" / "metrics.csv").write_text(text)
    page = Page(write_report(tmp_path))
    assert set(page.pictures) >= ON_A_GPU
    steps, _ = Record.of(tmp_path).series("memory/allocated_gib")
    assert steps == list(range(0, 100, 10)), "each step once, whichever session has logged it"


def test_embedding_head_and_final_pass_are_shown(finished, tmp_path):
    assert "final pass" not in Page(finished / "report" / "index.html").text["figures"]
    checkpoint = toy_checkpoint(tmp_path / "checkpoint")
    options = ("--model.embedding_bits=4", "--model.head_bits=4", "--model.final_pass.epochs=1")
    run(write_recipe(tmp_path, checkpoint), tmp_path / "run", *options, "--model.refinement.epochs=0")
    page, summary = Page(tmp_path / "run" / "report" / "index.html"), summary_of(tmp_path / "run")
    tuned, (embedding, head) = summary["final_pass"], summary["outer"]
    text = page.text["figures"]
    assert f"{tuned['before']:.4f} -> {tuned['after']:.4f}" in text
    assert f"embedding: relative error {embedding['initial_error']:.6f}" in text
    assert f"{head['refined_error']:.6f} by GPTQ" in text
    assert len(summary["continuations"]) == 4, "an export with a packed embedding is loaded whole"


def test_what_texts_say_is_no_markup(finished, tmp_path):
    summary = summary_of(finished)
    summary["continuations"] = [{"text": "t", "prompt": "<script>", "original": "<b>a", "quantized": "&amp;"}]
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    page = Page(write_report(tmp_path))
    assert "<script>" in page.text["continuations"]
    assert "&amp;" in page.text["continuations"]


def test_without_a_whole_reload_there_are_no_continuations(llama, tmp_path):
    run(llama, tmp_path / "run", *BARE, "--model.refinement.epochs=0")
    page = Page(tmp_path / "run" / "report" / "index.html")
    assert "reload_max_gib" in page.text["continuations"]
    assert "losses" not in page.pictures


@pytest.mark.slow
def test_it_can_be_written_again(finished, tmp_path):
    file = finished / "report" / "index.html"
    before = file.read_bytes()
    file.unlink()
    command = [sys.executable, "-m", "gsq_module.report"]
    subprocess.run([*command, str(finished)], check=True)
    assert file.read_bytes() == before
    failed = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, check=False)
    assert failed.returncode == 1
    assert "Run fit first" in failed.stderr


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("", "is empty, cut off or no JSON"),
        ('{"units": [', "is empty, cut off or no JSON"),
        ("{}", "perplexity_by_text"),
        ("[]", "perplexity_by_text"),
        ('{"accuracy": 0.9, "seconds": 3}', "seconds.total"),
    ],
)
def test_a_summary_that_is_none_is_named(content, what, tmp_path, monkeypatch):
    file = tmp_path / "summary.json"
    file.write_text(content)
    monkeypatch.setattr(sys, "argv", ["report", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("gsq_module.report", run_name="__main__")
    message = str(ended.value.code)
    assert message.startswith(f"error: {file} is ")
    assert what in message
    assert "Next: the same fit again" in message
    assert not (tmp_path / "report").exists()


def test_a_summary_of_another_shape_is_named(finished, tmp_path):
    summary = summary_of(finished) | {"units": 3}
    del summary["peak_memory"]["host_bytes"]
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(ValueError, match=r"not the summary of a run: units, peak_memory\.host_bytes missing"):
        write_report(tmp_path)
