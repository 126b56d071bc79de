"""What a model is measured by: perplexity, and how far its predictions are from the original model's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torchmetrics
from torch import Tensor

Where = tuple[slice, slice]


@dataclass(frozen=True)
class Measured:
    """Figures of one model on one text.

    Attributes:
        perplexity: Of the text.
        kl_divergence: Mean over the positions of KL(original || model) between their predictions of the next token, in
            nats; None where there is no original to compare with.
        top1_agreement: Fraction of the positions at which both find the same token most likely; None likewise.
    """

    perplexity: float
    kl_divergence: float | None = None
    top1_agreement: float | None = None


class Predictions:
    """What a model predicts at each position of a text, and the original model beside it, taken in by parts.

    Parts are positions, and tokens of the vocabulary: of a large one neither the head nor its logits need be whole on
    the device. A softmax is summed as it comes, with the highest logit so far taken out.

    Args:
        shape: Samples and positions of the text.
        device: Where the logits are.
        compares: Whether the original model's logits come too.
    """

    def __init__(self, shape: tuple[int, int], device: torch.device, compares: bool = False) -> None:
        self._target = torch.zeros(shape, device=device)
        self._own = _RunningSoftmax(shape, device)
        self._original = _RunningSoftmax(shape, device) if compares else None
        self._divergence = torch.zeros(shape, device=device)
        """Sum over the tokens of exp(original - its highest) x (original - own logit)."""

    def update(self, where: Where, logits: Tensor, targets: Tensor, original: Tensor | None = None, first: int = 0):
        """Add logits of consecutive tokens.

        Args:
            where: Samples and positions.
            logits: float32 `[samples, positions, tokens]`.
            targets: int64 `[samples, positions]`, the token that follows each position.
            original: The original model's logits, likewise; overwritten.
            first: Number of the first token.
        """
        places = targets - first
        within = (places >= 0) & (places < logits.shape[-1])
        found = logits.gather(-1, places.clamp(0, logits.shape[-1] - 1).unsqueeze(-1)).squeeze(-1)
        self._target[where] = torch.where(within, found, self._target[where])
        self._own.update(where, logits, first)
        if original is not None:
            assert self._original is not None
            weights, shrunk = self._original.update(where, original, first)
            divergence = weights.mul_(original.sub_(logits)).sum(-1)
            self._divergence[where] = self._divergence[where] * shrunk + divergence

    def measured(self, of_all_ranks: bool = False) -> Measured:
        """Figures over all positions.

        Args:
            of_all_ranks: Whether they are of the positions of all ranks, which then all call it.
        """

        def mean(values: Tensor) -> float:
            metric = torchmetrics.MeanMetric(nan_strategy="disable", sync_on_compute=of_all_ranks).to(values.device)
            metric.update(values)
            return float(metric.compute())

        own, original = self._own, self._original
        loss = torch.tensor(mean(own.logsumexp() - self._target))
        if original is None:
            return Measured(float(loss.exp()))
        divergence = self._divergence / original.total - original.logsumexp() + own.logsumexp()
        return Measured(float(loss.exp()), mean(divergence), mean((own.token == original.token).float()))


class _RunningSoftmax:
    """Sums of exponentials over the tokens that have come so far.

    Attributes:
        highest: The highest logit `[samples, positions]`.
        token: Its token.
        total: Sum of exp(logit - highest).
    """

    def __init__(self, shape: tuple[int, int], device: torch.device) -> None:
        self.highest = torch.full(shape, -torch.inf, device=device)
        self.token = torch.zeros(shape, dtype=torch.int64, device=device)
        self.total = torch.zeros(shape, device=device)

    def update(self, where: Where, logits: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Returns exp(logits - highest), and by what sums of earlier tokens have to be multiplied."""
        high, token = logits.max(-1)
        before = self.highest[where]
        highest = torch.maximum(before, high)
        weights = (logits - highest.unsqueeze(-1)).exp_()
        shrunk = (before - highest).exp()
        self.token[where] = torch.where(high > before, token + first, self.token[where])
        self.total[where] = self.total[where] * shrunk + weights.sum(-1)
        self.highest[where] = highest
        return weights, shrunk

    def logsumexp(self) -> Tensor:
        return self.highest + self.total.log()
