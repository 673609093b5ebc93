"""Embedding and cross entropy with the vocabulary divided over tensor-parallel ranks.

The full logits ``(…, vocabulary)`` never exist on any rank: the loss needs three numbers per position from each
(maximum, sum of exponentials, the target's logit).

Where the vocabulary does not divide over the ranks, tables have rows of padding behind its end, so that every rank has
as many. They are zero, nothing reads them, and no logits of theirs leave the head: their gradients are zero too.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from service.jobs.plugins import IGNORED
from service.parallel.collectives import max_over_group, reduce_from_group
from service.parallel.mesh import SINGLE, Axis, PaddedAxis, padded
from service.parallel.tensor.linear import ColumnParallelLinear
from service.parallel.tensor.placement import local

AT_ONCE = 2**25
"""Logits that the loss widens to float32 together."""


class VocabularyParallelEmbedding(nn.Module):
    """Rows of the table divided over ``axis``: ``(…)`` int64 ids → ``(…, dim)``, replicated.

    With ``partial_output`` it is this rank's summand: zero if another rank has the row.
    """

    sharded = {"weight": 0}  # noqa: RUF012 - a constant of the class

    def __init__(self, vocabulary: int, dim: int, axis: Axis = SINGLE, *, partial_output: bool = False) -> None:
        super().__init__()
        self.vocabulary, self.dim, self.axis, self.partial_output = vocabulary, dim, axis, partial_output
        rows = padded(axis, vocabulary)
        self.padded_rows = {"weight": rows} if rows.is_padded else {}
        self.weight = nn.Parameter(torch.empty(rows.share, dim))

    def forward(self, ids: Tensor) -> Tensor:
        weight = local(self.weight)
        if self.axis.size == 1:
            return functional.embedding(ids, weight)
        own_ids, is_own = localize_ids(ids, self.axis.rank * weight.shape[0], weight.shape[0])
        rows = functional.embedding(own_ids, weight).masked_fill(~is_own.unsqueeze(-1), 0)
        return rows if self.partial_output else reduce_from_group(rows, self.axis.group)


class VocabularyParallelHead(ColumnParallelLinear):
    """Computes ``(…, dim)``, replicated, → ``(…, own)`` logits of this rank's tokens: of those of ``tokens``, an axis
    as long as the vocabulary. The caller sums the gradient of the input over the ranks.
    """

    def __init__(self, dim: int, vocabulary: int, axis: Axis = SINGLE) -> None:
        self.tokens = padded(axis, vocabulary)
        super().__init__(dim, self.tokens.share * axis.size, axis, bias=False, copied_input=True)
        self.padded_rows = {"weight": self.tokens} if self.tokens.is_padded else {}

    def forward(self, x: Tensor) -> Tensor:
        logits = self.with_padding(x)
        return logits[..., : self.tokens.own] if self.tokens.is_padded else logits

    def with_padding(self, x: Tensor) -> Tensor:
        """Return as many logits on each rank, ``(…, share)``; those behind the vocabulary's end mean nothing."""
        return super().forward(x)


def vocabulary_parallel_cross_entropy(logits: Tensor, targets: Tensor, axis: Axis = SINGLE) -> Tensor:
    """Return the mean negative log-likelihood of ``targets (…)`` int64 under ``logits (…, vocabulary / tp)``.

    A scalar, replicated, computed in float32 at least, over the targets that are not ``IGNORED``: zero if all are.
    Other targets must be in range. It has no second derivative, except in a traced graph of one rank, which gets plain
    operators. With a :class:`PaddedAxis`, logits are ``(…, own)``.
    """
    rows, wanted = logits.flatten(0, -2), targets.flatten()
    if axis.size == 1 and torch.compiler.is_compiling():
        return cross_entropy(rows, wanted)
    share = axis.share if isinstance(axis, PaddedAxis) else rows.shape[-1]
    return _VocabularyCrossEntropy.apply(rows, wanted, axis.group, (axis.rank, share))  # type: ignore[no-any-return,no-untyped-call]


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean negative log-likelihood of ``targets (n,)`` under ``logits (n, classes)``, in float32 at least,
    over the targets that are not ``IGNORED``: zero if all are.
    """
    total = functional.cross_entropy(logits.to(_wide(logits.dtype)), targets, ignore_index=IGNORED, reduction="sum")
    return total / (targets != IGNORED).sum().clamp(min=1)


class _VocabularyCrossEntropy(torch.autograd.Function):
    """Computes, in the forward pass, the gradient too, a few rows at a time: probabilities in float32 never exist for
    all rows at once, and the logits need not be kept.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: str, part: tuple[int, int]) -> Tensor:
        rows, (rank, share) = len(logits), part
        gradient = torch.empty_like(logits) if ctx.needs_input_grad[0] else None
        total = torch.zeros((), dtype=_wide(logits.dtype), device=logits.device)
        compute = _dense_part if not group else partial(_divided_part, group=group, first=rank * share)
        # By the share, which all ranks have in common: for each step they meet in collectives.
        for start in range(0, rows, step := max(AT_ONCE // share, 1)):
            own = slice(start, start + step)
            total += compute(logits[own], targets[own], None if gradient is None else gradient[own])
        is_counted = targets != IGNORED
        counted = is_counted.sum().clamp(min=1)
        if gradient is not None:
            ctx.save_for_backward(gradient, is_counted, counted)
        return total / counted

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        gradient, is_counted, counted = ctx.saved_tensors
        factors = ((outer / counted) * is_counted).unsqueeze(-1)
        # In place, since this is when memory is scarcest; a second backward then fails, which autograd sees to. In
        # parts, as the CPU widens what it multiplies by wider factors.
        step = max(AT_ONCE // max(gradient.shape[-1], 1), 1)
        for part, factor in zip(gradient.split(step), factors.split(step), strict=True):
            part.mul_(factor)
        return gradient, None, None, None


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _dense_part(logits: Tensor, targets: Tensor, gradient: Tensor | None) -> Tensor:
    """Return the sum of the losses of some rows; fills in the gradient of that sum, for ignored ones anything."""
    chances = functional.log_softmax(logits, -1, dtype=_wide(logits.dtype))
    where = targets.masked_fill(is_ignored := targets == IGNORED, 0).unsqueeze(-1)
    targeted = chances.gather(-1, where)
    if gradient is not None:
        torch.exp(chances, out=gradient)
        # Before it is rounded: in bf16 the chance of a target that is all but certain is 1.
        gradient.scatter_(-1, where, targeted.expm1().to(gradient.dtype))
    return -targeted.squeeze(-1).masked_fill(is_ignored, 0).sum()


def _divided_part(logits: Tensor, targets: Tensor, gradient: Tensor | None, group: str, first: int) -> Tensor:
    """Return the same where the ranks of ``group`` have a part of the vocabulary each, this one from ``first`` on."""
    wide = logits.to(_wide(logits.dtype))
    own_ids, is_own = localize_ids(targets, first, logits.shape[-1])
    if not logits.shape[-1]:  # the ranks before this one have all of the vocabulary
        wide, gradient = wide.new_full((len(wide), 1), -torch.inf), None
    where = own_ids.unsqueeze(-1)
    peak = max_over_group(wide.amax(-1), group)
    target = wide.gather(-1, where).squeeze(-1).masked_fill(~is_own, 0)
    exponentials = (wide - peak.unsqueeze(-1)).exp_()
    sums, targeted = reduce_from_group(torch.stack((exponentials.sum(-1), target)), group)
    if gradient is not None:
        torch.div(exponentials, sums.unsqueeze(-1), out=gradient)
        less = exponentials.gather(-1, where) / sums.unsqueeze(-1) - is_own.to(sums.dtype).unsqueeze(-1)
        gradient.scatter_(-1, where, less.to(gradient.dtype))
    losses: Tensor = (sums.log() + peak - targeted).masked_fill(targets == IGNORED, 0)
    return losses.sum()


def localize_ids(ids: Tensor, first: int, rows: int) -> tuple[Tensor, Tensor]:
    """Return the ids relative to this rank's first row (0 where another rank has the row), and which are its own."""
    relative = ids - first
    is_own = (relative >= 0) & (relative < rows)
    return relative.masked_fill(~is_own, 0), is_own
