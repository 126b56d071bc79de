"""GSQ as an optimizer over relaxed weights: the parameter is one Gumbel-softmax sample, all else is optimizer state.

`step()` turns the accumulated dL/dweight into gradients of logits and scales, applies Lion to both, and draws the next
sample into the parameter. Gradient accumulation, data parallelism and sharding therefore see an ordinary weight
(design.md, "The one idea").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from gsq_module.quantization.grid import Grid, QuantizedWeight
from gsq_module.quantization.noise import noise_key, random_bits, round_to_bfloat16
from gsq_module.quantization.relaxation import (
    Draw,
    gradient_chunk,
    hard_codes,
    initial_logits,
    row_chunks,
    sample_chunk,
)

try:
    from gsq_module.quantization import kernels
except ImportError:  # Triton comes with PyTorch's CUDA builds; without it there is no CUDA device to use it on
    kernels = None  # type: ignore[assignment]


class RelaxedLion(torch.optim.Optimizer):
    """Lion (arXiv 2302.06675) over the logits and scales behind relaxed weights.

    Args:
        params: Weights `[out_features, in_features]` of linear layers. Each must be given its codes by `relax` before
            the first step.
        grid: The grid all of them are quantized to.
        lr: Step of a logit. Total logit travel is about lr x steps; neighbouring candidates start 0.03 apart.
        scale_lr: Step of a scale, in units of the weight.
        betas: Lion's interpolation factors of the update and of the momentum.
        weight_decay: Decoupled decay, on logits only.
        temperature: Gumbel-softmax temperature; annealed by `AnnealingSchedule`.
        logit_scale: Factor on the logits inside the softmax; annealed likewise.
        seed: Root of the noise.
        fused: Use the Triton kernels where they can serve (CUDA). Off, every device takes the eager path.
        logit_dtype: bfloat16 (rounded stochastically: late in the schedule a step is under half an ulp) or float32.

    Raises:
        ValueError: A logit dtype other than the two (float64 serves the tests).
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        grid: Grid,
        lr: float = 2e-4,
        scale_lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 1.0,
        temperature: float = 2.0,
        logit_scale: float = 100.0,
        seed: int = 0,
        logit_dtype: torch.dtype = torch.bfloat16,
        fused: bool = True,
    ) -> None:
        if logit_dtype not in (torch.bfloat16, torch.float32, torch.float64):
            raise ValueError(f"logit_dtype={logit_dtype}: must be torch.bfloat16 or torch.float32")
        self.grid = grid
        self.seed = seed
        self.logit_dtype = logit_dtype
        self.fused = fused
        defaults = {
            "lr": lr,
            "scale_lr": scale_lr,
            "betas": betas,
            "weight_decay": weight_decay,
            "temperature": temperature,
            "logit_scale": logit_scale,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def relax(
        self,
        param: Tensor,
        start: QuantizedWeight,
        name: str,
        init_std: float = 0.01,
        init_strength: float = 6.0,
        rows: slice | None = None,
    ) -> None:
        """Set up the state behind one weight from its initial codes and scales, and draw the first sample into it.

        Args:
            param: One of the optimizer's parameters, `[out_features, in_features]`.
            start: Initial codes and scales of the whole weight, on the same device.
            name: Name of the weight, unique in the model: part of the noise's key.
            init_std: Standard deviation of the initial logits' noise.
            init_strength: Preference for the initial code, in units of `init_std`.
            rows: Consecutive rows, maybe none, that this process has the state of; all of them if None. It reads and
                writes these rows of weight and gradient only.
        """
        assert param.shape == start.codes.shape, (name, tuple(param.shape), tuple(start.codes.shape))
        state = self.state[param]
        first_row, end, _ = (rows or slice(None)).indices(len(param))
        start = QuantizedWeight(start.codes[first_row:end], start.scales[first_row:end])
        num_rows, cols = start.codes.shape
        k = self.grid.num_candidates
        if self.grid.is_windowed:
            first = self.grid.first_candidate(start.codes)
        else:
            # One number serves all weights; kept as a broadcast view, it takes no memory.
            first = start.codes.new_full((1, 1), self.grid.low).expand(num_rows, cols)
        logits = torch.empty(k, num_rows, cols, dtype=self.logit_dtype, device=param.device)
        key = noise_key(self.seed, name, "init")
        for chunk in row_chunks(num_rows, cols, k, param.device):
            logits[:, chunk] = initial_logits(
                start.codes[chunk],
                first[chunk],
                self.grid,
                key,
                (first_row + chunk.start) * cols,
                init_std,
                init_strength,
            )
        master = torch.float64 if self.logit_dtype == torch.float64 else torch.float32
        state["name"] = name
        state["first_row"] = first_row
        state["step"] = 0
        state["logits"] = logits
        state["momentum"] = torch.zeros_like(logits)
        state["first"] = first
        state["scales"] = start.scales.to(master, copy=True)
        state["scale_momentum"] = torch.zeros_like(state["scales"])
        state["draw"] = tuple(self._next_draw(state, self._group_of(param)))
        self.redraw(param)

    def _group_of(self, param: Tensor) -> dict[str, Any]:
        return next(group for group in self.param_groups if any(p is param for p in group["params"]))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up a saved state as it is. The parameters' samples are the model's to restore; `redraw` gives them too.

        Torch's own way would cast logits, scales and candidates to each parameter's dtype, and take names apart.
        """
        super().load_state_dict({**state_dict, "state": {}})
        params = [param for group in self.param_groups for param in group["params"]]
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        for index, param in zip(indices, params, strict=True):
            if index in state_dict["state"]:
                self.state[param] = {
                    key: value.to(param.device) if isinstance(value, Tensor) else value
                    for key, value in state_dict["state"][index].items()
                }

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of logits and scales, then the next sample. A weight without gradient keeps its sample."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                assert "logits" in self.state[param], "relax() must give every weight its codes before the first step"
                state = self.state[param]
                state["step"] += 1
                draw = self._next_draw(state, group)
                local = self._local_rows(param)
                if not len(local):
                    continue
                if self._is_fused(param):
                    kernels.update_and_sample(local, state, self.grid, draw, group, state["first_row"] * local.shape[1])
                    state["draw"] = tuple(draw)  # torch.load reads no other classes by default
                else:
                    self._update(local, state["first_row"], state, group, draw)
                    state["draw"] = tuple(draw)
                    self.redraw(param)
        return loss

    def _local_rows(self, param: Tensor) -> Tensor:
        """The rows that this process has the state of, with their gradient."""
        state = self.state[param]
        rows = slice(state["first_row"], state["first_row"] + state["logits"].shape[1])
        local = param.detach()[rows]
        if param.grad is not None:
            local.grad = param.grad[rows]
        return local

    def _is_fused(self, param: Tensor) -> bool:
        usable = self.fused and kernels is not None
        return usable and kernels.usable(param, self.state[param]["logits"])

    def _next_draw(self, state: dict[str, Any], group: dict[str, Any]) -> Draw:
        key = noise_key(self.seed, state["name"], state["step"], "gumbel")
        return Draw(key, group["temperature"], group["logit_scale"])

    def _update(
        self, local: Tensor, first_row: int, state: dict[str, Any], group: dict[str, Any], next_draw: Draw
    ) -> None:
        """Lion on logits and scales, with the gradient of the sample at hand."""
        logits, momentum = state["logits"], state["momentum"]
        k, rows, cols = logits.shape
        beta_update, beta_momentum = group["betas"]
        scale_grad = torch.empty_like(state["scales"])
        for chunk in row_chunks(rows, cols, k, local.device, state["scales"].element_size()):
            start = (first_row + chunk.start) * cols
            grad, scale_grad[chunk] = gradient_chunk(
                local.grad[chunk],  # type: ignore[index]
                logits[:, chunk],
                state["scales"][chunk],
                state["first"][chunk],
                self.grid,
                Draw(*state["draw"]),
                start,
            )
            old = momentum[:, chunk].to(grad.dtype)
            values = logits[:, chunk].to(grad.dtype, copy=True).mul_(1.0 - group["lr"] * group["weight_decay"])
            values.add_(torch.lerp(grad, old, beta_update).sign_(), alpha=-group["lr"])
            momentum[:, chunk] = torch.lerp(grad, old, beta_momentum, out=grad)
            if self.logit_dtype == torch.bfloat16:
                bits = random_bits(next_draw.key, start, values[0].numel(), k, values.device)[-1]
                values = round_to_bfloat16(values, bits.view_as(values[0]))
            logits[:, chunk] = values
        update = torch.lerp(scale_grad, state["scale_momentum"], beta_update)
        state["scales"].add_(update.sign_(), alpha=-group["scale_lr"])
        state["scale_momentum"].lerp_(scale_grad, 1.0 - beta_momentum)

    @torch.no_grad()
    def redraw(self, param: Tensor) -> None:
        """Write the current sample into the parameter again, exactly (after hard weights stood there)."""
        state = self.state[param]
        local, first_row = self._local_rows(param), state["first_row"]
        k, rows, cols = state["logits"].shape
        if rows and self._is_fused(param):
            draw, start = Draw(*state["draw"]), first_row * cols
            kernels.sample(local, state["logits"], state["scales"], state["first"], self.grid, draw, start)
            return
        for chunk in row_chunks(rows, cols, k, local.device, state["scales"].element_size()):
            local[chunk] = sample_chunk(
                state["logits"][:, chunk],
                state["scales"][chunk],
                state["first"][chunk],
                self.grid,
                Draw(*state["draw"]),
                (first_row + chunk.start) * cols,
            ).to(param.dtype)

    @torch.no_grad()
    def harden(self, param: Tensor, scale_dtype: torch.dtype) -> QuantizedWeight:
        """The most likely codes, and the scales rounded to the export's dtype (design.md, contract 2); local rows."""
        state = self.state[param]
        k, rows, cols = state["logits"].shape
        codes = torch.empty(rows, cols, dtype=torch.int8, device=param.device)
        for chunk in row_chunks(rows, cols, k, param.device):
            codes[chunk] = hard_codes(state["logits"][:, chunk], state["first"][chunk], self.grid)
        return QuantizedWeight(codes, state["scales"].to(scale_dtype, copy=True))
