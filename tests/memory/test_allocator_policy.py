from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest
import torch

from gsq_module.memory.allocator import apply_policy, runs_on_wsl, setting_in_force
from gsq_module.memory.allocator_setting import AllocatorSetting

NATIVE = "6.8.0-51-generic"
WSL2 = "5.15.167.4-microsoft-standard-WSL2"
ON, OFF = "expandable_segments:True", "expandable_segments:False"


@pytest.mark.parametrize(
    ("kernel", "wsl"), [(NATIVE, False), (WSL2, True), ("4.4.0-19041-Microsoft", True), ("6.6.1-azure", False)]
)
def test_wsl_is_told_by_the_kernel(kernel, wsl):
    assert runs_on_wsl(kernel) is wsl


def test_expandable_segments_are_on_where_linux_is_native():
    environ = {"HOME": "/root"}
    setting = apply_policy(environ, system="Linux", kernel=NATIVE)
    assert setting == AllocatorSetting(ON, "set by gsq-recipes for native Linux", expandable_segments=True, wsl=False)
    assert environ["PYTORCH_ALLOC_CONF"] == ON
    assert "PYTORCH_CUDA_ALLOC_CONF" not in environ
    assert setting_in_force(environ, NATIVE) == setting


def test_expandable_segments_are_off_under_wsl2():
    environ = {}
    setting = apply_policy(environ, system="Linux", kernel=WSL2)
    assert setting == AllocatorSetting(OFF, "set by gsq-recipes for WSL2", expandable_segments=False, wsl=True)
    assert environ["PYTORCH_ALLOC_CONF"] == OFF


@pytest.mark.parametrize("system", ["Darwin", "Windows"])
def test_other_systems_are_left_alone(system):
    environ = {}
    setting = apply_policy(environ, system=system, kernel="10.0")
    assert setting == AllocatorSetting("", "torch's default", expandable_segments=False, wsl=False)
    assert environ == {}


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
@pytest.mark.parametrize("kernel", [NATIVE, WSL2])
@pytest.mark.parametrize(
    ("text", "expandable"),
    [
        (ON, True),
        (OFF, False),
        ("expandable_segments:True,max_split_size_mb:128", True),
        ("max_split_size_mb:128, expandable_segments: True", True),
        ("roundup_power2_divisions:[256:1,512:2,>:4],expandable_segments:True", True),
        ("expandable_segments:True,expandable_segments:False", False),
        ("max_split_size_mb:128", False),
        ("expandable_segments:true", False),  # torch refuses it: True or False, as written
        ("", False),
    ],
)
def test_what_the_user_set_stays(name, kernel, text, expandable):
    environ = {name: text}
    setting = apply_policy(environ, system="Linux", kernel=kernel)
    assert environ == {name: text}
    assert setting == AllocatorSetting(text, f"set by the user as {name}", expandable, wsl=kernel == WSL2)


def test_of_two_names_the_older_one_counts_as_in_torch():
    environ = {"PYTORCH_ALLOC_CONF": ON, "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    setting = apply_policy(environ, system="Linux", kernel=NATIVE)
    assert (setting.text, setting.expandable_segments) == ("max_split_size_mb:64", False)
    assert setting.origin == "set by the user as PYTORCH_CUDA_ALLOC_CONF"


@pytest.mark.parametrize("kernel", [NATIVE, WSL2])
def test_a_rank_that_inherits_the_policys_value_does_not_take_it_for_the_users(kernel):
    environ = {}
    setting = apply_policy(environ, system="Linux", kernel=kernel)
    inherited = dict(environ)
    assert apply_policy(inherited, system="Linux", kernel=kernel) == setting
    assert inherited == environ


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_what_the_user_sets_over_the_policys_value_is_the_users(name):
    environ = {}
    apply_policy(environ, system="Linux", kernel=NATIVE)
    environ[name] = OFF
    assert apply_policy(environ, system="Linux", kernel=NATIVE).origin == f"set by the user as {name}"


def test_the_users_own_on_looks_like_the_policys_and_is_not():
    assert setting_in_force({"PYTORCH_ALLOC_CONF": ON}, NATIVE).origin == "set by the user as PYTORCH_ALLOC_CONF"


def test_nothing_is_set_and_that_is_said_once_cuda_has_started(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    environ = {}
    with caplog.at_level(logging.WARNING):
        setting = apply_policy(environ, system="Linux", kernel=NATIVE)
    assert environ == {}
    assert (setting.text, setting.origin) == ("", "torch's default")
    assert "CUDA had started already" in caplog.text


def test_no_warning_where_the_setting_came_before_cuda(monkeypatch, caplog):
    environ = {}
    before = apply_policy(environ, system="Linux", kernel=NATIVE)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert apply_policy(environ, system="Linux", kernel=NATIVE) == before
    assert caplog.text == ""


USES_A_DEVICE = """
import torch
import gsq_module.cli
from gsq_module.memory.allocator import apply_policy
assert not torch.cuda.is_initialized(), "an import started CUDA"
setting = apply_policy(kernel="{kernel}")
held = torch.empty(2**25, device="cuda")
expandable = {{segment["is_expandable"] for segment in torch.cuda.memory_snapshot()}}
assert expandable == {{setting.expandable_segments}}, (setting, expandable)
print(setting.expandable_segments)
"""


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kernel", "own", "expandable"),
    [
        (NATIVE, {}, True),
        (WSL2, {}, False),
        (NATIVE, {"PYTORCH_ALLOC_CONF": OFF}, False),
        (NATIVE, {"PYTORCH_CUDA_ALLOC_CONF": ""}, False),
        (WSL2, {"PYTORCH_CUDA_ALLOC_CONF": ON, "PYTORCH_ALLOC_CONF": OFF}, True),
    ],
)
def test_the_allocator_of_a_device_does_as_the_setting_says(kernel, own, expandable):
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "GSQ_ALLOCATOR_POLICY")
    environ = {name: value for name, value in os.environ.items() if name not in names} | own
    code = USES_A_DEVICE.format(kernel=kernel)
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == str(expandable)
