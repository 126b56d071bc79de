"""The LightningModule: the recipe's model section, and the optimization of one unit at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jsonargparse.typing import PositiveFloat, PositiveInt
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from typing_extensions import override

from gsq_module import ranks
from gsq_module.quantization.grid import GRIDS, Grid, QuantizedWeight
from gsq_module.quantization.optimizer import RelaxedLion
from gsq_module.quantization.schedule import AnnealingSchedule
from gsq_module.quantization.training_ops import squared_error
from gsq_module.settings import FinalPass, Refinement
from gsq_module.streaming.activations import Location
from gsq_module.unit_targets import Prepare, cached_targets

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}


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
        embedding_bits: Also quantize the embedding, to 4 or 8 bits by rounding; null keeps it in float. In a tied
            model, whose head is the embedding, that quantizes both, and the export holds them one by one.
        head_bits: Also quantize the head, to 4 or 8 bits by GPTQ on its own inputs (`initializer: rtn`: by rounding).
        outer_group_size: Input columns that share one scale in embedding and head; null for 128, 64 or 32, the largest
            of them that divides the hidden size.
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
        final_pass: Training of all scales together at the end.
    """

    def __init__(
        self,
        path: str,
        gguf_file: str | None = None,
        bits: Literal[1, "ternary", 2, 3, 4] = 2,
        group_size: PositiveInt = 128,
        units: list[Literal["attention", "mlp"]] = ["attention", "mlp"],  # noqa: B006 - jsonargparse shows it in --help
        ignore: list[str] = ["*.in_proj_a", "*.in_proj_b", "*.gate", "*router*", "*.shared_expert_gate"],  # noqa: B006
        embedding_bits: Literal[4, 8] | None = None,
        head_bits: Literal[4, 8] | None = None,
        outer_group_size: PositiveInt | None = None,
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
        final_pass: FinalPass = FinalPass(),  # noqa: B008
    ) -> None:
        super().__init__()
        if not units or len(set(units)) != len(units):
            raise ValueError(f"model.units: {units} must name attention, mlp, or each of them once")
        if not set(refinement.units or ()) <= set(units):
            raise ValueError(f"model.refinement.units: {refinement.units} must be among model.units, {units}")
        if token_weights == "inverse_square" and target != "original_stream":
            raise ValueError("model.token_weights=inverse_square needs model.target=original_stream")
        self.path = path
        self.gguf_file = gguf_file
        self.bits = bits
        self.group_size = group_size
        self.units = units
        self.ignore = ignore
        self.embedding_bits = embedding_bits
        self.head_bits = head_bits
        self.outer_group_size = outer_group_size
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
        self.final_pass = final_pass
        self.seed = 0
        self.student: nn.Module | None = None
        self.step_offset = 0
        self.refined: dict[str, QuantizedWeight] = {}
        self.rows_are_split = False
        self._problem: UnitProblem | None = None

    @property
    def grid(self) -> Grid:
        return GRIDS[self.bits]

    def refines(self, unit: str) -> bool:
        """Whether units of this kind are refined, rather than left with their initial codes."""
        return self.refinement.epochs > 0 and (self.refinement.units is None or unit in self.refinement.units)

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

    def split_rows(self) -> None:
        """From now to the end of the fit this rank has the state behind its own rows of each weight only."""
        self.rows_are_split = True

    @torch.no_grad()
    def gather_rows(self) -> None:
        """Let all ranks have all rows of the weights again, where each has changed its own."""
        if self.rows_are_split:
            for weight in self.problem.weights.values():
                ranks.gather_rows_(weight.data)

    def _own_rows(self, weight: Tensor) -> slice:
        return ranks.row_share(len(weight)) if self.rows_are_split else slice(0, len(weight))

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
            own = self._own_rows(weight)
            optimizer.relax(weight, start, name, settings.init_std, settings.init_strength, own)
        self.gather_rows()
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
            weight[self._own_rows(weight)] = hard.dequantize()
        self.gather_rows()

    @override
    def validation_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> None:
        self.log("validation/error", self.relative_error(batch), batch_size=batch[0].shape[0], sync_dist=True)

    @override
    def on_validation_epoch_end(self) -> None:
        optimizer = self._relaxed_lion()
        for weight in self.problem.weights.values():
            optimizer.redraw(weight)
        self.gather_rows()

    @override
    def on_train_end(self) -> None:
        """Keep the result; drop optimizer state and student, which Lightning's teardown would move to the host."""
        for weight in self.problem.weights.values():
            weight.grad = None
        self.refined = {name: self.hard_weight(name).to("cpu") for name in self.problem.weights}
        self._relaxed_lion().state.clear()
        self.student, self.rows_are_split = None, False

    def _relaxed_lion(self) -> RelaxedLion:
        optimizer = self.optimizers(use_pl_optimizer=False)
        assert isinstance(optimizer, RelaxedLion)
        return optimizer

    def hard_weight(self, name: str) -> QuantizedWeight:
        """The most likely codes now, with scales in the export's dtype, on the device; whole, on all ranks."""
        weight = self.problem.weights[name]
        hard = self._relaxed_lion().harden(weight, self.problem.initial[name].scales.dtype)
        if not self.rows_are_split:
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
