"""The benchmark runs everywhere, says what it left out, and its baseline computes what the product's optimizer does."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
from pathlib import Path

import bench
import logit_space
import pytest
import targets
import torch
from context import GRID, Bench, empty_student, initial_weights
from measure import Figure, Row, SkippedError
from rich.console import Console
from shapes import SHAPES

from gsq_module.module import Refinement
from gsq_module.quantization.grid import GRIDS
from gsq_module.quantization.noise import noise_key
from gsq_module.quantization.relaxation import Draw, gradient_chunk, probabilities

ROOT = Path(__file__).parents[2]
BATCHES = [str(batch) for batch in SHAPES["tiny"].batches]
STEPS = {f"{kind}, {batch}" for kind in ("fused", "eager", "logit-space autograd") for batch in BATCHES}


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory) -> tuple[str, dict]:
    """What the script prints and writes on a CPU, on the smallest shape."""
    out = tmp_path_factory.mktemp("bench") / "new" / "bench.json"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        status = bench.main(["--device", "cpu", "--shape", "tiny", "--targets", "--out", str(out)])
    assert status == 0, printed.getvalue()
    return printed.getvalue(), json.loads(out.read_text())


def rows_of(record: dict, part: str) -> dict[str, dict]:
    return {row["name"]: row for row in record["rows"] if row["part"] == part}


def test_every_part_is_measured_or_says_why_not(whole_run):
    printed, record = whole_run
    assert {row["part"] for row in record["rows"]} == set(bench.PARTS)
    assert set(rows_of(record, "step")) == STEPS
    assert set(rows_of(record, "floor")) == set(BATCHES)
    assert set(rows_of(record, "gptq")) == {"gate_proj 192 x 64", "down_proj 64 x 192"}
    for row in record["rows"]:
        assert row["failed"] is None
        needs_cuda = row["name"].startswith(("fused", "synchronizations"))
        assert (row["skipped"] is not None) == needs_cuda, row
        assert ("time" in row["figures"]) != needs_cuda, row
        assert row["name"].split(",")[0] in printed
    assert "skipped: the kernels need CUDA" in printed
    assert "skipped: peak memory" in printed
    assert "--targets: not applicable" in printed
    assert "qwen3.6-27b" in record["targets"]


def test_figures_have_units_and_agree(whole_run):
    _, record = whole_run
    for row in record["rows"]:
        for figure in row["figures"].values():
            assert set(figure) == {"value", "unit"}
            assert figure["unit"]
            assert row["part"] == "lightning" or figure["value"] > 0
    floors = {name: row["figures"]["time"]["value"] for name, row in rows_of(record, "floor").items()}
    for name, row in rows_of(record, "step").items():
        if row["skipped"] is None:
            batch = name.split(", ", 1)[1]
            assert row["figures"]["ratio_to_floor"]["value"] == pytest.approx(
                row["figures"]["time"]["value"] / floors[batch]
            )
    for name, batch in zip(BATCHES, SHAPES["tiny"].batches, strict=True):
        rate = rows_of(record, "floor")[name]["figures"]["forward"]["value"] * 1e12
        assert floors[name] == pytest.approx(6 * record["shape"]["weights"] * batch.tokens / rate * 1e3)


def test_the_record_says_what_was_measured_on(whole_run):
    _, record = whole_run
    facts = record["machine"]
    assert "CPU" in facts["device"]
    assert facts["memory_gib"] > 0
    assert facts["torch"] == torch.__version__
    assert {"triton", "lightning", "transformers", "git_commit", "date"} <= set(facts)
    assert record["shape"]["weights"] == 3 * 64 * 192


def test_a_part_that_fails_says_so_and_the_others_go_on(monkeypatch, capsys):
    def breaks(_):
        def fill(row: Row) -> None:
            raise torch.OutOfMemoryError("no [memory] left\nand more")

        def skip(row: Row) -> None:
            raise SkippedError("not here")

        yield "one", fill
        yield "two", skip

    def works(_):
        yield "three", lambda row: row.figures.update(time=Figure(1.0, "ms"))

    monkeypatch.setattr(bench, "PARTS", {"broken": breaks, "working": works})
    rows = bench.measure(Bench(SHAPES["tiny"], torch.device("cpu")), ["broken", "working"], Console(width=160))
    failed, skipped, filled = rows
    assert failed.failed == "OutOfMemoryError: no [memory] left"
    assert skipped.skipped == "not here"
    assert filled.figures["time"].value == 1.0
    Console(width=160).print(bench.table_of(rows, "title"))
    assert "failed: OutOfMemoryError: no [memory] left" in capsys.readouterr().out


def test_only_the_parts_asked_for_run_and_a_failure_is_the_exit_status(monkeypatch, tmp_path):
    def breaks(_):
        def fill(row: Row) -> None:
            raise RuntimeError("out of luck")

        yield "one", fill

    monkeypatch.setitem(bench.PARTS, "floor", breaks)
    arguments = ["--device", "cpu", "--shape", "tiny", "--out", str(tmp_path / "bench.json"), "--only"]
    assert bench.main([*arguments, "hessian"]) == 0
    assert bench.main([*arguments, "hessian", "floor"]) == 1
    record = json.loads((tmp_path / "bench.json").read_text())
    assert [row["part"] for row in record["rows"]] == ["hessian", "hessian", "floor"]
    assert record["rows"][-1]["failed"] == "RuntimeError: out of luck"


def test_limits_are_compared_figure_by_figure():
    """Also that every limit names a row that the benchmark makes."""
    shape = SHAPES[targets.SHAPE]
    on_cpu = Bench(shape, torch.device("cpu"))
    names = {(part, name) for part in bench.PARTS for name, _ in bench.PARTS[part](on_cpu)}
    assert {key[:2] for key in targets.LIMITS} <= names
    key = ("optimizer", "fused", "time")
    for value, passed in ((4.0, True), (4.1, False)):
        verdicts = targets.compare([Row("optimizer", "fused", {"time": Figure(value, "ms")})])
        assert {(v.part, v.name, v.figure): v.passed for v in verdicts} == dict.fromkeys(targets.LIMITS) | {key: passed}


def test_make_bench_passes_its_options_on():
    command = ["make", "--no-print-directory", "--dry-run", "--old-file=.venv/.installed", "bench", "ARGS=--only step"]
    # Below `make test`, make would take itself for a part of that.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == ".venv/bin/python benchmarks/bench.py --only step"
    ignored = subprocess.run(["git", "check-ignore", "runs/bench.json"], cwd=ROOT, capture_output=True, check=False)
    assert ignored.returncode == 0, "the default output is not to be committed"


@pytest.mark.parametrize("bits", [1, "ternary", 2])
def test_the_baseline_and_the_relaxed_weight_have_the_same_gradients(bits):
    """Backward through logits, against dL/dweight and the chain rule written out (design.md, "The one idea")."""
    grid, rows, cols, groups = GRIDS[bits], 6, 32, 4
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(grid.num_candidates, rows, cols, generator=random, dtype=torch.float64) / 100
    scales = torch.rand(rows, groups, generator=random, dtype=torch.float64) + 0.5
    first = torch.full((rows, cols), grid.low, dtype=torch.int8)
    draw = Draw(noise_key(0, "weight"), 0.7, 90.0)
    # At temperature 1 and without logits the probabilities are softmax(noise): their logarithm is the draw's noise.
    noise = probabilities(torch.zeros_like(logits), draw._replace(temperature=1.0), 0).log()
    values = torch.arange(grid.low, grid.high + 1, grid.step, dtype=torch.float64).view(-1, 1, 1)

    logits.requires_grad_(True)
    scales.requires_grad_(True)
    weight = logit_space.soft_weight(logits, scales, values, noise, draw.temperature, draw.logit_scale)
    weight.retain_grad()
    inputs = torch.randn(16, cols, generator=random, dtype=torch.float64)
    torch.tanh(inputs @ weight.T).square().sum().backward()

    logit_grad, scale_grad = gradient_chunk(weight.grad, logits.detach(), scales.detach(), first, grid, draw, 0)
    assert logits.grad.abs().max() > 1e-3
    torch.testing.assert_close(logit_grad, logits.grad)
    torch.testing.assert_close(scale_grad, scales.grad)


def test_the_baseline_accumulates_microbatches_and_takes_lions_step(monkeypatch):
    """A step moves every logit by the learning rate (after decay): the first update is the gradient's sign."""
    shape, device = SHAPES["tiny"], torch.device("cpu")
    settings = Refinement(logit_dtype="float32", weight_decay=0.0)
    student = empty_student(shape, "meta", torch.float32)
    monkeypatch.setattr(logit_space, "gumbel_like", lambda logits: torch.zeros_like(logits))

    def moved(batches):
        unit = logit_space.LogitSpaceStep(student, initial_weights(shape, device), device, GRID, settings)
        before = {name: logits.detach().clone() for name, logits in unit.logits.items()}
        unit(batches)
        return {name: logits.detach() - before[name] for name, logits in unit.logits.items()}

    random = torch.Generator().manual_seed(0)
    inputs, labels = (torch.randn(4, 8, shape.hidden, generator=random) for _ in range(2))
    whole = moved([(inputs, labels)])
    halves = moved([(inputs[:2], labels[:2]), (inputs[2:], labels[2:])])
    for name, step in whole.items():
        assert step.abs().max() == pytest.approx(settings.lr, rel=1e-3), name
        agreement = torch.isclose(step, halves[name], atol=settings.lr / 100).double().mean()
        assert agreement > 0.999, name
