"""Computes cross entropy, for class labels and for tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from service.jobs.plugins import IGNORED, Tokens
from service.jobs.spec.objective import CrossEntropy
from service.objectives.base import Objective, ObjectiveContext
from service.parallel.mesh import SINGLE, Axis
from service.parallel.tensor import cross_entropy, vocabulary_parallel_cross_entropy


@dataclass(frozen=True)
class ClassCrossEntropy(Objective):
    """Computes the cross-entropy of class logits ``(batch, classes)``; evaluation adds the accuracy."""

    measures: int = 3
    ignores: ClassVar[bool] = True

    def mean(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if targets.is_floating_point() or targets.dim() != 1:
            got = f"{targets.dtype} of shape {('n', *targets.shape[1:])}"
            raise ValueError(f"objective cross_entropy: labels are {got}; expected a whole number for each sample")
        return cross_entropy(outputs, targets)

    def totals(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if not len(targets):
            return torch.zeros(self.measures, dtype=torch.float64, device=targets.device)
        counted = (targets != IGNORED).sum().double()
        loss = self.mean(outputs, targets).double() * counted
        return torch.stack((loss, (outputs.argmax(-1) == targets).sum().double(), counted))

    def summary(self, totals: Tensor, samples: int) -> dict[str, float]:
        loss, correct, _ = _per_label(totals, samples)
        return {"eval_loss": loss, "eval_accuracy": correct}


@dataclass(frozen=True)
class _TokenCrossEntropy(Objective):
    """Computes the cross-entropy of token logits ``(batch, seq, vocabulary / size of axis)``; evaluation adds the
    perplexity.
    """

    axis: Axis = SINGLE
    measures: int = 2
    ignores: ClassVar[bool] = True

    def mean(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return vocabulary_parallel_cross_entropy(outputs, targets, self.axis)

    def totals(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if not len(targets):
            return torch.zeros(self.measures, dtype=torch.float64, device=targets.device)
        counted = (targets != IGNORED).sum().double()
        return torch.stack((self.mean(outputs, targets).double() * counted, counted))

    def summary(self, totals: Tensor, samples: int) -> dict[str, float]:
        loss, _ = _per_label(totals, samples)
        return {"eval_loss": loss, "eval_perplexity": math.exp(min(loss, 700.0))}


def _per_label(totals: Tensor, samples: int) -> list[float]:
    """Return the totals, of which the last counts the labels, as means over these."""
    if not totals[-1]:
        raise ValueError(f"no label of the {samples} samples to test with counts: all are {IGNORED}")
    means: list[float] = (totals / totals[-1]).tolist()
    return means


def objective(config: CrossEntropy, context: ObjectiveContext) -> Objective:
    return _TokenCrossEntropy(context.axis) if isinstance(context.samples, Tokens) else ClassCrossEntropy()
