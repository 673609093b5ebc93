"""Computes cross entropy, for class labels and for tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from service.jobs.plugins import Tokens
from service.jobs.spec.objective import CrossEntropy
from service.parallel.mesh import SINGLE, Axis
from service.parallel.tensor import vocabulary_parallel_cross_entropy
from service.training.objective.base import Objective, ObjectiveContext


@dataclass(frozen=True)
class ClassCrossEntropy(Objective):
    """Computes the cross-entropy of class logits ``(batch, classes)``; evaluation adds the accuracy."""

    measures: int = 2

    def mean(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs.to(torch.promote_types(outputs.dtype, torch.float32)), targets)

    def totals(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if not len(targets):
            return torch.zeros(self.measures, dtype=torch.float64, device=targets.device)
        loss = self.mean(outputs, targets).double() * len(targets)
        return torch.stack((loss, (outputs.argmax(-1) == targets).sum().double()))

    def summary(self, totals: Tensor, samples: int) -> dict[str, float]:
        loss, correct = (totals / samples).tolist()
        return {"eval_loss": loss, "eval_accuracy": correct}


@dataclass(frozen=True)
class _TokenCrossEntropy(Objective):
    """Computes the cross-entropy of token logits ``(batch, seq, vocabulary / size of axis)``; evaluation adds the
    perplexity.
    """

    axis: Axis = SINGLE
    measures: int = 1

    def mean(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return vocabulary_parallel_cross_entropy(outputs, targets, self.axis)

    def totals(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if not len(targets):
            return torch.zeros(self.measures, dtype=torch.float64, device=targets.device)
        return self.mean(outputs, targets).double().unsqueeze(0) * len(targets)

    def summary(self, totals: Tensor, samples: int) -> dict[str, float]:
        loss = totals.item() / samples
        return {"eval_loss": loss, "eval_perplexity": math.exp(min(loss, 700.0))}


def cross_entropy(config: CrossEntropy, context: ObjectiveContext) -> Objective:
    return _TokenCrossEntropy(context.axis) if isinstance(context.samples, Tokens) else ClassCrossEntropy()
