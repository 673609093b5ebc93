"""What training minimises and evaluation reports, for class labels and for tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from service.models.data import Samples
from service.parallel.mesh import SINGLE, Axis
from service.parallel.tensor import vocabulary_parallel_cross_entropy


@dataclass(frozen=True)
class Objective:
    """Cross entropy per sample (per token for sequences, which all have one length).

    ``axis`` divides the last dimension of the logits; ``per_token`` tells sequences from class labels.
    """

    per_token: bool
    axis: Axis = SINGLE

    def mean(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Mean loss over samples: class logits ``(batch, classes)``, token logits ``(batch, seq, vocabulary / tp)``."""
        if self.per_token:
            return vocabulary_parallel_cross_entropy(logits, targets, self.axis)
        return functional.cross_entropy(logits.float(), targets)

    def totals(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Sums over samples as float64 ``(2,)``: loss, and correct predictions (0 for tokens)."""
        if not len(targets):
            return torch.zeros(2, dtype=torch.float64, device=targets.device)
        loss = self.mean(logits, targets).double() * len(targets)
        correct = torch.zeros_like(loss) if self.per_token else (logits.argmax(-1) == targets).sum().double()
        return torch.stack((loss, correct))

    def summary(self, totals: Tensor, samples: int) -> dict[str, float]:
        """Evaluation metrics from the totals over all ranks."""
        loss, correct = (totals / samples).tolist()
        if not self.per_token:
            return {"eval_loss": loss, "eval_accuracy": correct}
        return {"eval_loss": loss, "eval_perplexity": math.exp(min(loss, 700.0))}


def is_per_token(samples: Samples) -> bool:
    return samples.sequence is not None
