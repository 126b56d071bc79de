from __future__ import annotations

import copy
import io
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from gsq_module.memory import doctor
from gsq_module.memory.allocator_setting import AllocatorSetting
from gsq_module.memory.doctor_report import find_warnings, render

GIB = 2**30
MIB = 2**20
UUID = "8f2c1f6e-1111-2222-3333-444455556666"
ON_WSL = AllocatorSetting("expandable_segments:True", "set by the user as PYTORCH_ALLOC_CONF", True, True)


def text_of(report):
    console = Console(file=io.StringIO(), width=300)
    console.print(render(report))
    return console.file.getvalue()


def line_of(report, label):
    (line,) = [line for line in text_of(report).splitlines() if f" {label}  " in line]
    return line.partition(f" {label}  ")[2].strip()


@pytest.fixture
def nvidia_smi(monkeypatch):
    """What nvidia-smi prints, by the first word of the query."""
    printed = {
        "gpu": f"GPU-{UUID}, 3072, 9216, 580.65.06\nGPU-other, 0, 1, 580.65.06\n",
        "compute-apps": f"GPU-{UUID}, 4242, 2800, /usr/bin/python, trained\nGPU-other, 1, 7, x\n",
    }

    def run(command, **kwargs):
        assert command[0] == "nvidia-smi"
        assert kwargs["timeout"] > 0
        out = printed[command[1].removeprefix("--query-").partition("=")[0]]
        return subprocess.CompletedProcess(command, 0 if out else 9, out, "" if out else "NVML: no driver\nmore")

    monkeypatch.setattr(subprocess, "run", run)
    return printed


@pytest.fixture
def gpu(monkeypatch):
    """One GPU of 12 GiB that only torch.cuda's queries know."""
    properties = SimpleNamespace(name="Toy 12", major=8, minor=6, total_memory=12 * GIB, uuid=UUID)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (5 * GIB, 12 * GIB))
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 3))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.setattr(doctor, "_pin", lambda mib: "works")
    return properties


def test_it_answers_here_and_is_json(tmp_path):
    report = doctor.diagnose(tmp_path / "not" / "yet")
    assert json.loads(json.dumps(report)) == report
    assert list(report) == ["versions", "system", "driver", "gpus", "allocator", "pinned_memory", "disk", "warnings"]
    assert report["versions"]["torch"] == torch.__version__
    assert report["disk"]["run_dir"] == str(tmp_path / "not" / "yet")
    assert report["disk"]["run_dir_free_bytes"] == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.1)
    assert not (tmp_path / "not").exists()
    text = text_of(report)
    for word in ("versions", "compressed-tensors", "host memory available", "expandable segments", "hub cache free"):
        assert word in text


def test_no_value_is_cut_short_in_a_narrow_log(tmp_path):
    report = doctor.diagnose(tmp_path / ("x" * 60) / ("y" * 60))
    console = Console(file=io.StringIO(), width=80)
    console.print(render(report))
    text = console.file.getvalue()
    assert "…" not in text
    assert text.count("x") >= 60
    assert text.count("y") >= 60


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="Linux's own figures")
def test_host_memory_is_in_bytes(tmp_path):
    system = doctor.diagnose(tmp_path)["system"]
    assert 0 < system["host_memory_available_bytes"] < system["host_memory_bytes"]
    # What the kernel gives to processes, which is the machine's memory less what it keeps for itself.
    assert system["host_memory_bytes"] == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_a_gpu_as_nvidia_smi_sees_it(gpu, nvidia_smi, tmp_path):
    report = doctor.diagnose(tmp_path)
    assert report["driver"] == {"version": "580.65.06", "gpus_seen": 2}
    assert report["gpus"] == [
        {
            "name": "Toy 12",
            "compute_capability": "8.6",
            "total_bytes": 12 * GIB,
            "free_bytes": 9 * GIB,  # not 5, which torch says once its own context is there
            "used_by_others_bytes": 3 * GIB,
            "processes": ["4242 /usr/bin/python, trained: 2800 MiB"],
        }
    ]
    assert (report["versions"]["CUDA"], report["versions"]["NCCL"], report["versions"]["cuDNN"]) == (
        "13.0",
        "2.29.3",
        "91900",
    )
    assert line_of(report, "0 free") == "9.00 GiB"
    assert line_of({"driver": {"gpus_seen": 1}}, "gpus seen") == "1"  # not yes
    assert line_of(report, "0 processes 0").startswith("4242 /usr/bin/python")


def test_without_nvidia_smi_torch_is_asked(gpu, monkeypatch, tmp_path):
    def missing(*args, **kwargs):
        raise FileNotFoundError(2, "No such file or directory", "nvidia-smi")

    monkeypatch.setattr(subprocess, "run", missing)
    report = doctor.diagnose(tmp_path)
    (found,) = report["gpus"]
    assert found["free_bytes"] == 5 * GIB
    assert found["used_by_others_bytes"].startswith("unavailable (nvidia-smi does not know this GPU")
    assert found["processes"].startswith("unavailable (FileNotFoundError: ")
    assert report["driver"]["gpus_seen"] == found["processes"]
    assert find_warnings(report) == report["warnings"]


@pytest.mark.parametrize("out", ["", "garbage\n", f"GPU-{UUID}, [N/A], [N/A], 580.65.06\n"])
def test_an_nvidia_smi_that_fails_or_knows_nothing(gpu, nvidia_smi, out, tmp_path):
    nvidia_smi["gpu"] = nvidia_smi["compute-apps"] = out
    (found,) = doctor.diagnose(tmp_path)["gpus"]
    assert found["total_bytes"] == 12 * GIB
    assert isinstance(found["used_by_others_bytes"], str)
    assert found["used_by_others_bytes"].startswith("unavailable (")


def test_every_query_may_fail(gpu, monkeypatch, tmp_path):
    """As after a driver error, with a broken /proc, and no folder to write to."""

    def broken(*args, **kwargs):
        raise RuntimeError("CUDA driver error: device not ready\nand more lines")

    for owner, names in {
        torch.cuda: ("get_device_properties", "mem_get_info"),
        torch.cuda.nccl: ("version",),
        torch.backends.cudnn: ("version",),
        subprocess: ("run",),
        shutil: ("disk_usage",),
        tempfile: ("gettempdir",),
        Path: ("read_text",),
        doctor: ("_pin",),
    }.items():
        for name in names:
            monkeypatch.setattr(owner, name, broken)
    report = doctor.diagnose(tmp_path)
    reason = "unavailable (RuntimeError: CUDA driver error: device not ready)"
    assert report["gpus"] == [{"name": reason}]
    assert report["versions"]["NCCL"] == report["versions"]["cuDNN"] == reason
    assert report["driver"] == {"version": reason, "gpus_seen": reason}
    assert report["versions"]["lightning"] == report["system"]["host_memory_bytes"] == reason
    assert report["pinned_memory"]["pinning_64_mib"] == reason
    assert report["disk"]["shm_total_bytes"] == report["disk"]["temporary_files"] == reason
    assert reason in text_of(report)
    json.dumps(report)


def test_counting_gpus_may_fail_too(gpu, nvidia_smi, monkeypatch, tmp_path):
    def broken():
        raise RuntimeError("no")

    monkeypatch.setattr(torch.cuda, "device_count", broken)
    report = doctor.diagnose(tmp_path)
    assert report["gpus"] == "unavailable (RuntimeError: no)"
    assert "2 GPU(s) that torch" in report["warnings"][0]


def test_why_torch_sees_no_gpu_is_told(gpu, nvidia_smi, monkeypatch, tmp_path):
    def too_old():
        warnings.warn("CUDA initialization: The NVIDIA driver on your system is too old", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", too_old)
    report = doctor.diagnose(tmp_path)
    assert report["gpus"] == "unavailable (CUDA initialization: The NVIDIA driver on your system is too old)"
    assert "driver on your system is too old" in report["warnings"][0]
    monkeypatch.setattr(torch.version, "cuda", None)
    assert doctor.diagnose(tmp_path)["gpus"] == "unavailable (torch was built without CUDA)"


@pytest.mark.parametrize(("limit", "told"), [(resource.RLIM_INFINITY, "unlimited"), (8 * MIB, "8.00 MiB")])
def test_the_limit_on_locked_memory(monkeypatch, limit, told, tmp_path):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, resource.RLIM_INFINITY))
    assert line_of(doctor.diagnose(tmp_path), "ulimit l") == told


def test_pinning_is_tried(gpu, monkeypatch, tmp_path):
    tried = []
    monkeypatch.setattr(doctor, "_pin", lambda mib: tried.append(mib) or "works")
    assert doctor.diagnose(tmp_path)["pinned_memory"]["pinning_256_mib"] == "works"
    assert tried == [64, 256]


@pytest.mark.parametrize(
    ("release", "expected"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\nGCC: 12",
            "535.104.05",
        ),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n", "580.65.06"),
    ],
)
def test_driver_version_of_the_kernel_module(monkeypatch, release, expected):
    monkeypatch.setattr(Path, "read_text", lambda self: release)
    assert doctor._driver_version_of_the_kernel() == expected


class TestWarnings:
    @pytest.fixture
    def sound(self, gpu, nvidia_smi, monkeypatch, tmp_path):
        """A report that has nothing to warn of."""
        nvidia_smi["gpu"] = f"GPU-{UUID}, 1024, 11264, 580.65.06\n"  # 8% of 12 GiB
        report = doctor.diagnose(tmp_path)
        report["versions"]["triton"] = "3.6.0"
        report["disk"]["shm_total_bytes"] = GIB
        assert find_warnings(report) == []
        return copy.deepcopy(report)

    def only(self, report):
        (warning,) = find_warnings(report)
        return warning

    def test_memory_that_others_hold(self, sound):
        sound["gpus"][0]["used_by_others_bytes"] = 3 * GIB
        warning = self.only(sound)
        assert "GPU 0" in warning
        assert "3.00 GiB of 12.00 GiB" in warning
        assert "4242 /usr/bin/python" in warning
        sound["gpus"][0]["processes"] = "unavailable (x)"
        assert "GPU 0" in self.only(sound)

    def test_a_small_shm(self, sound):
        sound["disk"]["shm_total_bytes"] = 64 * MIB
        assert "/dev/shm has 64.00 MiB" in self.only(sound)

    def test_triton_missing_on_cuda_only(self, sound):
        sound["versions"]["triton"] = "not installed"
        assert "triton" in self.only(sound)
        sound["gpus"], sound["driver"]["gpus_seen"] = "unavailable (none)", 0
        assert find_warnings(sound) == []

    def test_expandable_segments_under_wsl2_by_the_users_own_setting(self, sound):
        sound["allocator"] |= {"wsl": True, "expandable_segments": True, "origin": ON_WSL.origin}
        assert "set by the user as PYTORCH_ALLOC_CONF" in self.only(sound)
        sound["allocator"]["expandable_segments"] = False
        assert find_warnings(sound) == []

    def test_pinning_that_fails(self, sound):
        sound["pinned_memory"]["pinning_256_mib"] = "unavailable (RuntimeError: CUDA error: invalid argument)"
        warning = self.only(sound)
        assert "pinning 256 mib" in warning
        assert "--data.pin_memory false" in warning


def test_what_is_known_of_wsl2_is_told(monkeypatch, gpu, nvidia_smi, tmp_path):
    monkeypatch.setattr(doctor, "setting_in_force", lambda: ON_WSL)
    report = doctor.diagnose(tmp_path)
    assert report["system"]["wsl2"] is True
    assert "7 GB" in report["pinned_memory"]["wsl2"]
    assert any("under WSL2" in warning for warning in report["warnings"])


@pytest.mark.gpu
def test_a_real_device(tmp_path):
    """In a process of its own: in this one torch may have started CUDA."""
    code = "import json; from gsq_module.memory.doctor import diagnose; print(json.dumps(diagnose('.')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    gpu = report["gpus"][0]
    assert gpu["total_bytes"] == torch.cuda.get_device_properties(0).total_memory
    assert isinstance(gpu["used_by_others_bytes"], int), "nvidia-smi's UUIDs are not torch's"
    assert 0 < gpu["free_bytes"] <= gpu["total_bytes"]
    assert report["pinned_memory"]["pinning_64_mib"] == "works"
    assert report["versions"]["NCCL"].count(".") == 2
    assert report["driver"]["version"][0].isdigit()
