"""The LightningModule: the recipe's model section, and the optimization of one unit at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jsonargparse.typing import ClosedUnitInterval, NonNegativeFloat, PositiveFloat, PositiveInt
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from gsq_module import ranks
from gsq_module.quantization.grid import GRIDS, Grid, QuantizedWeight
from gsq_module.quantization.optimizer import RelaxedLion, local_rows
from gsq_module.quantization.schedule import AnnealingSchedule
from gsq_module.quantization.training_ops import squared_error
from gsq_module.sharding import RowShards
from gsq_module.streaming.activations import Location

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}

Prepare = Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]
"""A loader's microbatch -> inputs and targets `[batch, seq_len, hidden_size]` and, where they differ, token weights."""


def cached_targets(microbatch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Where inputs and targets lie in stores, a microbatch is what is wanted of it."""
    return microbatch


@dataclass
class Refinement:
    """How long and how fast the codes of a unit are refined.

    Args:
        epochs: Passes over the training samples; 0 keeps the initial codes (GPTQ or round-to-nearest alone).
        lr: Lion step of a logit at the start. Neighbouring candidates start 0.03 apart; total travel is about half of
            lr x steps, so fewer steps want a larger lr.
        scale_lr: Lion step of a scale at the start, in units of the weight.
        final_lr_fraction: Both, at the last step, as a fraction of those at the first (cosine between).
        betas: Lion's factors of the update and of the momentum.
        weight_decay: Decoupled weight decay on the logits.
        temperature: Gumbel-softmax temperature at the first and the last step (linear between).
        logit_scale: Factor on the logits inside the softmax, likewise.
        init_std: Standard deviation of the initial logits' noise.
        init_strength: How far the initial code is preferred, in units of init_std.
        logit_dtype: `bfloat16` (half the memory, rounded stochastically) or `float32`.
    """

    epochs: int = 10
    lr: PositiveFloat = 2e-4
    scale_lr: NonNegativeFloat = 1e-4
    final_lr_fraction: ClosedUnitInterval = 0.1
    betas: tuple[ClosedUnitInterval, ClosedUnitInterval] = (0.9, 0.95)
    weight_decay: NonNegativeFloat = 1.0
    temperature: tuple[PositiveFloat, PositiveFloat] = (2.0, 0.05)
    logit_scale: tuple[PositiveFloat, PositiveFloat] = (100.0, 500.0)
    init_std: NonNegativeFloat = 0.01
    init_strength: NonNegativeFloat = 6.0
    logit_dtype: Literal["bfloat16", "float32"] = "bfloat16"

    def __post_init__(self) -> None:
        if self.epochs < 0:
            raise ValueError(f"model.refinement.epochs: {self.epochs} is negative; 0 means no refinement")


@dataclass
class UnitProblem:
    """What the module works on during one fit.

    Attributes:
        student: Unit (and post-norm): input `[batch, seq_len, hidden]` -> output to match the target.
        weights: The student's weights to refine, by module path.
        initial: Their initial codes and scales, in host memory.
        target_power: Mean square of the training targets, each token with its weight; losses are relative to it.
        total_steps: Optimizer steps of this fit.
        prepare: Makes inputs, targets and token weights `[batch, seq_len]`, if any, of a loader's microbatch.
        resize: Makes the student ready for microbatches of another size too; None where that cannot be.
        first_step: `trainer.global_step` of the fit's first step; None where the Trainer just goes on.
    """

    student: nn.Module
    weights: dict[str, nn.Parameter]
    initial: dict[str, QuantizedWeight]
    target_power: float
    total_steps: int
    prepare: Prepare = cached_targets
    resize: Callable[[int], None] | None = None
    first_step: int | None = None


class GSQModule(LightningModule):
    """Quantize a model's linear layers with GSQ, block by block.

    Args:
        path: Checkpoint: a folder, a hub repository (owner/name), or `package:NAME` for an installed Python package.
        gguf_file: Name of a GGUF file in it, to be converted; null for safetensors.
        bits: Bits of a weight: 1 ({-1,1}), ternary ({-1,0,1}), 2 ({-2..1}), 3 or 4.
        group_size: Input columns that share one scale. Must divide the input width of every quantized layer.
        units: What is quantized in each block, in this order: `attention` (every linear of the token mixer), `mlp`.
        ignore: Glob patterns of linears that stay in float. The defaults are tiny gates and routers.
        num_blocks: Quantize only the first N blocks (a trial); null for all.
        initializer: Where refinement starts: `gptq`, or `rtn` (round-to-nearest).
        signed_scales: Let scales be negative on lopsided grids. Free in every format, and it helps most at 2 bits.
        damping: GPTQ's damping, as a fraction of the Hessian's mean diagonal.
        target: What a unit's output is fitted to. `original_stream`: with its residual, the untouched model's hidden
            state there; it also mends errors made earlier, and needs a second store of hidden states. `original_unit`:
            the untouched unit's output on the quantized stream.
        targets: Where a unit's inputs and targets come from at each step; changes only memory and speed. `cached`: both
            from stores. `recomputed`: one store of hidden states less. With `target: original_stream` each microbatch
            passes the unit's norm again, and takes one difference, which costs next to nothing beside the unit. With
            `original_unit` it passes the original unit again, whose weights stay on the device beside the student's.
        token_weights: How much each token's error counts. `uniform`; or `inverse_square`: by the inverse mean square of
            the untouched model's hidden state there, as the next norm sees it. Some models give a few tokens hidden
            states a thousand times larger than all others (massive activations), and those few decide a uniform sum.
            Needs `target: original_stream`.
        measure_initial: Also run the initial quantization alone and report its perplexity. Costs one more pass.
        dtype: What blocks are computed in; `auto` is bfloat16 on CUDA, float32 on a CPU.
        kernels: `auto`: Triton's on CUDA. `eager`: plain torch everywhere, far slower, for an installation whose Triton
            does not work. The result is the same up to rounding.
        store: Where hidden states live: `device`, `memory` (host), `disk` (memory-mapped files in run_dir), or `auto`.
        snapshot_every: Also keep the hidden states in run_dir, every N blocks: a killed run then goes on from there,
            and not through all finished blocks. Takes disk for two sets of them. null: none.
        refinement: Steps, learning rates, annealing.
    """

    def __init__(
        self,
        path: str,
        gguf_file: str | None = None,
        bits: Literal[1, "ternary", 2, 3, 4] = 2,
        group_size: PositiveInt = 128,
        units: list[Literal["attention", "mlp"]] = ["attention", "mlp"],  # noqa: B006 - jsonargparse shows it in --help
        ignore: list[str] = ["*.in_proj_a", "*.in_proj_b", "*.gate", "*router*", "*.shared_expert_gate"],  # noqa: B006
        num_blocks: PositiveInt | None = None,
        initializer: Literal["gptq", "rtn"] = "gptq",
        signed_scales: bool = True,
        damping: PositiveFloat = 0.01,
        target: Literal["original_stream", "original_unit"] = "original_stream",
        targets: Literal["cached", "recomputed"] = "cached",
        token_weights: Literal["uniform", "inverse_square"] = "uniform",
        measure_initial: bool = True,
        dtype: Literal["auto", "bfloat16", "float16", "float32", "float64"] = "auto",
        kernels: Literal["auto", "eager"] = "auto",
        store: Location = "auto",
        snapshot_every: PositiveInt | None = None,
        refinement: Refinement = Refinement(),  # noqa: B008 - jsonargparse makes a copy
    ) -> None:
        super().__init__()
        if not units or len(set(units)) != len(units):
            raise ValueError(f"model.units: {units} must name attention, mlp, or each of them once")
        if token_weights == "inverse_square" and target != "original_stream":
            raise ValueError("model.token_weights=inverse_square needs model.target=original_stream")
        self.path = path
        self.gguf_file = gguf_file
        self.bits = bits
        self.group_size = group_size
        self.units = units
        self.ignore = ignore
        self.num_blocks = num_blocks
        self.initializer = initializer
        self.signed_scales = signed_scales
        self.damping = damping
        self.target = target
        self.targets = targets
        self.token_weights = token_weights
        self.measure_initial = measure_initial
        self.compute_dtype = dtype
        self.kernels = kernels
        self.store = store
        self.snapshot_every = snapshot_every
        self.refinement = refinement
        self.seed = 0
        self.student: nn.Module | None = None
        self.step_offset = 0
        self.refined: dict[str, QuantizedWeight] = {}
        self.shards: RowShards | None = None
        self._problem: UnitProblem | None = None

    @property
    def grid(self) -> Grid:
        return GRIDS[self.bits]

    def torch_dtype(self, device: torch.device) -> torch.dtype:
        """The dtype blocks are computed in on a device."""
        if self.compute_dtype != "auto":
            return DTYPES[self.compute_dtype]
        return torch.bfloat16 if device.type == "cuda" else torch.float32

    # --- one unit ----------------------------------------------------------------------------------------------------

    @property
    def problem(self) -> UnitProblem:
        assert self._problem is not None, "bind() comes before fit"
        return self._problem

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the unit at hand; 0 between units."""
        return self._problem.total_steps if self._problem is not None else 0

    def bind(self, problem: UnitProblem, step_offset: int) -> None:
        """Take up a unit. Its weights become the module's only trainable parameters.

        Args:
            problem: The unit.
            step_offset: `trainer.global_step` now.
        """
        self._problem = problem
        self.student = problem.student
        self.student.requires_grad_(False)
        for weight in problem.weights.values():
            weight.requires_grad_(True)
        self.step_offset = step_offset

    def release(self) -> None:
        """Drop the unit and all references to its tensors."""
        self.problem.student.requires_grad_(False)
        self._problem = None
        self.student = None

    def split(self, mesh: DeviceMesh) -> None:
        """Split the unit's weights by rows over the ranks of a mesh, until training ends."""
        self.shards = RowShards(self.problem.student, self.problem.weights, mesh)
        self.problem.weights = self.shards.weights

    @override
    def configure_optimizers(self) -> Any:
        settings = self.refinement
        optimizer = RelaxedLion(
            self.problem.weights.values(),
            self.grid,
            lr=settings.lr,
            scale_lr=settings.scale_lr,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            temperature=settings.temperature[0],
            logit_scale=settings.logit_scale[0],
            seed=self.seed,
            logit_dtype=DTYPES[settings.logit_dtype],
            fused=self.kernels == "auto",
        )
        for name, weight in self.problem.weights.items():
            start = self.problem.initial[name].to(weight.device)
            optimizer.relax(weight, start, name, settings.init_std, settings.init_strength)
        schedule = AnnealingSchedule(
            optimizer,
            self.problem.total_steps,
            final_temperature=settings.temperature[1],
            final_logit_scale=settings.logit_scale[1],
            final_lr_fraction=settings.final_lr_fraction,
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def relative_error(self, batch: tuple[Tensor, ...]) -> Tensor:
        """Squared error of the student on a batch, relative to the targets' mean square; a float32 scalar.

        Args:
            batch: A loader's microbatch, as the problem's `prepare` takes it.
        """
        inputs, targets, *weights = self.problem.prepare(batch)
        weight = next(iter(self.problem.weights.values()))
        output = self.problem.student(inputs.to(weight.dtype))
        return squared_error(output, targets, *weights) / self.problem.target_power

    @override
    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        loss = self.relative_error(batch)
        # Lightning copies what is logged about, and reads it where a progress bar wants it: only when it is written.
        every = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        if every and (self.trainer.global_step + 1) % every == 0:
            self.log("train/error", loss.detach())
        return loss

    @override
    @torch.no_grad()
    def on_validation_epoch_start(self) -> None:
        """Validation is done on hard codes."""
        optimizer = self._relaxed_lion()
        for name, weight in self.problem.weights.items():
            hard = optimizer.harden(weight, self.problem.initial[name].scales.dtype)
            local_rows(weight)[0].copy_(hard.dequantize())

    @override
    def validation_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> None:
        self.log("validation/error", self.relative_error(batch), batch_size=batch[0].shape[0], sync_dist=True)

    @override
    def on_validation_epoch_end(self) -> None:
        if self.shards is not None:
            self.shards.scatter()
        optimizer = self._relaxed_lion()
        for weight in self.problem.weights.values():
            optimizer.redraw(weight)

    @override
    def on_train_end(self) -> None:
        """Keep the result; drop optimizer state and student, which Lightning's teardown would move to the host."""
        for weight in self.problem.weights.values():
            weight.grad = None
        self.refined = {name: self.hard_weight(name).to("cpu") for name in self.problem.weights}
        self._relaxed_lion().state.clear()
        if self.shards is not None:
            self.problem.weights, self.shards = self.shards.join(), None
        self.student = None

    def _relaxed_lion(self) -> RelaxedLion:
        optimizer = self.optimizers(use_pl_optimizer=False)
        assert isinstance(optimizer, RelaxedLion)
        return optimizer

    def hard_weight(self, name: str) -> QuantizedWeight:
        """The most likely codes now, with scales in the export's dtype, on the device; whole, on all ranks."""
        weight = self.problem.weights[name]
        hard = self._relaxed_lion().harden(weight, self.problem.initial[name].scales.dtype)
        if self.shards is None:
            return hard
        rows = weight.shape[0]
        return QuantizedWeight(ranks.gather_rows(hard.codes, rows), ranks.gather_rows(hard.scales, rows))

    @torch.no_grad()
    def place(self, weights: dict[str, QuantizedWeight]) -> None:
        """Put hard weights into the student."""
        for name, weight in self.problem.weights.items():
            weight.copy_(weights[name].to(weight.device).dequantize())

    @torch.no_grad()
    def hard_error(self, weights: dict[str, QuantizedWeight], batches: Iterable[Any], device: torch.device) -> float:
        """Mean relative error of hard weights over the validation batches of all ranks; they stay in the student.

        Args:
            weights: Codes and scales by module path.
            batches: As `validation_step` takes them; those of this rank.
            device: Where the student is.
        """
        self.place(weights)
        total = torch.zeros(2, dtype=torch.float64, device=device)  # of errors, and samples
        for batch in batches:
            batch = tuple(tensor.to(device, non_blocking=True) for tensor in batch)
            total[0] += self.relative_error(batch).double() * len(batch[0])
            total[1] += len(batch[0])
        errors, samples = ranks.all_reduce_(total)
        return float(errors / samples)
