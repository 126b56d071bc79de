"""The plan of one MLP of Qwen3.6-27B, term by term against a calculation by hand; what the plan says of it."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from gsq_module.memory.plan import MemoryPlan
from gsq_module.memory.plan_report import as_dict, compare_devices, label, parse_bytes, remedies, render, verdict
from gsq_module.memory.sizes import BlockShape, Job, UnitShape
from gsq_module.memory.statistics import format_bytes

MIB, GIB = 2**20, 2**30
HIDDEN, INTERMEDIATE, SEQ_LEN, SAMPLES = 5120, 17408, 1024, 1000
WEIGHTS = 3 * HIDDEN * INTERMEDIATE  # 267M
STATE = 1000 * HIDDEN * 2 * SEQ_LEN  # all samples once, in bfloat16
ROW = SEQ_LEN * HIDDEN * 2  # a sequence's hidden states in bfloat16
TRAINING, VALIDATION = 400 * MIB, 150 * MIB  # of a microbatch of one
FORWARD, CAPTURE = 600 * MIB, 580 * MIB  # of four sequences
CALLS = 3 * MIB


def unit(microbatch=1, forward_batch=4, **changes):
    fields = {
        "kind": "mlp",
        "linears": ((INTERMEDIATE, HIDDEN), (INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)),
        "hessians": (HIDDEN, INTERMEDIATE),  # gate and up share one
        "nbytes": 2 * WEIGHTS,
        "capture": CAPTURE * forward_batch // 4,
        "training": TRAINING * microbatch,
        "validation": VALIDATION * microbatch,
    }
    return UnitShape(**(fields | changes))


def plan(blocks=None, **changes):
    """The plan of a job made anew: working sets follow the batches by themselves."""
    job = Job(
        hidden_size=HIDDEN, itemsize=2, store_itemsize=2, vocabulary_bytes=2 * GIB, head_bytes=2 * GIB,
        vocabulary=248320, seq_len=SEQ_LEN, evaluation_seq_len=SEQ_LEN, microbatch=1, shares_batch=False,
        forward_batch=4, samples=SAMPLES, evaluation_samples=64, candidates=4, windowed=False, group_size=128,
        evaluation_store="memory", expandable_segments=True, measure_initial=False,
        logit_itemsize=2, storage_bits=2, fused=True, gptq=True, original_stream=True, cached=True,
        store="memory", world_size=1, strategy="single", model_bytes=50 * GIB, reload=False, float_bytes=5 * GIB,
        final_pass=False, whole_bytes=49 * GIB,
    )  # fmt: skip
    job = replace(job, **changes)
    forward, mlp = FORWARD * job.forward_batch // 4, unit(job.microbatch, job.forward_batch)
    block = BlockShape((0, 1, 2), 2 * WEIGHTS + 100 * MIB, CALLS, forward, (mlp,))
    return MemoryPlan(job, (block,) if blocks is None else blocks)


def stage(made, name, kind="mlp", block=0):
    (found,) = [s for s in made.stages if (s.stage, s.block, s.unit) == (name, block, kind)]
    return found


def peak(made, name):
    return max(s.allocated for s in made.stages if s.stage == name)


class TestTerms:
    def test_refinement(self):
        terms = stage(plan(), "refine").terms
        assert terms["logits and momentum"] == 16 * WEIGHTS  # 4 candidates, twice, 2 bytes
        assert terms["gradient"] == 2 * WEIGHTS
        assert terms["scales"] == 2 * 4 * WEIGHTS // 128
        assert terms["block"] == 2 * WEIGHTS + 100 * MIB
        assert terms["calls"] == CALLS
        assert terms["working set"] == TRAINING
        assert terms["candidates"] == 0
        assert "original unit" not in terms
        batches = 4 * ROW  # inputs and targets, of this microbatch and the next
        known = 20 * WEIGHTS + 100 * MIB + CALLS + TRAINING + WEIGHTS // 16 + batches
        assert stage(plan(), "refine").allocated == known + terms["cuBLAS"] + terms["stores"]
        assert terms["stores"] == 0
        assert 0 < terms["cuBLAS"] < 128 * MIB

    def test_what_the_recipe_changes_in_it(self):
        now = stage(plan(), "refine").allocated
        assert stage(plan(logit_itemsize=4), "refine").allocated - now == 16 * WEIGHTS
        # one more candidate, and a byte that says where the window begins
        assert stage(plan(candidates=5, windowed=True), "refine").allocated - now == 5 * WEIGHTS
        assert now - stage(plan(candidates=2), "refine").allocated == 8 * WEIGHTS
        assert stage(plan(microbatch=3), "refine").allocated - now == 2 * (TRAINING + 4 * ROW)
        # targets by the original unit: its weights stay; from the stream they are made of what is stored
        again = {"cached": False, "original_stream": False}
        assert stage(plan(**again), "refine").allocated - now == 2 * WEIGHTS
        assert stage(plan(cached=False), "refine").allocated == now
        assert stage(plan(group_size=64), "refine").allocated - now == WEIGHTS // 16

    def test_hard_weights_or_chunks_of_logits_may_be_higher_than_a_step(self):
        # so many candidates' worth of a large validation that it stands above the training step
        shape = unit(training=0, validation=20 * GIB)
        made = plan((BlockShape((0,), 2 * WEIGHTS, 0, FORWARD, (shape,)),))
        terms = stage(made, "refine").terms
        assert terms["working set"] == 20 * GIB
        assert "gradient" not in terms
        assert "logits and momentum" not in terms
        shape = unit(training=0, validation=0)
        fused, eager = (
            plan((BlockShape((0,), 2 * WEIGHTS, 0, FORWARD, (shape,)),), fused=fused) for fused in (True, False)
        )
        assert stage(fused, "refine").terms["logits and momentum"] == 16 * WEIGHTS
        assert stage(eager, "refine").allocated > stage(fused, "refine").allocated, "an eager step has temporaries"

    def test_hessians_and_their_factorization(self):
        capture, initialize = stage(plan(), "capture").terms, stage(plan(), "initialize").terms
        assert capture["Hessians"] == 4 * (HIDDEN**2 + INTERMEDIATE**2)
        assert capture["working set"] == CAPTURE
        # of the last linear: its Hessian goes once it has been read, and codes go to the host
        assert initialize["Hessians"] == 0
        assert initialize["factorization"] == 2 * 4 * INTERMEDIATE**2
        known = 2 * WEIGHTS + 100 * MIB + CALLS + 2 * 4 * INTERMEDIATE**2
        assert stage(plan(), "initialize").allocated == known + initialize["cuBLAS"]
        rounded = plan(gptq=False)
        assert stage(rounded, "capture").terms.get("Hessians", 0) == 0
        assert "factorization" not in stage(rounded, "initialize").terms
        assert stage(rounded, "initialize").allocated < stage(plan(), "initialize").allocated

    def test_the_weights_copies_count_where_they_are_more_than_the_factorization(self):
        wide = unit(linears=((100_000, HIDDEN),), hessians=(HIDDEN,))
        made = plan((BlockShape((0,), 2 * WEIGHTS, 0, FORWARD, (wide,)),))
        terms = stage(made, "initialize").terms
        assert "factorization" not in terms
        assert terms["factor"] == 4 * HIDDEN**2
        assert terms["weight"] >= 4 * 100_000 * HIDDEN

    def test_targets_are_made_in_float32_of_a_forward_batch(self):
        made = plan((BlockShape((0,), 2 * WEIGHTS, 0, 0, (unit(capture=0),)),), gptq=False)
        # goal, residual, target and its square
        assert stage(made, "capture").terms["targets"] == 4 * 4 * 2 * ROW

    def test_the_final_pass_has_both_models_on_the_device(self):
        assert all(stage.stage != "final_pass" for stage in plan().stages)
        terms = stage(plan(final_pass=True), "final_pass", None, None).terms
        assert terms["original model"] == 49 * GIB
        assert terms["codes"] == WEIGHTS * len(plan().blocks[0].indices)
        assert terms["rest in float"] == 49 * GIB - 2 * terms["codes"]
        remedies = plan(final_pass=True).remedies("final_pass")
        assert any(text.startswith("--model.final_pass.epochs 0") for text, _ in remedies)

    def test_embedding_head_and_a_whole_reload(self):
        made = plan(reload=True)
        embed, evaluate, reload = (stage(made, name, None, None).terms for name in ("embed", "evaluate", "reload"))
        assert embed["embedding"] == 2 * GIB
        assert evaluate["embedding"] == 2 * GIB, "the way to the first block is the highest"
        rows = 2**28 // HIDDEN  # of the head at once
        heads = stage(plan(vocabulary_bytes=0, head_bytes=20 * GIB), "evaluate", None, None).terms
        assert heads["head"] == 20 * GIB * rows // 248320
        assert heads["logits"] == 256 * rows * 3 * 4  # of both models, and what their divergence takes
        assert reload["model"] == 50 * GIB
        assert reload["logits"] == SEQ_LEN * 248320 * 2 * 4
        small = plan(vocabulary_bytes=0, head_bytes=0, vocabulary=97)
        assert stage(small, "evaluate", None, None).terms["working set"] == FORWARD, "a block may be the highest"

    def test_stores_on_the_device_count_everywhere_in_the_block_loop(self):
        # the quantized stream, inputs, targets; the original stream and a unit's goal
        stores = 4 * STATE
        here, there = plan(store="device"), plan(store="memory")
        for s in here.stages:
            assert s.terms.get("stores", 0) == (stores if s.stage != "evaluate" else 0), s
        assert all(s.terms.get("stores", 0) == 0 for s in there.stages)
        assert stage(plan(store="device", cached=False), "refine").terms["stores"] == 3 * STATE
        assert stage(plan(store="device", original_stream=False), "refine").terms["stores"] == 3 * STATE
        # no copies are under way
        saved = {s: peak(there, s) - peak(here, s) + stores for s in ("propagate", "refine")}
        assert saved == {"propagate": 2 * 4 * ROW, "refine": 2 * ROW}


class TestStages:
    @pytest.mark.parametrize("original_stream", [True, False])
    @pytest.mark.parametrize("reload", [True, False])
    def test_every_stage_of_the_clock_is_there(self, original_stream, reload):
        expected: list[tuple] = [("embed", None, None)]
        for block in (0, 3):
            expected += [("original", block, None)] * original_stream
            for kind in ("attention", "mlp"):
                expected += [(name, block, kind) for name in ("capture", "initialize", "refine")]
            expected.append(("propagate", block, None))
        expected += [("evaluate", None, None)] + [("reload", None, None)] * reload
        made = plan(two_kinds(), original_stream=original_stream, reload=reload)
        assert [(s.stage, s.block, s.unit) for s in made.stages] == expected

    def test_a_prediction_is_that_of_the_blocks_kind(self):
        made = plan(two_kinds())
        for name, kind in [("original", None), ("capture", "mlp"), ("refine", "attention"), ("propagate", None)]:
            first, other = stage(made, name, kind, 0).allocated, stage(made, name, kind, 3).allocated
            assert first != other
            assert [made.predicted(name, block, kind) for block in range(5)] == [first] * 3 + [other, first]
        assert made.predicted("embed", None, None) == stage(made, "embed", None, None).allocated
        assert made.predicted("evaluate", None, None) == stage(made, "evaluate", None, None).allocated

    def test_what_is_not_in_the_plan_has_no_prediction(self):
        made = plan(two_kinds())
        for where in [("export", None, None), ("reload", None, None), ("refine", 5, "mlp"), ("refine", 0, "other")]:
            assert made.predicted(*where) is None, where
        assert made.predicted("refine", None, None) is None

    def test_evaluation_is_of_the_largest_block(self):
        made = plan(two_kinds(), vocabulary_bytes=0, head_bytes=0, vocabulary=97)
        assert stage(made, "evaluate", None, None).terms["block"] == 5 * WEIGHTS

    def test_what_the_device_needs_is_the_tightest_and_what_is_no_tensor(self):
        made = plan()
        assert made.tightest.allocated == max(s.allocated for s in made.stages)
        assert made.needed == made.device_bytes(made.tightest.allocated) > made.tightest.allocated + made.overhead
        assert all(made.device_bytes(s.allocated) <= made.needed for s in made.stages)
        assert 256 * MIB < made.overhead < GIB
        # a second process brings NCCL's buffers: 0.4-0.7 GiB by field-notes.md
        assert 0.4 * GIB <= plan(world_size=2, strategy="ddp").overhead - made.overhead <= 0.9 * GIB

    def test_host_and_disk(self):
        made = plan()
        on_device = plan(store="device", evaluation_store="device")
        assert made.store_bytes == 4 * STATE
        assert made.host_bytes - on_device.host_bytes == 4 * STATE
        # the original's evaluation states are kept, but not on the device
        on_disk, kept = plan(store="disk", evaluation_store="disk"), made.evaluation_store_bytes
        assert on_device.host_bytes - on_disk.host_bytes == kept > 0
        assert on_disk.disk_bytes - plan(store="disk").disk_bytes == kept
        assert plan(store="disk").disk_bytes - made.disk_bytes == 4 * STATE
        # evaluation's states are never there together with calibration's: the larger count
        only = plan(store="device", evaluation_samples=64)
        assert only.host_bytes - on_device.host_bytes == made.evaluation_store_bytes < 4 * STATE
        # three blocks of 2-bit codes and half-precision scales, as shards and as the export; the rest of the weights
        shards = 3 * (WEIGHTS // 4 + WEIGHTS // 128 * 2)
        assert made.disk_bytes == 2 * shards + 5 * GIB
        assert plan(measure_initial=True).disk_bytes == 3 * shards + 5 * GIB
        assert plan(final_pass=True).disk_bytes == 3 * shards + 5 * GIB
        several = [
            plan(store=store, evaluation_store=store, world_size=2, strategy="ddp") for store in ("disk", "memory")
        ]
        assert several[0].disk_bytes - several[1].disk_bytes == 2 * (
            several[0].store_bytes + several[0].evaluation_store_bytes
        )


def two_kinds():
    """Blocks 0, 1, 2, 4 of one kind, the larger block 3 of another."""
    small, large = unit(kind="attention", linears=((HIDDEN, HIDDEN),), hessians=(HIDDEN,)), unit()
    other = replace(small, linears=((3 * HIDDEN, HIDDEN),))
    return (
        BlockShape((0, 1, 2, 4), 3 * WEIGHTS, CALLS, FORWARD, (small, large)),
        BlockShape((3,), 5 * WEIGHTS, CALLS, 2 * FORWARD, (other, replace(large, training=2 * TRAINING))),
    )


class TestDevices:
    def test_ranks_share_the_state_only_where_it_is_sharded(self):
        single, ddp = plan(), plan(world_size=4, strategy="ddp")
        sharded = plan(world_size=4, strategy="sharded")
        terms = stage(sharded, "refine").terms
        assert terms["logits and momentum"] == 16 * WEIGHTS // 4
        assert terms["scales"] == 2 * 4 * WEIGHTS // 128 // 4
        assert terms["gradient"] >= 2 * WEIGHTS // 4
        assert sharded.needed < single.needed <= ddp.needed
        assert stage(sharded, "refine").allocated < stage(single, "refine").allocated

    def test_the_comparison_is_of_plans(self):
        rows = {(row["devices"], row["strategy"]): row for row in compare_devices(plan())}
        assert list(rows) == [(1, "single"), *((n, s) for n in (2, 4, 8) for s in ("ddp", "sharded"))]
        for (devices, strategy), row in rows.items():
            other = plan(world_size=devices, strategy=strategy)
            assert row["needed"] == other.needed
            assert row["tensors"] == other.tightest.allocated
            assert row["tightest"] == label(other.tightest)
            if devices > 1:
                assert rows[1, "single"]["needed"] <= rows[devices, "ddp"]["needed"]
                assert rows[devices, "sharded"]["needed"] < rows[1, "single"]["needed"]

    def test_a_batch_that_is_shared_gets_smaller_and_a_microbatch_does_not(self):
        shared, kept = (compare_devices(plan(microbatch=4, shares_batch=shares)) for shares in (True, False))
        for row, other in zip(shared, kept, strict=True):
            ranks = {"world_size": row["devices"], "strategy": row["strategy"]}
            assert row["needed"] == plan(microbatch=max(1, 4 // row["devices"]), **ranks).needed
            assert other["needed"] == plan(microbatch=4, **ranks).needed

    def test_the_comparison_does_not_depend_on_where_it_starts(self):
        """A recipe without microbatch_size: four ranks hold two sequences each, one holds eight."""
        of_one = compare_devices(plan(microbatch=8, shares_batch=True))
        of_four = compare_devices(plan(microbatch=2, shares_batch=True, world_size=4, strategy="ddp"))
        assert of_four == of_one


class TestRemedies:
    CHANGES = {  # noqa: RUF012
        "--data.microbatch_size 1": {"microbatch": 1},
        "--data.forward_batch_size 1": {"forward_batch": 1},
        "--model.store memory": {"store": "memory"},
        "--model.targets recomputed": {"cached": False},
        "--model.targets cached": {"cached": True},
        "--model.refinement.logit_dtype bfloat16": {"logit_itemsize": 2},
        "--model.initializer rtn": {"gptq": False},
        "--reload_max_gib 0": {"reload": False},
        "--model.bits 2": {"candidates": 4, "windowed": False},
    }
    WASTEFUL = {  # noqa: RUF012
        "microbatch": 4, "store": "device", "logit_itemsize": 4, "reload": True, "candidates": 5, "windowed": True
    }  # fmt: skip

    @pytest.mark.parametrize("job", [WASTEFUL, WASTEFUL | {"original_stream": False, "cached": False}, {}])
    @pytest.mark.parametrize("name", ["embed", "capture", "initialize", "refine", "propagate", "evaluate", "reload"])
    def test_each_saves_what_it_claims_and_none_is_left_out(self, job, name):
        now = plan(**job)
        found = now.remedies(name)
        assert [saved for _, saved in found] == sorted((saved for _, saved in found), reverse=True)
        claimed = {text.partition(" (")[0]: saved for text, saved in found}
        for text, changes in self.CHANGES.items():
            then = plan(**(job | changes))
            before, after = ([s.allocated for s in p.stages if s.stage == name] for p in (now, then))
            saved = max(before, default=0) - max(after, default=0)
            assert claimed.get(text, 0) == max(0, saved), text
        assert claimed.keys() <= self.CHANGES.keys()

    def test_what_helps_at_which_stage(self):
        def texts(name, **job):
            return {text.partition(" (")[0] for text, _ in plan(**(self.WASTEFUL | job)).remedies(name)}

        assert texts("refine") == {
            "--data.microbatch_size 1", "--model.store memory", "--model.targets recomputed",
            "--model.refinement.logit_dtype bfloat16", "--model.bits 2",
        }  # fmt: skip
        assert {"--model.initializer rtn", "--model.store memory"} <= texts("initialize")
        assert "--data.forward_batch_size 1" in texts("propagate")
        assert texts("reload") == {"--reload_max_gib 0"}
        assert "--model.targets cached" in texts("refine", original_stream=False, cached=False, store="memory")
        assert plan().remedies("refine") == []

    def test_they_are_told_for_the_tightest_stage_with_their_sizes(self):
        made = plan(logit_itemsize=4, microbatch=2)
        assert made.tightest.stage == "refine"
        assert remedies(made) == [
            "--model.refinement.logit_dtype bfloat16 (another result, so another run_dir): "
            f"{format_bytes(16 * WEIGHTS)} less",
            f"--data.microbatch_size 1: {format_bytes(TRAINING + 4 * ROW)} less",
        ]


class TestReport:
    def test_the_verdict(self):
        made = plan()
        fits, text = verdict(made, made.needed)
        assert fits
        assert text.startswith(f"fits: needs {format_bytes(made.needed)} ")
        assert f"(refine, block 0, mlp: {format_bytes(made.tightest.allocated)} of tensors" in text
        assert "0 B less than there is" in text
        assert "NCCL" not in text
        fits, text = verdict(made, made.needed - GIB)
        assert not fits
        assert text.startswith(f"does not fit: needs {format_bytes(made.needed)} ")
        assert "1.00 GiB more than there is" in text
        assert not verdict(made, made.needed - 1)[0]
        assert "NCCL" in verdict(plan(world_size=2, strategy="ddp"), 12 * GIB)[1]

    def test_as_json(self):
        made = plan(logit_itemsize=4)
        found = json.loads(json.dumps(as_dict(made, 4 * GIB)))
        assert (found["fits"], found["verdict"]) == verdict(made, 4 * GIB)
        assert (found["free"], found["needed"], found["overhead"]) == (4 * GIB, made.needed, made.overhead)
        assert (found["host"], found["disk"]) == (made.host_bytes, made.disk_bytes)
        assert len(found["stages"]) == len(made.stages)
        for row in found["stages"]:
            assert row["allocated"] == sum(row["terms"].values())
            assert row["allocated"] == made.predicted(row["stage"], row["block"], row["unit"])
        assert found["devices"] == compare_devices(made)
        assert [remedy["saves"] for remedy in found["remedies"]] == [saved for _, saved in made.remedies("refine")]
        assert found["job"]["hidden_size"] == HIDDEN

    def test_the_tables_name_every_stage(self):
        file, made = StringIO(), plan(reload=True)
        Console(file=file, width=200).print(render(made, 12 * GIB))
        shown = file.getvalue()
        for s in made.stages:
            assert label(s) in shown
            assert format_bytes(made.device_bytes(s.allocated)) in shown
        for devices, strategy in ((1, "single"), (2, "ddp"), (8, "sharded")):
            assert any(line.split()[1:4:2] == [str(devices), strategy] for line in shown.splitlines() if "│" in line)

    @pytest.mark.parametrize(
        ("text", "nbytes"),
        [
            ("12GiB", 12 * GIB), ("11.94 GiB", int(11.94 * GIB)), (" 12G ", 12 * GIB), ("12gb", 12 * GIB),
            ("8192MiB", 8 * GIB), ("0.5T", 512 * GIB), ("4k", 4096), ("8000000000", 8_000_000_000),
            ("512 B", 512), ("0B", 0),
        ],
    )  # fmt: skip
    def test_sizes_are_read(self, text, nbytes):
        assert parse_bytes(text) == nbytes

    @pytest.mark.parametrize(
        ("text", "meant"),
        [("12", "12GiB"), (" 11.94 ", "11.94GiB"), ("12288", "12288MiB"), ("12582912", "12582912KiB"), ("0", "0GiB")],
    )
    def test_a_number_that_lacks_its_unit_is_refused(self, text, meant):
        with pytest.raises(ValueError, match="without a unit") as caught:
            parse_bytes(text)
        assert f"--memory={text!r}" in str(caught.value)
        assert f"Give the unit: {meant} (or {text.strip()}B" in str(caught.value)

    @pytest.mark.parametrize("text", ["", "GiB", "12 Gigs", "-1GiB", "1e9", "12,5G", "nan", "12G 3", "0x10", "12.G"])
    def test_other_texts_are_refused_with_an_example(self, text):
        with pytest.raises(ValueError, match=r"--memory=.*12GiB") as caught:
            parse_bytes(text)
        assert repr(text) in str(caught.value)
