"""`run.py plan` of checkpoints that are a config.json and nothing else, and what it says beside what a run holds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from toy_models import ToyModel, family, open_streamed, save

from gsq_module import planning
from gsq_module.data import CalibrationData, TextFiles
from gsq_module.geometry import find_units
from gsq_module.memory.plan import MemoryPlan
from gsq_module.memory.working_set import WorkingSet
from gsq_module.module import GSQModule
from gsq_module.planning import plan_run
from gsq_module.quantization.training_ops import accumulating_in_place, squared_error
from gsq_module.streaming.units import Branch, catch, trace_units

SEQ_LEN, MICROBATCH, FORWARD_BATCH = 64, 2, 4
BOTH = ["attention", "mlp"]
GEOMETRY = {
    "llama": [(0, 1, 2)],
    "qwen3": [(0, 1, 2)],
    "gemma3": [(0, 1, 2)],
    "qwen3_5": [(0, 2), (1,)],  # linear attention, full attention
}
"""Blocks of a kind, by family."""


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A toy checkpoint of a family, weights included, in bfloat16."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = save(family(name), tmp_path_factory.mktemp(name), torch.bfloat16)
        return made[name]

    return folder


@pytest.fixture(scope="session")
def bare(checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder with a family's config.json and nothing else."""

    def folder(name: str) -> Path:
        folder = tmp_path_factory.mktemp(f"bare_{name}")
        (folder / "config.json").write_bytes((checkpoint(name) / "config.json").read_bytes())
        return folder

    return folder


@pytest.fixture
def plan(toy, run_cli, bare, tmp_path: Path) -> Callable[..., Any]:
    """Plan the toy Llama: `plan("--memory", "12GiB", ...)`."""

    def run(*options: str) -> Any:
        outcome = run_cli(
            *("plan", "--config", toy.recipe, "--model.path", bare("llama"), "--run_dir", tmp_path / "run"),
            *("--model.units", "[attention,mlp]", "--data.seq_len", SEQ_LEN, *options),
        )
        assert not (tmp_path / "run").exists(), "a plan writes nothing"
        return outcome

    return run


def plan_of(folder: Path, recipe: dict[str, Any] | None = None, gib: float = 12, **changes: Any) -> MemoryPlan:
    """For a GPU with so much memory; `recipe` is of the model section, `changes` of the data section or of plan_run."""
    text = TextFiles(["unread.txt"])
    run = {name: changes.pop(name) for name in ("world_size", "strategy") if name in changes}
    changes = {"seq_len": SEQ_LEN, "evaluation_samples": 4, "train_samples": 16} | changes
    data = CalibrationData(
        text, {"words": text}, batch_size=8, microbatch_size=MICROBATCH, forward_batch_size=FORWARD_BATCH, **changes
    )
    module = GSQModule("unused", group_size=32, **recipe or {})
    return plan_run(folder, module, data, torch.device("cuda"), int(gib * 2**30), reload_max_gib=4, **run)


@pytest.fixture(scope="session")
def planned(bare) -> Callable[[str], MemoryPlan]:
    """The plan of a family's config.json, made once."""
    made: dict[str, MemoryPlan] = {}

    def plan(name: str) -> MemoryPlan:
        if name not in made:
            made[name] = plan_of(bare(name))
        return made[name]

    return plan


@pytest.mark.usefixtures("no_model")
class TestCommand:
    def test_a_run_that_fits(self, plan, tmp_path: Path) -> None:
        outcome = plan("--memory", "12GiB", "--json", str(tmp_path / "new" / "plan.json"))
        assert outcome.status == 0, outcome.err
        shown, made = outcome.out, outcome.cli.memory_plan
        assert "Peak device memory by stage" in shown
        for stage in {s.stage for s in made.stages}:
            assert stage in shown
        assert "by number of devices and strategy" in shown
        assert "sharded" in shown
        verdict = next(line for line in shown.splitlines() if line.startswith("12.00 GiB free: "))
        assert "fits: needs" in verdict
        assert "does not fit" not in verdict
        found = json.loads((tmp_path / "new" / "plan.json").read_text())
        assert found["fits"] is True
        assert (found["free"], found["needed"]) == (12 * 2**30, made.needed)
        assert [row["stage"] for row in found["stages"]] == [s.stage for s in made.stages]
        assert found["job"]["seq_len"] == SEQ_LEN

    def test_a_run_that_does_not_fit_says_what_would_help(self, plan) -> None:
        outcome = plan("--memory", "100MiB", "--model.refinement.logit_dtype", "float32")
        assert outcome.status == 0, outcome.err
        lines, made = outcome.out.splitlines(), outcome.cli.memory_plan
        verdict = next(n for n, line in enumerate(lines) if line.startswith("100.00 MiB free: does not fit: needs"))
        assert f"({made.tightest.stage}, block 0" in lines[verdict]
        found = lines[verdict + 1 :]
        assert len(found) == len(made.remedies(made.tightest.stage)) > 0
        assert all(line.startswith("  --") and line.endswith(" less") for line in found)

    def test_without_memory_and_gpu_it_asks(self, toy, run_cli, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        outcome = run_cli("plan", "--config", toy.recipe)
        assert outcome.status == 2
        assert "--memory" in outcome.error
        assert "12GiB" in outcome.error

    def test_without_memory_the_gpu_is_asked(self, plan, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = set()

        def mem_get_info(device: torch.device) -> tuple[int, int]:
            asked.add(device.type)
            return 7 * 2**30, 8 * 2**30

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2**20)
        shown = plan().out
        assert asked == {"cuda"}
        # the question has made this process's context, which the run would count again
        line = next(line for line in shown.splitlines() if " free: fits" in line)
        assert 7.0 < float(line.split(" GiB free")[0]) < 8.0

    def test_what_is_no_size_is_refused(self, toy, run_cli) -> None:
        outcome = run_cli("plan", "--config", toy.recipe, "--memory", "12Gigs")
        assert outcome.status == 2
        assert "--memory='12Gigs'" in outcome.error
        assert "12GiB" in outcome.error

    def test_a_number_that_lacks_its_unit_is_refused(self, toy, run_cli) -> None:
        outcome = run_cli("plan", "--config", toy.recipe, "--memory", "12")
        assert outcome.status == 2
        assert "--memory='12'" in outcome.error
        assert "12GiB" in outcome.error

    def test_a_folder_without_config_is_refused(self, toy, run_cli, tmp_path: Path) -> None:
        outcome = run_cli("plan", "--config", toy.recipe, "--model.path", tmp_path, "--memory", "12GiB")
        assert outcome.status == 2
        assert f"{tmp_path} has no config.json" in outcome.error


@pytest.mark.parametrize("name", GEOMETRY)
class TestFamilies:
    def test_geometry(self, planned, checkpoint, name: str) -> None:
        made, model = planned(name), open_streamed(checkpoint(name))
        assert [kind.indices for kind in made.blocks] == GEOMETRY[name]
        recipe = GSQModule("unused")
        for kind in made.blocks:
            block = model.blocks[kind.indices[0]]
            assert kind.nbytes >= 2 * sum(p.numel() for p in block.parameters())
            for one, unit in zip(kind.units, find_units(model, kind.indices[0], recipe), strict=True):
                assert one.kind == unit.kind
                assert one.linears == tuple(tuple(linear.weight.shape) for linear in unit.linears.values())
                # one for what comes into the unit, one for what goes into its last linear
                assert sorted(one.hessians) == sorted((one.linears[0][1], one.linears[-1][1]))
        job = made.job
        assert (job.microbatch, job.forward_batch) == (MICROBATCH, FORWARD_BATCH)
        assert (job.itemsize, job.store_itemsize, job.store) == (2, 2, "device")
        assert job.model_bytes == 2 * sum(p.numel() for p in model.model.parameters())

    def test_every_stage_has_a_prediction(self, planned, name: str) -> None:
        made = planned(name)
        for kind in made.blocks:
            for index in kind.indices:
                assert all(made.predicted(s, index, None) for s in ("original", "propagate"))
                assert all(made.predicted(s, index, u) for s in ("capture", "initialize", "refine") for u in BOTH)
        assert all(made.predicted(s, None, None) for s in ("embed", "evaluate", "reload"))

    def test_refinement_holds_what_autograd_holds(self, planned, checkpoint, name: str) -> None:
        """The unit as the run refines it, post-norm included, on real tensors of the dtype that a GPU computes in."""
        made = planned(name)
        for kind in made.blocks:
            measured = working_sets(checkpoint(name), kind.indices[0])
            ratios = {unit.kind: round(unit.training / measured[unit.kind], 3) for unit in kind.units}
            # 7%: what the plan promises. Attention kernels differ in what they keep.
            assert all(0.93 <= ratio <= 1.07 for ratio in ratios.values()), (kind.indices, ratios)

    def test_blocks_are_called_as_in_the_run(self, planned, checkpoint, name: str) -> None:
        """A mask that the run has no need of is of the square of the sequence's length."""
        made, model = planned(name), open_streamed(checkpoint(name), torch.bfloat16)
        calls = [model.record_calls(size, SEQ_LEN) for size in (MICROBATCH, FORWARD_BATCH)]
        for kind in made.blocks:
            tensors = [tensor for call in calls for tensor in call[kind.indices[0]].tensors()]
            assert kind.calls <= sum(tensor.nbytes for tensor in tensors), [tuple(t.shape) for t in tensors]


def working_sets(folder: Path, index: int) -> dict[str, int]:
    """Bytes at the height of a later microbatch's pass through each unit of a block, beside the gradients."""
    model = open_streamed(folder, torch.bfloat16)
    call = model.record_calls(MICROBATCH, SEQ_LEN)[index]
    block = model.load_block(index)
    units = find_units(model, index, GSQModule("unused"))
    hidden, target = torch.randn(2, MICROBATCH, SEQ_LEN, model.hidden_size, dtype=torch.bfloat16)
    trace_units(block, call, hidden, units)
    found = {}
    for unit in units:
        caught = catch(block, call, hidden, unit, with_branch=False)
        assert caught.call is not None
        student = Branch(unit, {MICROBATCH: caught.call}).requires_grad_(False)
        for linear in unit.linears.values():
            linear.weight.requires_grad_(True)
        with WorkingSet() as working_set, accumulating_in_place(student.modules()):
            squared_error(student(caught.inputs), target).backward()
            gradients = working_set.current
            working_set.reset()
            squared_error(student(caught.inputs), target).backward()
        assert gradients == sum(linear.weight.nbytes for linear in unit.linears.values())
        found[unit.kind] = working_set.peak - gradients
        student.requires_grad_(False)
    return found


class Chain(nn.ModuleList):
    """Each input is gone when its linear has been called, as those of low-rank projections are."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        for linear in self:
            hidden_states = linear(torch.relu(hidden_states))
        return hidden_states


class TestFigures:
    def test_only_the_blocks_and_units_of_the_recipe(self, bare) -> None:
        made = plan_of(bare("llama"), {"num_blocks": 1, "units": ["mlp"]}, gib=1 / 1024, gptq_samples=4)
        assert [kind.indices for kind in made.blocks] == [(0,)]
        assert {s.unit for s in made.stages} == {None, "mlp"}
        assert made.job.store == "memory", "on a device as small as that, auto does not mean the device"
        assert made.store_bytes == (3 + 1) * (16 + 32 + 4) * SEQ_LEN * 64 * 2

    def test_hidden_states_of_evaluation_count_where_they_lie(self, planned, bare) -> None:
        """Evaluation keeps them on the device where they take little of it, whatever model.store says."""
        few, many = planned("llama"), plan_of(bare("llama"), evaluation_samples=4004)
        more = 4000 * SEQ_LEN * 64 * 2
        assert many.predicted("evaluate", None, None) - few.predicted("evaluate", None, None) == more

    def test_the_disk_holds_quantized_weights_packed_and_not_in_float(self, planned, checkpoint) -> None:
        made, model = planned("llama"), open_streamed(checkpoint("llama"))
        units = [u for index in range(3) for u in find_units(model, index, GSQModule("unused"))]
        quantized = sum(linear.weight.numel() for unit in units for linear in unit.linears.values())
        total = sum(p.numel() for p in model.model.parameters())
        packed = quantized // 4 + quantized // 32 * 2
        # refined and initial shards, and the export
        assert made.disk_bytes == 3 * packed + 2 * (total - quantized)

    def test_a_comparison_of_devices_is_what_a_plan_for_them_says(self, bare) -> None:
        """Data-parallel ranks hold a second gradient of a weight for a moment, which a single device does not."""
        mlp = {"units": ["mlp"]}
        compared = plan_of(bare("llama"), mlp, seq_len=8).changed(world_size=2, strategy="ddp")
        planned = plan_of(bare("llama"), mlp, seq_len=8, world_size=2, strategy="ddp")
        assert compared.blocks[0].units[0].training == planned.blocks[0].units[0].training

    def test_linears_share_a_hessian_only_where_they_are_given_the_same_tensor(self, bare, monkeypatch) -> None:
        """Not where one tensor comes to lie, or gets the id, where another was that is gone."""
        with torch.device("meta"):
            tree = ToyModel()
            for block in tree.model.layers:
                block.mlp = Chain(nn.Linear(64, 64, bias=False) for _ in range(50))
        monkeypatch.setattr(planning, "meta_model", lambda folder: tree)
        made = plan_of(bare("llama"), {"units": ["mlp"], "dtype": "float32"})
        assert made.blocks[0].units[0].hessians == (64,) * 50


@pytest.mark.parametrize(
    ("options", "strategy"),
    [
        (["--trainer.devices=1"], "single"),
        (["--trainer.devices=2"], "sharded"),
        (["--trainer.devices=1", "--trainer.num_nodes=2"], "sharded"),
        (["--trainer.devices=2", "--trainer.strategy=ddp"], "ddp"),
    ],
)
def test_several_devices_share_what_is_behind_the_weights_unless_told_otherwise(
    options, strategy, toy, run_cli, tmp_path: Path
) -> None:
    """Of the strategies it is the one whose plan needs least."""
    outcome = run_cli("plan", "--config", toy.recipe, "--memory", "1GiB", "--run_dir", tmp_path / "run", *options)
    assert outcome.status == 0, outcome.err
    plan = outcome.cli.memory_plan
    assert plan.job.strategy == strategy
    if plan.job.world_size > 1:
        others = {name: plan.changed(strategy=name).needed for name in ("ddp", "sharded")}
        assert others["sharded"] == min(others.values())
