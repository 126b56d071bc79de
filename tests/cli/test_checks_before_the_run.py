"""What is refused after parsing, before any weight is touched: messages with key, value and remedy, exit status 2."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from toy_models import family, save

from gsq_module.streaming.module_weights import ModuleWeights


@pytest.fixture
def fit_refused(toy, run_cli, tmp_path: Path):
    """Run fit with overrides in a fresh run directory; it must stop with a message."""

    def run(*overrides: str) -> str:
        run_dir = tmp_path / "refused"
        outcome = run_cli("fit", "--config", toy.recipe, "--run_dir", run_dir, *overrides)
        assert outcome.status == 2
        assert not run_dir.exists(), "a refused command leaves nothing behind"
        assert "Traceback" not in outcome.err
        return outcome.error

    return run


@pytest.mark.usefixtures("no_model")
class TestWithoutTheModel:
    @pytest.mark.parametrize("through", ["folder", "link", "below", "above"])
    def test_an_export_into_the_model_is_refused(self, toy, fit_refused, tmp_path: Path, through: str) -> None:
        before = {path: path.read_bytes() for path in toy.model.iterdir()}
        link = tmp_path / "link"
        link.symlink_to(toy.model)
        target = {"folder": toy.model, "link": link, "below": link / "export", "above": toy.folder}[through]
        assert str(toy.model) in fit_refused("--export_dir", str(target))
        assert {path: path.read_bytes() for path in toy.model.iterdir()} == before

    def test_an_export_over_a_folder_of_the_user_is_refused(self, fit_refused, tmp_path: Path) -> None:
        mine = tmp_path / "mine"
        mine.mkdir()
        (mine / "thesis.txt").write_text("years of work")
        assert str(mine) in fit_refused("--export_dir", str(mine))
        assert (mine / "thesis.txt").read_text() == "years of work"

    def test_contradictory_microbatches_are_refused(self, fit_refused) -> None:
        error = fit_refused("--trainer.accumulate_grad_batches", "1", "--data.microbatch_size", "3")
        assert "data.microbatch_size=3" in error
        error = fit_refused("--trainer.accumulate_grad_batches", "2", "--data.microbatch_size", "1")
        assert "trainer.accumulate_grad_batches=2" in error
        assert "data.batch_size=4" in error
        error = fit_refused("--trainer.accumulate_grad_batches", "3")
        assert "trainer.accumulate_grad_batches=3" in error

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("max_epochs", "3"),
            ("max_steps", "10"),
            ("max_time", "00:01:00:00"),
            ("limit_train_batches", "1"),
            ("fast_dev_run", "true"),
        ],
    )
    def test_limits_of_the_trainer_are_refused(self, fit_refused, key: str, value: str) -> None:
        error = fit_refused(f"--trainer.{key}", value)
        assert f"trainer.{key}=" in error
        assert "model.refinement.epochs" in error

    def test_a_precision_of_the_trainer_is_refused(self, fit_refused) -> None:
        assert "model.dtype" in fit_refused("--trainer.precision", "bf16-mixed")

    def test_samples_that_devices_cannot_share_are_refused(self, fit_refused) -> None:
        devices = ("--trainer.devices", "2")
        error = fit_refused(*devices, "--data.validation_samples", "1", "--data.gptq_samples", "1")
        assert "data.validation_samples: 1 samples cannot be shared by 2 devices" in error
        assert "data.gptq_samples: 1 samples cannot be shared by 2 devices" in error
        assert "data.batch_size: 3 is not a multiple of 2 devices" in fit_refused(*devices, "--data.batch_size", "3")

    @pytest.mark.parametrize("strategy", ["ddp_fork", "ddp_spawn"])
    def test_a_strategy_that_cannot_carry_a_run_is_refused(self, fit_refused, strategy: str) -> None:
        error = fit_refused("--trainer.devices", "2", "--trainer.strategy", strategy, "--trainer.accelerator", "cpu")
        assert "trainer.strategy: " in error
        assert "ddp or sharded" in error

    def test_several_problems_are_shown_at_once(self, fit_refused, tmp_path: Path) -> None:
        lost, text = tmp_path / "lost", tmp_path / "lost.txt"
        error = fit_refused(
            *("--model.path", str(lost)),
            *("--data.calibration.init_args.paths", f"[{text}]"),
            *("--data.batch_size", "20"),
            *("--data.evaluation_seq_len", "1"),
        )
        for part in (f"model.path='{lost}'", f"data.calibration: TextFiles.paths: nothing to read from {text}"):
            assert part in error
        for key in ("data.batch_size: 20", "data.evaluation_seq_len: 1"):
            assert key in error

    def test_a_name_that_is_neither_folder_nor_repository_is_refused(self, fit_refused) -> None:
        assert "model.path='llama'" in fit_refused("--model.path", "llama")

    @pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
    def test_a_device_that_is_not_there_is_refused(self, fit_refused) -> None:
        assert "CUDA" in fit_refused("--trainer.accelerator", "cuda")

    def test_a_run_directory_that_cannot_be_made_is_refused(self, toy, run_cli) -> None:
        outcome = run_cli("fit", "--config", toy.recipe, "--run_dir", toy.text / "run")
        assert outcome.status == 2
        assert f"run_dir='{toy.text}/run'" in outcome.error
        assert "--run_dir" in outcome.error

    def test_another_run_in_the_directory_names_the_fields(self, toy, run_cli, toy_run: Path) -> None:
        before = {path: path.read_bytes() for path in toy_run.rglob("*") if path.is_file()}
        outcome = run_cli(
            *("fit", "--config", toy.recipe, "--run_dir", toy_run),
            *("--model.bits", "3", "--model.refinement.lr", "0.5", "--data.seed", "7", "--data.pin_memory", "false"),
        )
        assert outcome.status == 2
        listed = {line.split(":")[0].strip(): line for line in outcome.error.splitlines() if line.startswith("  ")}
        assert set(listed) == {"model.bits", "model.refinement.lr", "data.seed"}
        assert "2 there, 3 now" in listed["model.bits"]
        assert "--run_dir" in outcome.error
        assert {path: path.read_bytes() for path in toy_run.rglob("*") if path.is_file()} == before

    @pytest.mark.parametrize("damage", ["gone", "empty", "cut", "flipped"])
    def test_a_lost_fingerprint_does_not_pass_for_agreement(self, toy, run_cli, toy_run: Path, damage: str) -> None:
        file = toy_run / "fingerprint.json"
        whole = file.read_text()
        if damage == "gone":
            file.unlink()
        else:
            file.write_text(
                {"empty": "", "cut": whole[:40], "flipped": whole.replace("model.bits", "modem.bits")}[damage]
            )
        outcome = run_cli("fit", "--config", toy.recipe, "--run_dir", toy_run)
        assert outcome.status == 2
        assert f"{file} is {'damaged' if damage in ('cut', 'flipped') else 'missing or empty'}" in outcome.error
        assert "--run_dir" in outcome.error


class TestWithTheModelsGeometry:
    """These need config.json or the tokenizer, and still no weight."""

    @pytest.fixture(autouse=True)
    def no_weights(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def loaded(*args, **kwargs) -> None:
            raise AssertionError("weights were loaded")

        monkeypatch.setattr(ModuleWeights, "load", loaded)

    def refused(self, outcome) -> str:
        assert outcome.status == 2
        assert "Traceback" not in outcome.err
        return outcome.error

    def test_a_group_size_that_does_not_divide_lists_the_layers(self, toy, run_cli, tmp_path: Path) -> None:
        run = ("fit", "--config", toy.recipe, "--run_dir", tmp_path / "run")
        error = self.refused(run_cli(*run, "--model.group_size", "64"))
        assert "model.group_size=64" in error
        for layer in ("model.layers.0.mlp.gate_proj", "model.layers.1.mlp.up_proj"):
            assert layer in error
        assert "down_proj" not in error, "its 64 inputs are one group"

    def test_more_blocks_than_there_are_is_refused(self, toy, run_cli, tmp_path: Path) -> None:
        run = ("fit", "--config", toy.recipe, "--run_dir", tmp_path / "run")
        assert "model.num_blocks=3" in self.refused(run_cli(*run, "--model.num_blocks", "3"))

    def test_too_little_text_says_what_would_be_enough(self, toy, run_cli, tmp_path: Path) -> None:
        run = ("fit", "--config", toy.recipe, "--run_dir", tmp_path / "run")
        error = self.refused(run_cli(*run, "--data.train_samples", "1000"))
        assert "data.calibration (train_samples=1000" in error
        assert "16,128" in error  # (1000 + 4 + 4) x 16 tokens

    @pytest.mark.parametrize(
        "command", [("fit",), ("plan", "--memory", "12GiB"), ("evaluate", "--checkpoint", "original")]
    )
    def test_a_config_that_is_cut_off_is_named(self, toy, run_cli, tmp_path: Path, command: tuple[str, ...]) -> None:
        broken = Path(shutil.copytree(toy.model, tmp_path / "broken"))
        file = broken / "config.json"
        file.write_text(file.read_text()[:40])
        run = (*command, "--config", toy.recipe, "--run_dir", tmp_path / "run", "--model.path", broken)
        error = self.refused(run_cli(*run))
        assert f"{file} is cut off or no JSON" in error
        assert "Next: " in error

    def test_a_model_without_tokenizer_says_so(self, toy, run_cli, tmp_path: Path) -> None:
        bare = Path(shutil.copytree(toy.model, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*")))
        run = ("fit", "--config", toy.recipe, "--run_dir", tmp_path / "run")
        error = self.refused(run_cli(*run, "--model.path", bare))
        assert f"the tokenizer of {bare}" in error
        assert "tokenizer.json" in error


@pytest.mark.parametrize("name", ["qwen3_5", "qwen2", "gemma3"])
@pytest.mark.parametrize("command", ["fit", "evaluate --checkpoint original"])
def test_a_tokenizer_that_transformers_makes_up_is_none(toy, run_cli, tmp_path: Path, name: str, command: str) -> None:
    """Of these families it needs no file for one, which then turns every text into nothing."""
    bare = save(family(name, num_hidden_layers=1), tmp_path / "bare")
    for file in bare.glob("tokenizer*"):
        file.unlink()
    run = (*command.split(), "--config", toy.recipe, "--run_dir", tmp_path / "run")
    outcome = run_cli(*run, "--model.path", bare)
    assert outcome.status == 2
    assert f"the tokenizer of {bare} is missing" in outcome.error
    assert "tokenizer.json" in outcome.error
    assert "too little text" not in outcome.error


def test_the_run_directory_says_what_the_run_was(finished_toy) -> None:
    config = yaml.safe_load((finished_toy.run_dir / "config.yaml").read_text())
    assert config["model"]["path"] == str(finished_toy.model)
    assert config["model"]["refinement"]["final_lr_fraction"] == 0.1, "defaults are kept too"
    fingerprint = json.loads((finished_toy.run_dir / "fingerprint.json").read_text())
    assert fingerprint["model.bits"] == 2
    assert fingerprint["data.calibration.init_args.paths"] == [str(finished_toy.text)]
    assert not any(key.startswith("trainer.") for key in fingerprint)
