"""Rows 1-13, 15 and 16 of the field's cases, raised in the training step of a real fit."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from torch.utils.data._utils.pin_memory import pin_memory

from callbacks import AllocatorStats, EmptyCache, OOMReport, RunProgress
from gsq_module.memory.oom import Kind, exit_code_of
from gsq_module.memory.stages import Stage, StageClock

GIB = 2**30
OOM_TEXT = "CUDA out of memory. Tried to allocate 680.00 MiB. GPU 3 has a total capacity of 16.00 GiB"


class FailingModel(BoringModel):
    """Raises in its third training step."""

    def __init__(self, failure):
        super().__init__()
        self.failure = failure

    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == 2:
            self.failure()
        return super().training_step(batch, batch_idx)


def raises(error):
    def fail():
        raise error

    return fail


def out_of_resources():
    raise pytest.importorskip("triton.runtime.errors").OutOfResources(66560, 65536, "shared memory")


def pin_fails():
    class Batch:
        def pin_memory(self):
            raise torch.AcceleratorError("CUDA error: invalid argument")

    pin_memory(Batch())


@pytest.fixture
def device_state(cuda, monkeypatch):
    """The conftest's fake device, already started; `free` bytes are left on it."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)

    def set_free(free):
        cuda.total = 140 * GIB
        cuda.others = cuda.total - cuda.reserved - free
        return cuda

    return set_free


@pytest.fixture
def set_segments(monkeypatch):
    def set_segments(on):
        monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", f"expandable_segments:{on}")

    return set_segments


@pytest.fixture
def fail_in_fit(make_trainer, fit, tmp_path):
    """Fits on CPU inside a stage of the fake device; returns the error that left the fit, and the report if any."""

    def run(failure, device, report=None):
        report = report or OOMReport()
        trainer = make_trainer([RunProgress(), report])
        report.attach(trainer, tmp_path / "oom_reports")
        report.on_stage_start(Stage("refine", 3, "mlp", device=device))
        with pytest.raises(Exception) as caught:
            fit(trainer, 5, FailingModel(failure))
        file = tmp_path / "oom_reports" / "rank0.json"
        return caught.value, json.loads(file.read_text()) if file.exists() else None

    return run


ASSERT_HANDLES = '!handles_.at(i) INTERNAL ASSERT FAILED at "/c10/cuda/CUDACachingAllocator.cpp":421'
NOT_READY = "CUDA driver error: device not ready"
INVALID = "CUDA driver error: invalid argument"
CUDNN = "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"
CUBLAS = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
NCCL = torch.distributed.DistBackendError
CASES = {
    "1": (raises(RuntimeError(NOT_READY)), True, 60, Kind.DEVICE_MEMORY_SUSPECTED),
    "2": (raises(RuntimeError(NOT_READY)), False, 60, Kind.DEVICE_MEMORY_SUSPECTED),
    "3": (raises(RuntimeError(ASSERT_HANDLES)), True, 0, Kind.DEVICE_MEMORY_SUSPECTED),
    "4 full": (raises(RuntimeError(INVALID)), True, 0, Kind.DEVICE_MEMORY_SUSPECTED),
    "4 roomy": (raises(RuntimeError(INVALID)), True, 60, Kind.DRIVER_FAULT),
    "6 text": (raises(RuntimeError("CUDA error: out of memory")), False, 60, Kind.DEVICE_MEMORY),
    "6 type": (raises(torch.AcceleratorError("CUDA error: out of memory")), False, 60, Kind.DEVICE_MEMORY),
    "torch's own": (raises(torch.OutOfMemoryError(OOM_TEXT)), True, 0, Kind.DEVICE_MEMORY),
    "7": (raises(RuntimeError(CUBLAS)), False, 60, Kind.DEVICE_MEMORY),
    "8 full": (raises(RuntimeError(CUDNN)), False, 0, Kind.DEVICE_MEMORY_SUSPECTED),
    "8 roomy": (raises(RuntimeError(CUDNN)), False, 60, Kind.DRIVER_FAULT),
    "9 with": (raises(NCCL("NCCL error: Cuda failure 'out of memory'")), False, 0, Kind.NCCL_MEMORY),
    "9 without": (raises(NCCL("NCCL error: unhandled cuda error")), False, 60, Kind.NCCL_MEMORY_SUSPECTED),
    "10": (out_of_resources, False, 0, Kind.KERNEL_CONFIGURATION),
    "11": (raises(RuntimeError("CUDA error: an illegal memory access was encountered")), True, 0, Kind.DRIVER_FAULT),
    "12": (pin_fails, True, 0, Kind.PINNED_MEMORY),
    "13": (lambda: torch.empty(1 << 48), False, 60, Kind.HOST_MEMORY),
    "15": (raises(RuntimeError("MPS backend out of memory. Tried to allocate 20.00 MB")), True, 0, Kind.DEVICE_MEMORY),
}


@pytest.mark.parametrize("case", CASES)
def test_cases_of_the_field(case, device_state, set_segments, fail_in_fit, capsys):
    failure, segments_on, free_gib, kind = CASES[case]
    set_segments(segments_on)
    cuda = device_state(free_gib * GIB)
    error, found = fail_in_fit(failure, cuda.device)

    assert (found["class"], found["exit_code"]) == (kind.name.lower(), kind.exit_code)
    assert exit_code_of(error) == kind.exit_code
    assert (found["rank"], found["world_size"], found["device"]) == (0, 1, "cuda:3")
    assert (found["stage"], found["block"], found["unit"], found["step"]) == ("refine", 3, "mlp", 2)
    assert found["batch"] == ["float32 [1, 32]"]
    memory = found["memory"]
    assert (memory["allocated"], memory["reserved"], memory["free"]) == (1 * GIB, 4 * GIB, free_gib * GIB)
    advice = " ".join(remedy["text"] for remedy in found["remedies"])
    assert advice
    # Case 1 advises against the flag; it is not mentioned where it is off already, or where memory is not meant.
    if kind is Kind.DEVICE_MEMORY_SUSPECTED:
        assert ("expandable_segments:False" in advice) is segments_on
    if kind is not Kind.DEVICE_MEMORY and not (kind is Kind.DEVICE_MEMORY_SUSPECTED and segments_on):
        assert "expandable" not in advice
    printed = capsys.readouterr().err
    assert printed.count("== memory report") == 1
    assert kind.title in printed
    assert str(error).partition("\n")[0][:60] in printed


def test_case_3_and_5_every_query_raises_and_nothing_is_hidden(device_state, set_segments, fail_in_fit, monkeypatch):
    for text in (ASSERT_HANDLES, "NVML_SUCCESS == r INTERNAL ASSERT FAILED"):
        set_segments(True)
        cuda = device_state(0)
        failed, calls = RuntimeError(text), []

        def query(name, calls=calls, text=text):
            def raising(*args, **kwargs):
                calls.append(name)
                raise RuntimeError(text)

            return raising

        class Watched(OOMReport):
            def on_exception(self, *args, query=query):
                with monkeypatch.context() as patch:
                    for name in ("mem_get_info", "memory_stats", "synchronize", "empty_cache", "ipc_collect"):
                        patch.setattr(torch.cuda, name, query(name))
                    for name in ("barrier", "all_reduce", "all_gather", "all_gather_object", "broadcast"):
                        patch.setattr(torch.distributed, name, query(name))
                    for name in ("empty", "zeros", "tensor"):
                        patch.setattr(torch, name, query(name))
                    super().on_exception(*args)

        error, found = fail_in_fit(raises(failed), cuda.device, Watched())
        assert error is failed
        assert calls == ["mem_get_info", "memory_stats"]
        assert found["class"] == "device_memory_suspected"
        assert found["memory"]["allocated"] is None
        assert found["memory"]["note"].startswith("unavailable (RuntimeError:")


def test_case_16_on_cpu_every_callback_runs_and_the_report_skips_statistics(make_trainer, fit, tmp_path, capsys):
    report = OOMReport()
    used = [EmptyCache(every_n_steps=1), AllocatorStats(every_n_steps=1), report, RunProgress()]
    trainer = make_trainer(used, logger=CSVLogger(tmp_path))
    fit(trainer, 2)
    assert "memory report" not in capsys.readouterr().err
    with pytest.raises(MemoryError):
        fit(trainer, 3, FailingModel(raises(MemoryError())))
    assert "memory      none (CPU)" in capsys.readouterr().err
    # Without a run: where the Trainer writes, and the Trainer's own name for what it does.
    found = json.loads((tmp_path / "oom_reports" / "rank0.json").read_text())
    assert (found["stage"], found["step"], found["device"]) == ("fit", 2, "cpu")


def test_wrapped_twice_inside_a_fit(device_state, fail_in_fit):
    oom = torch.OutOfMemoryError(OOM_TEXT)

    def fail():
        try:
            try:
                raise oom
            except RuntimeError as error:
                raise RuntimeError("unit mlp failed") from error
        except RuntimeError as error:
            raise KeyError("block 3") from error

    error, found = fail_in_fit(fail, device_state(0).device)
    assert error.__cause__.__cause__ is oom
    assert (found["class"], found["asked_bytes"]) == ("device_memory", 680 * 2**20)
    assert "unit mlp failed" in found["traceback"]
    if sys.version_info >= (3, 11):
        assert "rank0.json; exit status 10" in error.__notes__[0]


def test_while_another_error_is_handled(device_state, fail_in_fit):
    def fail():
        try:
            raise torch.linalg.LinAlgError("not positive-definite")
        except torch.linalg.LinAlgError:
            raise torch.OutOfMemoryError(OOM_TEXT)  # noqa: B904

    assert fail_in_fit(fail, device_state(0).device)[1]["class"] == "device_memory"


@pytest.mark.parametrize("error", [ValueError("data.seq_len: 0"), RuntimeError("shapes cannot be multiplied")])
def test_errors_of_another_kind_are_left_alone(error, device_state, fail_in_fit, capsys):
    raised, found = fail_in_fit(raises(error), device_state(0).device)
    assert (raised, found) == (error, None)
    assert "memory report" not in capsys.readouterr().err
    assert exit_code_of(raised) == 1


def test_interrupts_are_left_alone(tmp_path, capsys):
    report = OOMReport(str(tmp_path))
    with pytest.raises(KeyboardInterrupt), report.watching():
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


class TestOnceAndAtTheRightPlace:
    @pytest.fixture
    def reports(self, tmp_path, monkeypatch):
        """Reports as they are written, one after the other."""
        written = []
        publish = OOMReport._publish
        monkeypatch.setattr(
            OOMReport,
            "_publish",
            lambda self, report, error: (written.append(report.place), publish(self, report, error)),
        )
        return written

    @pytest.fixture
    def run(self, make_trainer, tmp_path):
        report = OOMReport(str(tmp_path / "reports"))
        return SimpleNamespace(
            report=report, trainer=make_trainer([report]), clock=StageClock(torch.device("cpu"), [report])
        )

    def test_in_a_stage_outside_a_fit(self, run, reports):
        oom = torch.OutOfMemoryError(OOM_TEXT)
        with pytest.raises(torch.OutOfMemoryError) as caught, run.report.watching():  # noqa: SIM117
            with run.clock.stage("capture", block=2, unit="attention"):
                raise oom
        assert caught.value is oom
        assert [(p.stage, p.block, p.unit, p.step, p.batch) for p in reports] == [("capture", 2, "attention", None, ())]

    def test_in_a_fit_inside_a_stage(self, run, reports, fit):
        with run.clock.stage("initialize", block=1, unit="mlp"):
            pass
        failing = FailingModel(raises(torch.OutOfMemoryError(OOM_TEXT)))
        with pytest.raises(torch.OutOfMemoryError), run.report.watching():  # noqa: SIM117
            with run.clock.stage("refine", block=1, unit="mlp"):
                fit(run.trainer, 4, failing)
        assert [(p.stage, p.block, p.unit, p.step) for p in reports] == [("refine", 1, "mlp", 2)]

    def test_between_stages(self, run, reports):
        with run.clock.stage("propagate", block=4):
            pass
        with pytest.raises(MemoryError), run.report.watching():
            raise MemoryError
        assert [(p.stage, p.after, p.block) for p in reports] == [(None, "propagate", 4)]

    def test_second_error_of_the_cleanup_is_not_reported_again(self, run, reports):
        def work():
            try:
                with run.clock.stage("capture", block=2):
                    raise torch.OutOfMemoryError(OOM_TEXT)
            finally:
                raise RuntimeError(NOT_READY)

        with pytest.raises(RuntimeError, match="device not ready"), run.report.watching():
            work()
        assert [place.stage for place in reports] == ["capture"]

    def test_new_error_of_a_second_try_is_reported(self, run, reports):
        def work(block):
            with run.clock.stage("capture", block=block):
                raise torch.OutOfMemoryError(OOM_TEXT)

        def try_twice():
            try:
                work(2)
            except torch.OutOfMemoryError:
                work(3)

        with pytest.raises(torch.OutOfMemoryError), run.report.watching():
            try_twice()
        assert [place.block for place in reports] == [2, 3]

    def test_error_that_a_retry_mends_is_not_reported(self, run, reports, fit):
        with run.report.watching(), run.clock.stage("refine", block=1, unit="mlp"):
            run.report.retry_follows = True
            with pytest.raises(torch.OutOfMemoryError):
                fit(run.trainer, 4, FailingModel(raises(torch.OutOfMemoryError(OOM_TEXT))))
            fit(run.trainer, 1)
        assert reports == []

    @pytest.mark.parametrize("error", [torch.OutOfMemoryError(OOM_TEXT), RuntimeError(NOT_READY)])
    def test_error_that_no_retry_mends_is(self, run, reports, fit, error):
        run.report.retry_follows = True
        with pytest.raises(RuntimeError), run.clock.stage("refine", block=1, unit="mlp"):
            fit(run.trainer, 4, FailingModel(raises(error)))
        assert [place.stage for place in reports] == ["refine"]


class FakeRun:
    def __init__(self, broken=False):
        self.fields, self.alerts, self.broken = {}, [], broken
        self.summary = SimpleNamespace(update=self.fields.update)

    def alert(self, title, text, level):
        if self.broken:
            raise ConnectionError("W&B is away")
        self.alerts.append((title, text, level))


class FakeWandb(WandbLogger):
    def __init__(self, run):
        self.run = run

    @property
    def experiment(self):
        return self.run


def test_wandb_gets_summary_fields_and_one_alert(tmp_path):
    run, report = FakeRun(), OOMReport(str(tmp_path))
    report.attach(SimpleNamespace(loggers=[FakeWandb(run)], global_rank=0, world_size=2), tmp_path)
    clock = StageClock(torch.device("cpu"), [report])
    with pytest.raises(torch.OutOfMemoryError), clock.stage("capture", block=5, unit="mlp"):
        raise torch.OutOfMemoryError(OOM_TEXT)
    assert run.fields["oom/class"] == "device_memory"
    assert (run.fields["oom/stage"], run.fields["oom/block"], run.fields["oom/unit"]) == ("capture", 5, "mlp")
    assert (run.fields["oom/exit_code"], run.fields["oom/asked_bytes"]) == (10, 680 * 2**20)
    ((title, text, level),) = run.alerts
    assert (title, level) == ("Run ended: device memory (certain)", "ERROR")
    assert "680.00 MiB" in text
    assert all(len(f"Run ended: {kind.title}") < 64 for kind in Kind)  # W&B's limit


def test_wandb_that_fails_does_not_show(tmp_path, capsys):
    report, oom = OOMReport(str(tmp_path)), torch.OutOfMemoryError(OOM_TEXT)
    report.attach(SimpleNamespace(loggers=[FakeWandb(FakeRun(broken=True))], global_rank=0, world_size=1), tmp_path)
    with pytest.raises(torch.OutOfMemoryError) as caught, report.watching():
        raise oom
    assert caught.value is oom
    assert (tmp_path / "rank0.json").exists()
    assert "W&B is away" not in capsys.readouterr().err


def test_only_rank_zero_tells_wandb_and_each_rank_has_its_file(tmp_path):
    run, report = FakeRun(), OOMReport(str(tmp_path))
    report.attach(SimpleNamespace(loggers=[FakeWandb(run)], global_rank=1, world_size=2), tmp_path)
    with pytest.raises(MemoryError), report.watching():
        raise MemoryError
    assert run.alerts == []
    assert [file.name for file in tmp_path.iterdir()] == ["rank1.json"]


def test_report_that_cannot_be_written_is_still_shown(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    report = OOMReport(str(tmp_path / "file" / "reports"))
    with pytest.raises(MemoryError), report.watching():
        raise MemoryError
    printed = capsys.readouterr().err
    assert "== memory report" in printed
    assert "could not be written" in printed


def test_failure_of_the_report_itself_does_not_hide_the_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("callbacks.oom_report.build_report", raises(KeyError("broken")))
    with pytest.raises(MemoryError), OOMReport(str(tmp_path)).watching():
        raise MemoryError
    assert "the memory report failed" in capsys.readouterr().err


def test_it_is_built_from_yaml(tmp_path):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--callback", type=Callback)
    built = parser.instantiate(parser.parse_args(["--callback=callbacks.OOMReport"])).callback
    assert type(built) is OOMReport
    assert built.directory is None


@pytest.mark.gpu
def test_real_out_of_memory_error(tmp_path):
    device = torch.device("cuda", 0)
    held = torch.empty(256 * 2**20, dtype=torch.uint8, device=device)
    free, total = torch.cuda.mem_get_info(device)
    report = OOMReport(str(tmp_path))
    clock = StageClock(device, [report])
    with pytest.raises(torch.OutOfMemoryError) as caught, clock.stage("capture", block=0, unit="mlp"):
        torch.empty(total + 2**30, dtype=torch.uint8, device=device)
    found = json.loads((tmp_path / "rank0.json").read_text())
    assert exit_code_of(caught.value) == found["exit_code"] == Kind.DEVICE_MEMORY.exit_code
    assert found["stage"] == "capture"
    # The message rounds to hundredths of a GiB.
    assert abs(found["asked_bytes"] - (total + 2**30)) < 0.01 * 2**30
    memory = found["memory"]
    assert memory["allocated"] >= held.nbytes
    assert memory["reserved"] >= memory["allocated"]
    assert memory["total"] == total
    assert abs(memory["free"] - free) < 2**30
    assert memory["others"] > 0
    assert memory["note"] == ""
