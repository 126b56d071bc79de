"""The kernels of scale search and GPTQ against the eager path: in Triton's interpreter, and on the device."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from gsq_module.quantization import rounding_kernels
from gsq_module.quantization.gptq import gptq
from gsq_module.quantization.grid import GRIDS, OUTER_GRIDS
from gsq_module.quantization.hessian import Hessian
from gsq_module.quantization.scales import round_to_nearest, search_scales

pytest.importorskip("triton")

CASES = [
    # bits, rows, cols, group size: a partial last program, a padded group, a group longer than a block, one group a row
    (1, 6, 64, 16),
    ("ternary", 5, 96, 48),
    (2, 3, 160, 160),
    (3, 4, 40, 40),
    (4, 5, 48, 16),
    (8, 5, 96, 32),
]


def on_both_paths(monkeypatch, make):
    """What `make()` gives with the kernels, and without."""
    fused = make()
    with monkeypatch.context() as patch:
        patch.setattr(rounding_kernels, "usable", lambda weight: False)
        return fused, make()


def check_agreement(device: str, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    for bits, rows, cols, group_size in CASES:
        grid = (GRIDS | OUTER_GRIDS)[bits]
        generator = torch.Generator().manual_seed(rows)
        weight = torch.randn(rows, cols, generator=generator).mul_(0.1).to(device)
        weight[0, 3] = 3.0
        inputs = torch.randn(3 * cols, cols, generator=generator)
        inputs[:, 1:] += inputs[:, :-1]
        hessian = Hessian("linear", cols, device)
        hessian.add(inputs.to(device))
        assert rounding_kernels.usable(weight)
        assert rounding_kernels.usable(weight.view(rows, -1, group_size))
        for signed in (True, False):
            grouped = weight.view(rows, -1, group_size)
            ours, theirs = on_both_paths(monkeypatch, lambda w=grouped, s=signed, g=grid: search_scales(w, g, dtype, s))
            # A tie of two scales may be decided by the last bit of a sum; what counts is the error.
            errors = [
                (g_ - grid.nearest(g_ / s.float().unsqueeze(-1)) * s.float().unsqueeze(-1)).square().sum(-1)
                for g_, s in ((grouped, ours), (grouped, theirs))
            ]
            torch.testing.assert_close(errors[0], errors[1], rtol=1e-4, atol=1e-9)
        ours, theirs = on_both_paths(
            monkeypatch,
            lambda w=weight, h=hessian, g=grid, n=group_size: gptq(w, h, g, n, dtype).weight,
        )
        equal = (ours.codes == theirs.codes).all(1) & (ours.scales == theirs.scales).all(1)
        assert equal.float().mean() >= 0.6, (grid.name, rows, cols, group_size)
        found = [(w.dequantize().float() - weight) for w in (ours, theirs)]
        first, second = [((d @ hessian.matrix) * d).sum() for d in found]
        assert float(first) == pytest.approx(float(second), rel=0.03)
        rounded, expected = on_both_paths(
            monkeypatch, lambda w=weight, g=grid, n=group_size: round_to_nearest(w, g, n, dtype)
        )
        assert (rounded.codes == expected.codes).float().mean() > 0.99


def test_kernels_agree_in_the_interpreter():
    # Triton reads the variable when it is imported: a process of its own. Its interpreter truncates to bfloat16.
    code = (
        "import pytest, torch; from tests.quantization.test_rounding_kernels import check_agreement;"
        "patch = pytest.MonkeyPatch(); check_agreement('cpu', patch, torch.float16)"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.mark.gpu
def test_kernels_agree_on_the_device(monkeypatch: pytest.MonkeyPatch):
    check_agreement("cuda", monkeypatch, torch.bfloat16)
