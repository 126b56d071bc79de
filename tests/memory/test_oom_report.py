from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from gsq_module.memory.allocator_setting import AllocatorSetting
from gsq_module.memory.failure import DeviceState, Place, read_device_state
from gsq_module.memory.oom import Evidence, classify
from gsq_module.memory.report import build_report

GIB = 2**30
CUDA = torch.device("cuda", 1)
ON = AllocatorSetting("expandable_segments:True", "set by the user as PYTORCH_ALLOC_CONF", True, wsl=False)
OFF = AllocatorSetting("", "torch's default", False, wsl=False)
OOM = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 680.00 MiB. GPU 1 has a total capacity of 11.94 GiB of which 123.00 MiB is "
    "free. Including non-PyTorch memory, this process has 17179869184.00 GiB memory in use."
)
NOT_READY = RuntimeError("CUDA driver error: device not ready")
PLACE = Place(1, 2, CUDA, "refine", 3, "mlp", step=12, batch=("bfloat16 [1, 1024, 5120]",))
STATE = DeviceState(allocated=9 * GIB, reserved=10 * GIB, peak_allocated=9 * GIB, retries=4, free=GIB, total=12 * GIB)


class Plan:
    def predicted(self, stage, block, unit):
        assert (stage, block, unit) == ("refine", 3, "mlp")
        return 5 * GIB

    def remedies(self, stage):
        assert stage == "refine"
        return [("--data.microbatch_size 1", 1 * GIB), ("--model.store memory", 3 * GIB)]


class BrokenPlan:
    def predicted(self, stage, block, unit):
        raise KeyError(stage)

    remedies = predicted


def report_of(error, place=PLACE, state=STATE, setting=OFF, plan=None):
    verdict = classify(error, Evidence(state.free, state.total, setting))
    return build_report(error, verdict, place, state, setting, plan)


def remedy_texts(*args, **kwargs):
    return [remedy.text for remedy in report_of(*args, **kwargs).remedies]


@pytest.fixture
def cuda(monkeypatch):
    """CUDA's queries; any of them may be replaced by one that raises."""
    stats = {"allocated_bytes.all.current": 1, "reserved_bytes.all.current": 3, "allocated_bytes.all.peak": 2}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10, 100))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats | {"num_alloc_retries": 4})
    return lambda name, fake: monkeypatch.setattr(torch.cuda, name, fake)


def broken(*_):
    raise RuntimeError("CUDA driver error: device not ready\nmore lines")


class TestDeviceState:
    def test_all_figures(self, cuda):
        state = read_device_state(CUDA)
        assert state == DeviceState(allocated=1, reserved=3, peak_allocated=2, retries=4, free=10, total=100)
        assert state.others == 100 - 10 - 3

    def test_each_query_fails_alone(self, cuda):
        cuda("mem_get_info", broken)
        state = read_device_state(CUDA)
        assert (state.allocated, state.reserved, state.free, state.others) == (1, 3, None, None)
        assert state.note == "unavailable (RuntimeError: CUDA driver error: device not ready)"
        cuda("mem_get_info", lambda device: (10, 100))
        cuda("memory_stats", broken)
        state = read_device_state(CUDA)
        assert (state.allocated, state.free, state.total, state.others) == (None, 10, 100, None)

    def test_cuda_is_not_started_for_it(self, cuda):
        cuda("is_initialized", lambda: False)
        cuda("mem_get_info", broken)
        assert read_device_state(CUDA) == DeviceState(note="unavailable (CUDA has not started)")

    @pytest.mark.parametrize("device", ["cpu", "mps"])
    def test_devices_without_statistics(self, cuda, device):
        cuda("mem_get_info", broken)
        assert read_device_state(torch.device(device)) == DeviceState(note=f"none ({device.upper()})")


def test_text_says_what_where_and_how_much():
    text = report_of(OOM, plan=Plan(), setting=ON).text()
    for expected in (
        "rank 1 of 2: device memory (certain)",
        "asked for   680.00 MiB",
        "stage refine, block 3, unit mlp, step 12, microbatch bfloat16 [1, 1024, 5120]",
        "cuda:1",
        "allocated   9.00 GiB now",
        "reserved    10.00 GiB",
        "free        1.00 GiB of 12.00 GiB",
        "others      1.00 GiB",
        "predicted   5.00 GiB",
        "expandable_segments:True (set by the user as PYTORCH_ALLOC_CONF); WSL2: no",
        "this process has unknown (the driver's message says 2^64 bytes) memory in use",
    ):
        assert expected in text
    assert "17179869184" not in text


def test_json_says_the_same(tmp_path):
    path = report_of(OOM, plan=Plan(), setting=ON).write(tmp_path / "oom_reports")
    assert path == tmp_path / "oom_reports" / "rank1.json"
    assert [file.name for file in path.parent.iterdir()] == ["rank1.json"]
    found = json.loads(path.read_text())
    expected = {
        "class": "device_memory",
        "exit_code": 10,
        "asked_bytes": 680 * 2**20,
        "error": {"type": "OutOfMemoryError", "message": str(OOM)},
        "rank": 1,
        "world_size": 2,
        "device": "cuda:1",
        "stage": "refine",
        "block": 3,
        "unit": "mlp",
        "step": 12,
        "batch": ["bfloat16 [1, 1024, 5120]"],
        "predicted_bytes": 5 * GIB,
        "allocator": {"text": ON.text, "origin": ON.origin, "expandable_segments": True, "wsl": False},
    }
    assert {key: found[key] for key in expected} == expected
    assert (found["memory"]["free"], found["memory"]["others"]) == (GIB, GIB)
    assert "OutOfMemoryError: CUDA out of memory" in found["traceback"]
    assert found["host_peak_bytes"] > 0


def test_traceback_holds_the_whole_chain():
    try:
        try:
            raise OOM
        except RuntimeError as error:
            raise RuntimeError("unit mlp failed") from error
    except RuntimeError as error:
        found = report_of(error)
    assert found.chain.index("Tried to allocate") < found.chain.index("unit mlp failed")
    assert found.verdict.error_type == "OutOfMemoryError"


def test_nothing_known_is_said_as_such(tmp_path):
    place = Place(0, 1, CUDA)
    found = report_of(NOT_READY, place, DeviceState(note="unavailable (RuntimeError: x)"), None)
    text = found.text()
    assert "memory      unavailable (RuntimeError: x)" in text
    assert "asked for   unknown" in text
    assert "where       no stage" in text
    assert "allocator   unavailable" in text
    json.loads(found.write(tmp_path).read_text())


def test_between_stages_the_one_before_is_named():
    assert "after stage propagate, block 2" in report_of(OOM, Place(0, 1, CUDA, block=2, after="propagate")).text()


def test_long_messages_are_cut_for_people_alone(tmp_path):
    found = report_of(RuntimeError("CUDA error: out of memory " + "x" * 5000))
    assert "x" * 700 not in found.text()
    assert len(json.loads(found.write(tmp_path).read_text())["error"]["message"]) > 5000


class TestRemedies:
    def test_of_the_plan_in_order_of_gain(self):
        found = report_of(OOM, plan=Plan(), setting=ON)
        assert [(r.text, r.saves_bytes) for r in found.remedies] == [
            ("--model.store memory", 3 * GIB),
            ("--data.microbatch_size 1", 1 * GIB),
        ]
        assert "1. --model.store memory (saves 3.00 GiB)" in found.text()

    def test_failing_plan_is_as_none(self):
        assert report_of(OOM, plan=BrokenPlan()).remedies == report_of(OOM).remedies
        assert report_of(OOM, plan=BrokenPlan()).predicted is None

    def test_suspected_with_expandable_segments_on_advises_off_before_the_plan(self):
        first, *others = remedy_texts(NOT_READY, setting=ON, plan=Plan())
        assert "PYTORCH_ALLOC_CONF=expandable_segments:False" in first
        assert len(others) == 2

    def test_suspected_with_them_off_never_advises_them(self):
        for plan in (None, Plan()):
            texts = remedy_texts(NOT_READY, setting=OFF, plan=plan)
            assert texts
            assert not any("expandable" in text for text in texts)

    def test_advice_names_the_variable_that_torch_reads(self):
        older = AllocatorSetting(ON.text, "set by the user as PYTORCH_CUDA_ALLOC_CONF", True, wsl=True)
        assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False" in remedy_texts(NOT_READY, setting=older)[0]

    @pytest.mark.parametrize(
        ("reserved", "setting", "advised"),
        [
            (10 * GIB, OFF, True),  # 1 GiB lies unused, 680 MiB were asked for
            (9 * GIB + 2**20, OFF, False),
            (10 * GIB, ON, False),
            (10 * GIB, AllocatorSetting("", "", False, wsl=True), False),
        ],
    )
    def test_certain_advises_them_on_only_where_pieces_would_have_sufficed(self, reserved, setting, advised):
        state = DeviceState(allocated=9 * GIB, reserved=reserved, free=0, total=12 * GIB)
        texts = remedy_texts(OOM, state=state, setting=setting)
        assert any("expandable_segments:True" in text for text in texts) is advised

    def test_stage_without_a_microbatch_is_not_told_to_lower_it(self):
        assert any("microbatch" in text for text in remedy_texts(OOM))
        assert not any("microbatch" in text for text in remedy_texts(OOM, Place(0, 1, CUDA, "initialize", 3, "mlp")))

    @pytest.mark.parametrize(
        ("error", "word"),
        [
            (torch.distributed.DistBackendError("NCCL error: unhandled system error"), "NCCL_DEBUG=WARN"),
            (MemoryError(), "--model.store disk"),
            (RuntimeError("Caught ... in pin memory thread: CUDA error: invalid argument"), "--data.pin_memory false"),
            (RuntimeError("CUDA error: an illegal memory access was encountered"), "CUDA_LAUNCH_BLOCKING=1"),
            (RuntimeError("out of resource: shared memory, Required: 66560"), "kernels eager"),
            (FloatingPointError("loss is not finite"), "--model.dtype"),
        ],
    )
    def test_other_classes_have_their_own(self, error, word):
        texts = remedy_texts(error, plan=SimpleNamespace(predicted=lambda *_: None, remedies=lambda stage: []))
        assert word in texts[0]
        assert not any("expandable" in text for text in texts)
