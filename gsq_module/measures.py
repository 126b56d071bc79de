"""What a model is measured by: perplexity, and how far its predictions are from the original model's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torchmetrics
import torchmetrics.text
from torch import Tensor


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


class Meter:
    """torchmetrics' figures of one model on one text, fed with logits part by part.

    Args:
        device: Where the logits are.
        compares: Whether the original model's logits come too.
        of_all_ranks: Whether `compute`, which all ranks then call, is of the predictions of all of them.
    """

    def __init__(self, device: torch.device, compares: bool = False, of_all_ranks: bool = False) -> None:
        sync = {"sync_on_compute": of_all_ranks}
        self._perplexity = torchmetrics.text.Perplexity(**sync).to(device)  # type: ignore[arg-type]
        self._divergence = self._agreement = None
        if compares:
            self._divergence = torchmetrics.KLDivergence(log_prob=True, **sync).to(device)  # type: ignore[arg-type]
            self._agreement = torchmetrics.MeanMetric(nan_strategy="disable", **sync).to(device)

    def update(self, logits: Tensor, targets: Tensor, original: Tensor | None = None) -> None:
        """Add predictions.

        Args:
            logits: float32 `[batch, length, vocabulary]`. Overwritten where it is compared.
            targets: int64 `[batch, length]`, the token that follows each position.
            original: The original model's logits, likewise.
        """
        self._perplexity.update(logits, targets)
        if original is not None:
            assert self._divergence is not None
            assert self._agreement is not None
            self._agreement.update(logits.argmax(-1) == original.argmax(-1))
            self._divergence.update(*(_log_softmax_(part).flatten(0, 1) for part in (original, logits)))

    def compute(self) -> Measured:
        perplexity = float(self._perplexity.compute())
        if self._divergence is None or self._agreement is None:
            return Measured(perplexity)
        return Measured(perplexity, float(self._divergence.compute()), float(self._agreement.compute()))


def _log_softmax_(logits: Tensor) -> Tensor:
    """In place: with a large vocabulary a copy would be hundreds of megabytes."""
    return logits.sub_(logits.logsumexp(-1, keepdim=True))
