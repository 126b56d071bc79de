"""benchmarks/peers.py: environments, a peer that fails, rows, and what a peer hands back measured by our code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import peer_environments
import peer_job
import peers
import pytest
import torch
from accuracy_table import read_rows
from peer_environments import PeerError, call, last_error, make_environment
from safetensors.torch import load_file
from toy_benchmark import write_recipe

GROUP = 32


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write_recipe(tmp_path, epochs=3, batch_size=8, train=16, validation=2, gptq=4, evaluation=2)


def rounded(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """A peer of our own: each group rounded to 2^bits even steps."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    step = groups.abs().amax(-1, keepdim=True) / 2 ** (bits - 1)
    codes = (groups / step).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return (codes * step).flatten(1)


@pytest.fixture
def jobs(monkeypatch, tmp_path) -> list[dict]:
    """No environment is made, and jobs run in this process, by peers of our own; returns the jobs as they come."""
    seen: list[dict] = []

    def run_here(command: list[str], log: Path) -> None:
        job = json.loads(Path(command[-1]).read_text())
        seen.append(job)
        log.write_text("")
        Path(job["result"]).write_text(json.dumps(peer_job.run(job)))

    def make_none(peer: str, root: Path, share_torch: bool) -> Path:
        if peer == "gptqmodel":
            raise PeerError("ERROR: No matching distribution found for gptqmodel")
        return tmp_path / "python"

    def weights(job: dict) -> peer_job.Weights:
        if job["peer"] == "auto-round-alg-ext":
            raise PeerError("RuntimeError: no kernel for this")
        stored = load_file(Path(job["model"]) / "model.safetensors")
        return {name: rounded(stored[f"{name}.weight"], job["bits"]) for name in job["linears"]}

    monkeypatch.setattr(peers, "call", run_here)
    monkeypatch.setattr(peers, "make_environment", make_none)
    monkeypatch.setattr(peer_job, "PEERS", dict.fromkeys(peer_job.PEERS, weights))
    monkeypatch.setattr(peer_job, "version", lambda name: "1.0")
    monkeypatch.setattr(sys, "argv", ["peers"])
    return seen


def test_failing_peers_are_reported_and_the_others_go_on(recipe, out, jobs, capsys):
    common = [f"--config={recipe}", f"--out={out}", "--bits", "2", "3"]
    assert peers.main([*common, "--peers", "auto-round-alg-ext", "gptqmodel", "llmcompressor"]) == 1
    printed = capsys.readouterr().out
    assert "gptqmodel did not install: ERROR: No matching distribution found for gptqmodel" in printed
    assert "auto-round-alg-ext did not run at 2 bits: RuntimeError: no kernel for this" in printed
    assert "auto-round-alg-ext did not run at 3 bits: RuntimeError: no kernel for this" in printed
    rows = read_rows(out / "results.jsonl")
    assert [(row["method"], row["bits"]) for row in rows] == [("llmcompressor 1.0", "2"), ("llmcompressor 1.0", "3")]
    assert "| 2 | llmcompressor 1.0 |" in printed
    assert "| 3 | llmcompressor 1.0 |" in (out / "table.md").read_text()
    for row in rows:
        assert set(row["perplexity"]) == {"speeches", "python_topics", "wikipedia"}
        assert row["peak_host_bytes"] > 0
    assert rows[0]["kl_divergence"]["speeches"]["quantized"] > rows[1]["kl_divergence"]["speeches"]["quantized"] > 0
    assert not [path for path in (out / "jobs").iterdir() if path.is_dir() and "llmcompressor" in path.name]
    # what is finished is not run again
    jobs.clear()
    assert peers.main([*common, "--peers", "llmcompressor"]) == 0
    assert not jobs


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config=nowhere.yaml"], "--config nowhere.yaml: there is no such file"),
        (["--model.bitz=2"], "model.bitz"),
        (["--model.path=nowhere", "--model.gguf_file=null"], "nowhere"),
        (["--model.head_bits=8"], "model.embedding_bits, model.head_bits: peers quantize linears"),
    ],
)
def test_what_a_user_can_mend_is_said_before_anything_is_installed(words, message, recipe, out, jobs, capsys):
    with pytest.raises(SystemExit) as ended:
        peers.main([f"--config={recipe}", f"--out={out}", "--bits", "2", *words])
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.err.count("error:") == 1
    assert "environment" not in said.out
    assert not jobs


def test_a_job_has_the_recipes_linears_tokens_and_steps(recipe, out, jobs):
    shared = [f"--config={recipe}", f"--out={out}", "--bits", "2", "--peers", "llmcompressor"]
    assert peers.main([*shared, "--model.units", "[mlp]", "--seed", "7"]) == 0
    assert peers.main([*shared, "--model.units", "[attention,mlp]"]) == 0
    mlps, both = jobs
    assert sorted({name.rsplit(".", 1)[1] for name in mlps["linears"]}) == ["down_proj", "gate_proj", "up_proj"]
    assert len(mlps["linears"]) == 6
    assert len(both["linears"]) == 14
    assert set(mlps["linears"]) | set(mlps["others"]) == set(both["linears"]) | set(both["others"])
    assert not set(mlps["linears"]) & set(mlps["others"])
    assert (mlps["seed"], mlps["steps"], mlps["batch_size"], mlps["dtype"]) == (7, 6, 8, "float32")
    assert load_file(mlps["rows"])["rows"].shape == (16 + 4 + 2, 32), "all that the recipe reads"
    assert [row["seed"] for row in read_rows(out / "results.jsonl")] == [7, 0]


@pytest.fixture
def bench(recipe, out, monkeypatch) -> SimpleNamespace:
    monkeypatch.setattr(sys, "argv", ["peers"])
    run, model = peers.read_recipe([f"--config={recipe}", *peers.text_options(out / "texts")], out)
    original, figures = peers.measure_original(run, model)
    made = peers.Bench(run, model, "budget", [], out / "jobs")
    yield SimpleNamespace(bench=made, original=original, figures=figures, source=model.checkpoint.directory)
    original.close()


def test_weights_that_are_the_originals_measure_as_the_original(bench, tmp_path, monkeypatch):
    peer_job.write_checkpoint(bench.source, {}, tmp_path / "same")
    monkeypatch.setattr(peers, "check_levels", lambda *_: None)
    for text, figures in bench.bench.measure(tmp_path / "same", "2", bench.original).items():
        assert figures.perplexity == bench.figures[text].perplexity
        assert figures.kl_divergence == pytest.approx(0, abs=1e-9)
        assert figures.top1_agreement == 1


def test_weights_of_more_levels_than_codes_are_refused(bench, tmp_path):
    with pytest.raises(PeerError, match="different weights in one group of 32, where 4 codes are"):
        bench.bench.measure(bench.source, "2", bench.original)


def test_the_most_levels_of_a_group_are_counted():
    weight = torch.tensor([[0.0, 0.0, 1.0, 1.0], [0.5, 0.5, -1.0, 2.0]])
    assert peers.levels_used(weight, 2) == 2
    assert peers.levels_used(weight, 4) == 3
    assert peers.levels_used(weight[:1], 2) == 1


def test_a_checkpoint_gets_the_peers_weights_and_keeps_the_rest(bench, tmp_path):
    before = load_file(bench.source / "model.safetensors")
    changed = "model.layers.1.mlp.up_proj"
    peer_job.write_checkpoint(bench.source, {changed: torch.zeros(before[f"{changed}.weight"].shape)}, tmp_path / "new")
    after = load_file(tmp_path / "new" / "model.safetensors")
    assert after.keys() == before.keys()
    assert not after[f"{changed}.weight"].any()
    assert all(torch.equal(after[name], before[name]) for name in before if name != f"{changed}.weight")
    assert (tmp_path / "new" / "config.json").read_text() == (bench.source / "config.json").read_text()
    with pytest.raises(AssertionError, match="1 of 1 weights are not in"):
        peer_job.write_checkpoint(bench.source, {"model.layers.9.mlp.up_proj": torch.zeros(1)}, tmp_path / "wrong")


@pytest.fixture
def commands(monkeypatch) -> list[list[str]]:
    """Commands in the place of processes; one with `fails` in it ends with status 1."""
    seen: list[list[str]] = []

    def run(command, stdout, env, **_):
        seen.append(command)
        assert "PYTHONPATH" not in env
        assert env["HF_HUB_OFFLINE"] == "1"
        if command[1:3] == ["-m", "venv"]:
            (Path(command[-1]) / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages").mkdir(
                parents=True, exist_ok=True
            )
        if "fails" in command:
            stdout.write(b"working\nModuleNotFoundError: No module named 'peer'\nhint: see above\n")
            stdout.flush()
        return SimpleNamespace(returncode=int("fails" in command))

    monkeypatch.setenv("PYTHONPATH", "here")
    monkeypatch.setattr(subprocess, "run", run)
    return seen


def test_an_environment_is_made_once_for_its_pins(tmp_path, commands, monkeypatch):
    python = make_environment("auto-round-alg-ext", tmp_path, share_torch=True)
    folder = tmp_path / "env-auto-round"
    assert python == folder / "bin" / "python"
    pins = peer_environments.REQUIREMENTS / "peer-auto-round.txt"
    create, install = commands
    assert create == [sys.executable, "-m", "venv", "--clear", str(folder)]
    assert install[:4] == [str(python), "-m", "pip", "install"]
    assert install[-2:] == ["--requirement", str(pins)]
    (shared,) = folder.rglob("shared.pth")
    assert Path(shared.read_text().strip(), "torch").is_dir()
    make_environment("auto-round", tmp_path, share_torch=True)
    assert len(commands) == 2, "it is there already"
    make_environment("auto-round", tmp_path, share_torch=False)
    assert len(commands) == 4, "it is another one"


def test_every_peer_has_its_pins():
    for peer in peer_job.PEERS:
        name = peer_job.DISTRIBUTIONS.get(peer, peer)
        pins = (peer_environments.REQUIREMENTS / f"peer-{name}.txt").read_text()
        assert f"\n{name}==" in pins


def test_a_command_that_fails_says_its_own_last_word(tmp_path, commands):
    with pytest.raises(
        PeerError, match=r"^ModuleNotFoundError: No module named 'peer' \(exit status 1, see .*peer.log"
    ):
        call(["fails"], tmp_path / "peer.log")
    call(["works"], tmp_path / "peer.log")


def test_the_last_error_of_a_log():
    assert last_error("ERROR: first\nValueError: second\nhint: more above\n") == "ValueError: second"
    assert last_error("some\nKilled\n\n") == "Killed"
    assert last_error("") == "no output"
