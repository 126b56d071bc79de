"""The baseline: a refinement step as the published algorithm makes it (arXiv 2604.18556), in plain torch.

The logits of every candidate of every weight are the parameters. Each microbatch draws noise and builds the soft weight
inside autograd; gradients and momentum live in logit space.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from gsq_module.module import DTYPES, Refinement
from gsq_module.quantization.grid import Grid, QuantizedWeight
from gsq_module.quantization.noise import noise_key
from gsq_module.quantization.relaxation import initial_logits, row_chunks


def soft_weight(
    logits: Tensor, scales: Tensor, values: Tensor, noise: Tensor, temperature: float, logit_scale: float
) -> Tensor:
    """`scale * sum_k v_k p_k` with `p = softmax((logit_scale * logits + noise) / temperature)`.

    Args:
        logits: `[K, out_features, in_features]`.
        scales: `[out_features, groups]`.
        values: `[K, 1, 1]`, what the candidates stand for; with windows, `[K, out_features, in_features]`.
        noise: Gumbel variates of the logits' shape.

    Returns:
        `[out_features, in_features]` in the dtype of the logits.
    """
    p = torch.softmax((logit_scale * logits + noise) / temperature, dim=0)
    codes = (values * p).sum(0)
    grouped = codes.view(*scales.shape, -1)
    return (grouped * scales.to(codes.dtype).unsqueeze(-1)).view_as(codes)


def gumbel_like(logits: Tensor) -> Tensor:
    return torch.empty_like(logits).exponential_().log_().neg_()


class Lion(torch.optim.Optimizer):
    """Lion (arXiv 2302.06675) on ordinary parameters."""

    def __init__(self, groups: Iterable[dict[str, Any]], betas: tuple[float, float]) -> None:
        super().__init__(groups, {"betas": betas})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta_update, beta_momentum = group["betas"]
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["momentum"] = torch.zeros_like(param)
                momentum = state["momentum"]
                update = torch.lerp(param.grad, momentum, beta_update).sign_()
                param.mul_(1.0 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
                momentum.lerp_(param.grad, 1.0 - beta_momentum)


class LogitSpaceStep:
    """One optimizer step a call.

    Args:
        student: Of the unit, on the meta device: all its weights are replaced.
        initial: Codes and scales by module path (`mlp.` and the student's own name).
        device: Where logits and scales live.
        grid: Of the codes; without a window.
        settings: Learning rates and so on, as the recipe has them. The annealing stays at its start.
    """

    def __init__(
        self,
        student: nn.Module,
        initial: dict[str, QuantizedWeight],
        device: torch.device,
        grid: Grid,
        settings: Refinement,
    ) -> None:
        self.student = student
        self.temperature, self.logit_scale = settings.temperature[0], settings.logit_scale[0]
        dtype = DTYPES[settings.logit_dtype]
        self.logits = {
            name: logit_parameter(name, start.to(device), grid, settings, dtype) for name, start in initial.items()
        }
        self.scales = {name: nn.Parameter(start.scales.to(device).float()) for name, start in initial.items()}
        self.values = torch.arange(grid.low, grid.high + 1, grid.step, dtype=dtype, device=device).view(-1, 1, 1)
        decayed = {"params": list(self.logits.values()), "lr": settings.lr, "weight_decay": settings.weight_decay}
        others = {"params": list(self.scales.values()), "lr": settings.scale_lr, "weight_decay": 0.0}
        self.optimizer = Lion([decayed, others], settings.betas)

    def __call__(self, batches: list[tuple[Tensor, Tensor]]) -> None:
        """Args: batches: Inputs and targets `[microbatch, seq_len, hidden]` of each microbatch."""
        for index, (inputs, targets) in enumerate(batches):
            weights = {
                f"{name.removeprefix('mlp.')}.weight": soft_weight(
                    logits, self.scales[name], self.values, gumbel_like(logits), self.temperature, self.logit_scale
                ).to(inputs.dtype)
                for name, logits in self.logits.items()
            }
            output = torch.func.functional_call(self.student, weights, (inputs,))
            loss = nn.functional.mse_loss(output.float(), targets.float()) / len(batches)
            if index == 0:
                self.optimizer.zero_grad()
            loss.backward()
        self.optimizer.step()


def logit_parameter(
    name: str, start: QuantizedWeight, grid: Grid, settings: Refinement, dtype: torch.dtype, seed: int = 0
) -> nn.Parameter:
    """Logits `[K, out_features, in_features]` that prefer the initial codes, with the paper's noise."""
    rows, cols = start.codes.shape
    logits = torch.empty(grid.num_candidates, rows, cols, dtype=dtype, device=start.codes.device)
    first = grid.first_candidate(start.codes)
    key = noise_key(seed, name, "init")
    for chunk in row_chunks(rows, cols, grid.num_candidates, logits.device):
        logits[:, chunk] = initial_logits(
            start.codes[chunk], first[chunk], grid, key, chunk.start * cols, settings.init_std, settings.init_strength
        )
    return nn.Parameter(logits)
