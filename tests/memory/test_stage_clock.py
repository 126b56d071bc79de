from __future__ import annotations

import logging

import pytest
import torch

from gsq_module.memory.stages import Stage, StageClock, StageListener

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 1)


class Recorder(StageListener):
    def __init__(self):
        self.events = []

    def on_stage_start(self, stage):
        self.events.append(("start", stage))

    def on_stage_end(self, stage, seconds, memory):
        self.events.append(("end", stage, seconds, memory))


class FakeTime:
    def __init__(self):
        self.t = 100.0

    def __call__(self):
        return self.t


@pytest.fixture
def cuda(monkeypatch):
    """CUDA's queries as a list of calls, in their order; `peaks` are handed out one a stage."""

    class Cuda:
        def __init__(self):
            self.calls = []
            self.peaks = iter([500, 300, 700])
            self.initialized = True

    state = Cuda()

    def stats(device):
        state.calls.append(("stats", device))
        return {"allocated_bytes.all.peak": next(state.peaks)}

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: state.initialized)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: state.calls.append(("reset", device)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: state.calls.append(("synchronize", device)))
    monkeypatch.setattr(torch.cuda, "memory_stats", stats)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10, 100))
    return state


def test_seconds_add_up_by_name_and_listeners_hear_in_order():
    now, first, second = FakeTime(), Recorder(), Recorder()
    clock = StageClock(CPU, [first, second], num_blocks=4, units=["attention", "mlp"], now=now)
    with clock.stage("gptq", block=3, unit="mlp") as stage:
        assert clock.current is stage
        assert first.events == second.events == [("start", Stage("gptq", 3, "mlp"))]
        now.t += 2.5
    with clock.stage("gptq", block=3, unit="attention"):
        now.t += 1.0
    with clock.stage("export"):
        now.t += 4.0
    assert clock.current is None
    assert clock.seconds == {"gptq": 3.5, "export": 4.0}
    assert clock.peak_memory == {}
    assert first.events[1] == ("end", Stage("gptq", 3, "mlp"), 2.5, None)
    assert first.events == second.events
    assert len(first.events) == 6
    assert (stage.num_blocks, stage.device, stage.failed) == (4, CPU, False)


def test_stages_do_not_nest_and_the_outer_one_is_recorded():
    recorder = Recorder()
    clock = StageClock(CPU, [recorder])
    with pytest.raises(AssertionError, match="gptq begins inside"), clock.stage("capture", block=0):  # noqa: SIM117
        with clock.stage("gptq"):
            pass
    assert [event[0] for event in recorder.events] == ["start", "end"]
    assert set(clock.seconds) == {"capture"}
    with clock.stage("gptq"):
        pass


@pytest.mark.parametrize("where", [{"block": 4}, {"block": -1}, {"unit": "head"}])
def test_places_outside_the_run_are_refused(where):
    clock = StageClock(CPU, num_blocks=4, units=["mlp"])
    with pytest.raises(AssertionError), clock.stage("gptq", **where):
        pass
    assert clock.current is None


def test_exception_is_recorded_told_and_passed_on():
    now, recorder = FakeTime(), Recorder()
    clock = StageClock(CPU, [recorder], now=now)

    def fail():
        now.t += 3.0
        raise KeyError("weights")

    with pytest.raises(KeyError, match="weights"), clock.stage("capture", block=1):
        fail()
    assert clock.seconds == {"capture": 3.0}
    assert clock.current is None
    kind, stage, seconds, memory = recorder.events[-1]
    assert (kind, stage, seconds, memory, stage.failed) == ("end", Stage("capture", 1), 3.0, None, True)


def test_second_error_does_not_hide_the_first(monkeypatch, cuda, caplog):
    def broken(*_):
        raise RuntimeError("CUDA driver error: device not ready")

    class Failing(StageListener):
        def on_stage_end(self, stage, seconds, memory):
            broken()

    monkeypatch.setattr(torch.cuda, "mem_get_info", broken)
    recorder = Recorder()
    clock = StageClock(CUDA, [Failing(), recorder])
    with caplog.at_level(logging.WARNING), pytest.raises(ValueError, match="the cause"), clock.stage("gptq"):
        raise ValueError("the cause")
    assert recorder.events[-1][0] == "end"
    assert recorder.events[-1][3] is None
    assert "gptq" in clock.seconds
    assert caplog.text.count("device not ready") >= 2


def test_errors_of_listeners_are_raised_where_nothing_else_failed():
    class Failing(StageListener):
        def on_stage_end(self, stage, seconds, memory):
            raise RuntimeError("no room for metrics")

    clock = StageClock(CPU, [Failing()])
    with pytest.raises(RuntimeError, match="no room"), clock.stage("gptq"):
        pass
    assert clock.current is None


def test_peaks_on_cuda_are_reset_at_the_start_and_the_highest_stays(cuda):
    recorder = Recorder()
    clock = StageClock(CUDA, [recorder])
    for block, name in enumerate(["gptq", "gptq", "refine"]):
        with clock.stage(name, block=block):
            cuda.calls.append("work")
    assert clock.peak_memory == {"gptq": 500, "refine": 700}
    assert cuda.calls == [("reset", CUDA), "work", ("synchronize", CUDA), ("stats", CUDA)] * 3
    assert [event[3].peak_allocated for event in recorder.events if event[0] == "end"] == [500, 300, 700]
    assert recorder.events[-1][3].device_used == 90


def test_failed_stage_on_cuda_does_not_wait_for_the_device(cuda):
    clock = StageClock(CUDA)
    with pytest.raises(ValueError), clock.stage("gptq"):
        raise ValueError
    assert cuda.calls == [("reset", CUDA), ("stats", CUDA)]
    assert clock.peak_memory == {"gptq": 500}


def test_no_peak_is_reset_before_cuda_has_started(cuda):
    cuda.initialized = False
    with StageClock(CUDA).stage("capture"):
        pass
    assert ("reset", CUDA) not in cuda.calls


@pytest.mark.gpu
def test_peak_of_a_device_is_the_stages_own():
    device = torch.device("cuda", 0)
    clock = StageClock(device)
    with clock.stage("capture"):
        torch.empty(256 * 2**20, dtype=torch.uint8, device=device)
    with clock.stage("gptq"):
        torch.empty(64 * 2**20, dtype=torch.uint8, device=device)
    assert clock.peak_memory["capture"] - clock.peak_memory["gptq"] == 192 * 2**20
