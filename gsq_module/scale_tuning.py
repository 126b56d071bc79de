"""The quantized model as a whole with scales that can be trained, and the LightningModule that trains them.

Codes stay as they are. They take a byte a weight; a block's dense weights exist only while it is computed (activation
checkpointing).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from gsq_module import ranks
from gsq_module.quantization.grid import QuantizedWeight
from gsq_module.settings import FinalPass
from gsq_module.streaming.model import StreamedModel

LOGIT_TOKENS = 512
"""Positions whose logits of both models are compared at once."""


class ScaledLinear(nn.Module):
    """A quantized linear whose scales can be trained: each is the initial one times 1 + its gain.

    Args:
        linear: Gives the bias.
        weight: Codes and scales, on the device.
        dtype: Of the products.
    """

    def __init__(self, linear: nn.Linear, weight: QuantizedWeight, dtype: torch.dtype) -> None:
        super().__init__()
        # No buffers: DDP would send them at every step.
        self.initial, self.dtype = weight, dtype
        self.gain = nn.Parameter(torch.zeros(weight.scales.shape, dtype=torch.float32, device=weight.scales.device))
        self.bias = linear.bias

    def forward(self, inputs: Tensor) -> Tensor:
        """`[..., in_features]` -> `[..., out_features]`."""
        codes = self.initial.codes
        rows, groups = self.gain.shape
        scales = (self.initial.scales.float() * (1 + self.gain)).to(self.dtype)
        weight = codes.view(rows, groups, -1).to(self.dtype) * scales.unsqueeze(-1)
        return F.linear(inputs, weight.view(codes.shape), self.bias)

    @torch.no_grad()
    def hardened(self) -> QuantizedWeight:
        """Codes, and the scales as they are now in the export's dtype."""
        scales = self.initial.scales.float() * (1 + self.gain)
        return QuantizedWeight(self.initial.codes, scales.to(self.initial.scales.dtype))

    @torch.no_grad()
    def place(self, weight: QuantizedWeight) -> None:
        """Go on from other scales."""
        self.initial = weight
        self.gain.zero_()


@contextmanager
def quantized_whole(
    model: StreamedModel, weights: Mapping[str, QuantizedWeight], outer: Mapping[str, QuantizedWeight]
) -> Iterator[dict[str, ScaledLinear]]:
    """The model on the device whole, its quantized linears replaced by trainable ones, until the `with` block ends.

    Args:
        model: Nothing of it is loaded.
        weights: Codes and scales by module path; the linears that are replaced.
        outer: Hard weights of embedding and head, where these are quantized.
    """
    replaced: dict[str, nn.Linear] = {}
    with model.whole():
        try:
            for name, weight in outer.items():
                # Loaded whole, a tied head has a copy of its own.
                copies = [name, model.head_path] if name == model.embedding_path and model.is_tied else [name]
                for copy in copies:
                    with torch.no_grad():
                        model.model.get_submodule(copy).weight.copy_(weight.dequantize())
            scaled = {}
            for name in weights:
                parent, _, leaf = name.rpartition(".")
                owner = model.model.get_submodule(parent)
                replaced[name] = linear = owner._modules[leaf]
                scaled[name] = ScaledLinear(linear, weights[name].to(model.device), model.dtype)
                owner._modules[leaf] = scaled[name]
            for block in dict.fromkeys(model.blocks):  # one may stand in several places
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)
            yield scaled
        finally:
            for block in model.blocks:
                block.__dict__.pop("forward", None)
            for name, linear in replaced.items():
                parent, _, leaf = name.rpartition(".")
                model.model.get_submodule(parent)._modules[leaf] = linear


def divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """Sum over positions of KL(teacher || student); a float32 scalar.

    Args:
        student: Logits `[batch, length, vocabulary]`.
        teacher: The same of the original model.
    """
    parts = zip(student.flatten(0, 1).split(LOGIT_TOKENS), teacher.flatten(0, 1).split(LOGIT_TOKENS), strict=True)
    losses = [checkpoint(_divergence, ours, theirs, use_reentrant=False) for ours, theirs in parts]
    return torch.stack(losses).sum()


def _divergence(student: Tensor, teacher: Tensor) -> Tensor:
    ours, theirs = (logits.float().log_softmax(-1) for logits in (student, teacher))
    return F.kl_div(ours, theirs, reduction="sum", log_target=True)


class ScaleTuning(LightningModule):
    """Trains the gains of the scales.

    Args:
        student: Logits of the quantized model, its linears `ScaledLinear`, for tokens. The model is no part of this
            module: Lightning would move all of it, and what no token needs (a vision tower) has no weights.
        scaled: These, by module path.
        teacher: Logits of the original model, likewise.
        settings: Of the recipe.
        total_steps: Optimizer steps.
        step_offset: `trainer.global_step` before.
    """

    def __init__(
        self,
        student: Callable[[Tensor], Tensor],
        scaled: Mapping[str, ScaledLinear],
        teacher: Callable[[Tensor], Tensor],
        settings: FinalPass,
        total_steps: int,
        step_offset: int,
    ) -> None:
        super().__init__()
        self.student: Callable[[Tensor], Tensor] | None = student
        self.teacher, self.settings = teacher, settings
        self.total_steps, self.step_offset = total_steps, step_offset
        self.gains = nn.ParameterList(linear.gain.requires_grad_(True) for linear in scaled.values())

    @override
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.gains, lr=self.settings.lr, betas=(0.9, 0.95), weight_decay=0.0)
        final = self.settings.final_lr_fraction

        def factor(step: int) -> float:
            cosine = (1 + math.cos(math.pi * min(step, self.total_steps) / self.total_steps)) / 2
            return final + (1 - final) * cosine

        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": LambdaLR(optimizer, factor), "interval": "step"}}

    def mean_divergence(self, tokens: Tensor) -> Tensor:
        """KL(original || quantized) a token of `[batch, length]`."""
        assert self.student is not None
        with torch.no_grad():
            wanted = self.teacher(tokens)
        return divergence(self.student(tokens), wanted) / tokens.numel()

    @override
    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        loss = self.mean_divergence(batch[0])
        every = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        if every and (self.trainer.global_step + 1) % every == 0:
            self.log("train/divergence", loss.detach())
        return loss

    @torch.no_grad()
    def measure(self, batches: Iterable[tuple[Tensor, ...]], device: torch.device) -> float:
        """Mean divergence of the microbatches of all ranks."""
        total = torch.zeros(2, dtype=torch.float64, device=device)
        for (tokens,) in batches:
            total[0] += self.mean_divergence(tokens).double() * len(tokens)
            total[1] += len(tokens)
        divergences, samples = ranks.all_reduce_(total)
        return float(divergences / samples)

    @override
    def on_train_end(self) -> None:
        """Lightning's teardown would move the gains to the host."""
        self.gains = nn.ParameterList()
