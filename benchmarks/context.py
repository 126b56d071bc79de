"""What all parts share: shape, device, the unit under measurement, and the floor its steps are compared with."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Final

import torch
from measure import SkippedError, free_memory, seconds_of
from shapes import Batch, Shape
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from gsq_module.module import DTYPES, GSQModule, UnitProblem
from gsq_module.quantization.grid import GRIDS, QuantizedWeight

BITS: Final = 2
GRID = GRIDS[BITS]
STEPS_OF_THE_SCHEDULE = 10_000
"""More than any measurement takes: all of them stay at the start of the annealing."""


def interpreted() -> bool:
    """Whether Triton runs its kernels in its interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@dataclass
class Bench:
    """One run of the benchmark.

    Attributes:
        shape: Of the MLP.
        device: Where.
        dtype: Of the relaxed weights and the activations, as the product chooses it for the device.
    """

    shape: Shape
    device: torch.device
    dtype: torch.dtype = field(init=False)
    _rates: dict[int, dict[str, float]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.dtype = GSQModule(path="unused").torch_dtype(self.device)

    def require_kernels(self) -> None:
        """Skip where the fused kernels cannot run."""
        if self.device.type != "cuda" and not interpreted():
            raise SkippedError("the kernels need CUDA (for a test: TRITON_INTERPRET=1 with --shape tiny)")
        if find_spec("triton") is None:
            raise SkippedError("the kernels need Triton, which is not installed: pip install triton")

    def refuse_interpreter(self) -> None:
        """Skip what would only measure Triton's interpreter, for minutes."""
        if self.device.type == "cpu" and interpreted():
            raise SkippedError("Triton's interpreter takes so long that nothing else shows")

    def seconds_of(self, call: Callable[[], object]) -> float:
        """Median seconds of a call, measured as long as the shape says."""
        return seconds_of(call, self.device, self.shape.seconds)

    def generator(self) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(0)

    def microbatch(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Inputs and targets `[microbatch, seq_len, hidden]`."""
        size = (batch.microbatch, batch.seq_len, self.shape.hidden)
        random = self.generator()
        inputs, targets = (
            torch.randn(size, generator=random, device=self.device, dtype=self.dtype) for _ in ("inputs", "targets")
        )
        return inputs, targets

    # --- the floor ---------------------------------------------------------------------------------------------------

    def matmul_rates(self, tokens: int) -> dict[str, float]:
        """FLOP/s of the unit's matrix products over so many tokens at once, by their purpose. Measured once.

        `input_gradient` is that of down alone: nothing needs the gradient of the unit's own input.
        """
        if tokens not in self._rates:
            self._rates[tokens] = self._measure_rates(tokens)
            free_memory(self.device)
        return self._rates[tokens]

    def _measure_rates(self, tokens: int) -> dict[str, float]:
        random = self.generator()

        def matrix(rows: int, cols: int) -> Tensor:
            return torch.randn(rows, cols, generator=random, device=self.device, dtype=self.dtype)

        weights = [matrix(*size) for size in self.shape.linears.values()]
        inputs = {width: matrix(tokens, width) for width in (self.shape.hidden, self.shape.intermediate)}
        down = weights[-1]
        purposes = {
            "forward": lambda: [nn.functional.linear(inputs[weight.shape[1]], weight) for weight in weights],
            "input_gradient": lambda: inputs[down.shape[0]] @ down,
            "weight_gradient": lambda: [inputs[weight.shape[0]].T @ inputs[weight.shape[1]] for weight in weights],
        }
        multiplied = dict.fromkeys(purposes, self.shape.weights) | {"input_gradient": down.numel()}
        return {purpose: 2 * multiplied[purpose] * tokens / self.seconds_of(call) for purpose, call in purposes.items()}

    def floor_seconds(self, batch: Batch) -> float:
        """6 x weights x tokens at the rate of the forward products: what a step would take with nothing around them."""
        return 6 * self.shape.weights * batch.tokens / self.matmul_rates(batch.microbatch_tokens)["forward"]


def initial_weights(shape: Shape, device: torch.device) -> dict[str, QuantizedWeight]:
    """Random codes of the grid with the scales of an ordinary layer, by module path; in host memory."""
    random = torch.Generator(device).manual_seed(0)
    return {
        f"mlp.{name}": QuantizedWeight(
            torch.randint(GRID.low, GRID.high + 1, size, generator=random, device=device, dtype=torch.int8),
            torch.full((size[0], size[1] // shape.group_size), 0.02, dtype=torch.bfloat16, device=device),
        ).to("cpu")
        for name, size in shape.linears.items()
    }


def empty_student(shape: Shape, device: torch.device | str, dtype: torch.dtype) -> LlamaMLP:
    """transformers' SwiGLU MLP, `down(silu(gate(x)) * up(x))`, without values: the optimizer draws them."""
    config = LlamaConfig(hidden_size=shape.hidden, intermediate_size=shape.intermediate)
    with torch.device("meta"):
        student = LlamaMLP(config)
    return student.to(dtype).to_empty(device=device)


def bound_module(shape: Shape, device: torch.device, dtype: torch.dtype) -> GSQModule:
    """The product's module with one unit to refine."""
    module = GSQModule(path="unused", bits=BITS, group_size=shape.group_size)
    module.bind(make_problem(shape, device, dtype), step_offset=0)
    return module


def make_problem(
    shape: Shape, device: torch.device, dtype: torch.dtype, steps: int = STEPS_OF_THE_SCHEDULE
) -> UnitProblem:
    """The unit as the block loop would hand it over; random targets of power 1."""
    student = empty_student(shape, device, dtype)
    weights = {f"mlp.{name}": student.get_parameter(f"{name}.weight") for name in shape.linears}
    return UnitProblem(student, weights, initial_weights(shape, device), 1.0, steps)


def logit_dtype(module: GSQModule) -> torch.dtype:
    return DTYPES[module.refinement.logit_dtype]
