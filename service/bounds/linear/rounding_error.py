"""The error account of a rigorous traversal: the terms of its bounds, and what each may be off by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from service.bounds.ball import Ball
from service.bounds.linear.propagation import InitialRows
from service.bounds.linear.rows.identity import IdentityRows
from service.bounds.linear.sharding import ByOwnership
from service.bounds.rank_group import RankGroup
from service.bounds.relaxation import RigorousStep
from service.bounds.rounding import TINY, down, gamma


@dataclass(eq=False)
class RoundedTerms:
    """Terms of a sum and what they may be off by, ``(batch, rows)`` each."""

    values: list[Tensor] = field(default_factory=list)
    errors: list[Tensor] = field(default_factory=list)

    def lower_bound(self) -> Tensor:
        """Return the values' sum less all errors; −inf where overflow has left no number."""
        values = torch.stack(self.values or [torch.zeros_like(self.errors[0])])
        error = gamma(len(values)) * values.abs().sum(dim=0) + TINY
        if self.errors:
            error = error + torch.stack(self.errors).sum(dim=0)
        # Sums of so few and of so many terms are themselves right to far better than a millionth.
        found = down(values.sum(dim=0) - error * (1 + 1e-6))
        return found.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)


class RoundedSums(ByOwnership[RoundedTerms]):
    """The terms of a traversal; the stages before count among the replicated or a rank's own."""

    @classmethod
    def empty(cls) -> RoundedSums:
        return cls(RoundedTerms(), RoundedTerms(), RoundedTerms())

    def of_common_rows(self, tp_group: RankGroup) -> Tensor:
        """Return lower bounds of rows that all ranks have, the first rank's of what is replicated: equal on all."""
        terms = _with_parts(self.replicated, self.partial, tp_group.sum, tp_group.axis.size)
        return tp_group.agree(terms.lower_bound())

    def of_own_rows(self, tp_group: RankGroup) -> Tensor:
        """Return lower bounds of this rank's share of the rows."""
        terms = _with_parts(self.own, self.partial, lambda ends: tp_group.own_sum(ends, 2), tp_group.axis.size)
        common = self.replicated
        before = [tp_group.own(common.lower_bound(), 1)] if common.values or common.errors else []
        return RoundedTerms([*terms.values, *before], terms.errors).lower_bound()


def _with_parts(
    terms: RoundedTerms, partial: RoundedTerms, add_up: Callable[[Tensor], Tensor], ranks: int
) -> RoundedTerms:
    """Add a lower bound of the sum of the ranks' parts: the sum of their bounds, in any order, less its rounding.

    All ranks have a part, or none has.
    """
    if not partial.values and not partial.errors:
        return terms
    own = partial.lower_bound()
    total, sizes = add_up(torch.stack([own, own.abs()])).unbind()
    return RoundedTerms([*terms.values, total], [*terms.errors, gamma(ranks + 1) * sizes])


def least_in(ball: Ball, coefficients: Tensor) -> Tensor:
    """Return ``A·m − d·‖A‖₂``, rounded down."""
    batch, terms = len(ball.lower), coefficients[0, 0].numel()
    distance = ball.distance.flatten(1)[:, :1]
    reach = distance * coefficients.flatten(2).expand(batch, -1, -1).norm(dim=2)
    at_middle, sizes = ball.middle.unsqueeze(1), coefficients.abs()
    # Squares below the normal numbers are lost, of which the root is far above them.
    lost = terms * 2.0**-500 * (1 + distance)
    error = gamma(terms + 8) * (weighted(sizes, at_middle.abs()) + reach) + lost
    return down(weighted(coefficients, at_middle) - reach - error)


def charge(rows: InitialRows, step: RigorousStep) -> Tensor:
    """Return ``|A|·error + lost``, ``(batch, rows)``, of a step that the rows A take."""
    if isinstance(rows, IdentityRows) and step.error.shape[1] == 1:
        entries = step.error.flatten(1)
        one = entries.gather(1, rows.index.expand(len(entries), -1))
        charged = torch.cat([one, one], dim=1) if rows.mirrored else one
    else:
        like = step.error
        dense = rows if isinstance(rows, Tensor) else rows.dense(tuple(like.shape[2:]), like)
        charged = weighted(dense.abs(), step.error)
    return charged + step.lost.unsqueeze(1)


def weighted(coefficients: Tensor, entries: Tensor) -> Tensor:
    """Return ``(batch or 1, rows, *shape)`` times ``(batch, rows or 1, *shape)``: ``(batch, rows)``."""
    batch = len(entries)
    flat = coefficients.flatten(2).expand(batch, -1, -1)
    if entries.shape[1] == 1:
        return torch.bmm(flat, entries.reshape(batch, -1, 1)).squeeze(-1)
    return (flat * entries.flatten(2)).sum(dim=2)
