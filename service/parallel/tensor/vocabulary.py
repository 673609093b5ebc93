"""Embedding and cross entropy with the vocabulary divided over tensor-parallel ranks.

The full logits ``(…, vocabulary)`` never exist on any rank: the loss needs three numbers per position from each
(maximum, sum of exponentials, the target's logit).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from service.parallel.collectives import max_over_group, reduce_from_group
from service.parallel.mesh import SINGLE, Axis
from service.parallel.tensor.placement import divided, local


class VocabularyParallelEmbedding(nn.Module):
    """Rows of the table divided over ``axis``: ``(…)`` int64 ids → ``(…, dim)``, replicated."""

    sharded = {"weight": 0}  # noqa: RUF012 - a constant of the class

    def __init__(self, vocabulary: int, dim: int, axis: Axis = SINGLE) -> None:
        super().__init__()
        self.vocabulary, self.dim, self.axis = vocabulary, dim, axis
        self.weight = nn.Parameter(torch.empty(divided(vocabulary, axis, "vocabulary"), dim))

    def forward(self, ids: Tensor) -> Tensor:
        weight = local(self.weight)
        if self.axis.size == 1:
            return functional.embedding(ids, weight)
        own_ids, is_own = _own_ids(ids, weight.shape[0], self.axis)
        rows = functional.embedding(own_ids, weight)
        return reduce_from_group(rows.masked_fill(~is_own.unsqueeze(-1), 0), self.axis.group)

    def extra_repr(self) -> str:
        return f"{self.vocabulary} × {self.dim}, tp={self.axis.size}"


def vocabulary_parallel_cross_entropy(logits: Tensor, targets: Tensor, axis: Axis = SINGLE) -> Tensor:
    """Mean negative log-likelihood of ``targets (…)`` int64 under ``logits (…, vocabulary / tp)``.

    A scalar, replicated, computed in float32 at least; targets must be in range.
    """
    if axis.size == 1:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return functional.cross_entropy(wide.flatten(0, -2), targets.flatten())
    losses: Tensor = _CrossEntropy.apply(logits, targets, axis.group, axis.rank)  # type: ignore[no-untyped-call]
    return losses.mean()


class _CrossEntropy(torch.autograd.Function):
    """Losses per position. Keeps the logits and their log-sum-exp, not the probabilities, for the gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: str, rank: int) -> Tensor:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        own_ids, is_own = _own_ids(targets, logits.shape[-1], Axis(rank=rank))
        peak = max_over_group(wide.amax(-1), group)
        exponentials = (wide - peak.unsqueeze(-1)).exp().sum(-1)
        target = wide.gather(-1, own_ids.unsqueeze(-1)).squeeze(-1).masked_fill(~is_own, 0)
        totals = reduce_from_group(torch.stack((exponentials, target)), group)
        log_sum = totals[0].log() + peak
        ctx.save_for_backward(logits, log_sum, own_ids, is_own)
        return log_sum - totals[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        logits, log_sum, own_ids, is_own = ctx.saved_tensors
        probabilities = (logits.to(log_sum.dtype) - log_sum.unsqueeze(-1)).exp()
        hit = is_own.to(log_sum.dtype).unsqueeze(-1)
        difference = probabilities.scatter_add(-1, own_ids.unsqueeze(-1), -hit)
        return (difference * gradient.unsqueeze(-1)).to(logits.dtype), None, None, None


def _own_ids(ids: Tensor, rows: int, axis: Axis) -> tuple[Tensor, Tensor]:
    """Ids relative to this rank's first row (0 where another rank has the row), and which are its own."""
    relative = ids - axis.rank * rows
    is_own = (relative >= 0) & (relative < rows)
    return relative.masked_fill(~is_own, 0), is_own
