"""The fused kernels against the eager path: in Triton's interpreter on a CPU, and on the device where there is one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from gsq_module.quantization.grid import GRIDS, Grid
from gsq_module.quantization.optimizer import RelaxedLion
from gsq_module.quantization.scales import round_to_nearest

pytest.importorskip("triton")

CASES = [
    # bits, rows, cols, group size: whole tiles, a padded group, a partial last tile, one group a row
    (1, 8, 64, 32),
    ("ternary", 5, 96, 48),
    (2, 16, 256, 64),
    (2, 3, 40, 40),
    (3, 7, 96, 32),
    (4, 6, 64, 16),
]


def make_pair(bits, rows, cols, group_size, logit_dtype, weight_dtype, device):
    """Two optimizers with equal state over equal weights: fused and eager."""
    grid: Grid = GRIDS[bits]
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(rows, cols, generator=generator).mul_(0.1)
    start = round_to_nearest(weight, grid, group_size, torch.bfloat16).to(device)
    made = []
    for fused in (True, False):
        param = torch.nn.Parameter(weight.to(device, weight_dtype, copy=True))
        optimizer = RelaxedLion([param], grid, lr=2e-3, scale_lr=1e-3, seed=3, logit_dtype=logit_dtype, fused=fused)
        optimizer.relax(param, start, "model.layers.0.mlp.up_proj")
        made.append((optimizer, param))
    return made


def check_agreement(device: str, steps: int = 5) -> None:
    """Equal noise, weights within one rounding of their dtype, equal codes after several steps."""
    for bits, rows, cols, group_size in CASES:
        for logit_dtype, weight_dtype in ((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)):
            (fused, a), (eager, b) = make_pair(bits, rows, cols, group_size, logit_dtype, weight_dtype, device)
            assert fused._is_fused(a)
            assert not eager._is_fused(b)
            # one unit in the last place: 2^-8 of a bfloat16, a few of a float32 after logarithms and exponentials
            tolerance = (
                {"rtol": 2.0**-7, "atol": 1e-6} if weight_dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-6}
            )
            torch.testing.assert_close(a.data, b.data, **tolerance)
            for step in range(steps):
                grad = torch.randn(rows, cols, generator=torch.Generator().manual_seed(step)).to(device, weight_dtype)
                for optimizer, param in ((fused, a), (eager, b)):
                    for group in optimizer.param_groups:
                        progress = step / (steps - 1)
                        group["temperature"], group["logit_scale"] = 2.0 - 1.95 * progress, 100.0 + 400.0 * progress
                    param.grad = grad.clone()
                    optimizer.step()
            first, second = fused.state[a], eager.state[b]
            assert first["step"] == second["step"] == steps
            assert first["draw"] == second["draw"]
            # Lion takes the sign of an update: one that is zero up to rounding may go either way.
            same = torch.isclose(first["logits"].float(), second["logits"].float(), rtol=1e-4, atol=1e-6)
            floor = 0.99 if logit_dtype == torch.bfloat16 else 0.999
            assert same.float().mean() > floor, (bits, logit_dtype, same.float().mean())
            assert torch.isclose(first["scales"], second["scales"], rtol=1e-4, atol=1e-6).float().mean() > 0.99
            codes = [o.harden(p, torch.bfloat16).codes for o, p in ((fused, a), (eager, b))]
            equal = (codes[0] == codes[1]).float().mean()
            # A bfloat16 momentum may be rounded the other way, and with it the sign of an update.
            assert equal == 1 if logit_dtype == torch.float32 else equal > 0.99, (bits, logit_dtype, equal)


def test_kernels_agree_in_the_interpreter():
    # Triton reads the variable when it is imported: a process of its own.
    code = "from tests.quantization.test_fused_kernels import check_agreement; check_agreement('cpu', steps=3)"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.mark.gpu
def test_kernels_agree_on_the_device():
    check_agreement("cuda", steps=50)
