"""What a rigorous pass has counted: terms of its bounds, and what each may be off by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from service.bounds.exchange import Exchange
from service.bounds.rounding import TINY, down, gamma


@dataclass(eq=False)
class Tally:
    """``(batch, rows)`` each."""

    values: list[Tensor] = field(default_factory=list)
    errors: list[Tensor] = field(default_factory=list)

    def lower_bound(self) -> Tensor:
        """The values' sum less all errors; −inf where overflow has left no number."""
        values = torch.stack(self.values or [torch.zeros_like(self.errors[0])])
        error = gamma(len(values)) * values.abs().sum(dim=0) + TINY
        if self.errors:
            error = error + torch.stack(self.errors).sum(dim=0)
        # Sums of so few and of so many terms are themselves right to far better than a millionth.
        found = down(values.sum(dim=0) - error * (1 + 1e-6))
        return found.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)


@dataclass(eq=False)
class Tallies:
    """Of rows that all ranks have: what replicated values or the stages before give, and this rank's part of what
    divided ones give. Of rows that only this rank has: all that they have come by.
    """

    replicated: Tally = field(default_factory=Tally)
    partial: Tally = field(default_factory=Tally)
    own: Tally = field(default_factory=Tally)

    def of_common_rows(self, exchange: Exchange) -> Tensor:
        """Lower bounds of rows that all ranks have, the first rank's of what is replicated: equal on all of them."""
        found = _with_parts(self.replicated, self.partial, exchange.sum, exchange.axis.size)
        return exchange.agree(found.lower_bound())

    def of_own_rows(self, exchange: Exchange) -> Tensor:
        """Lower bounds of this rank's share of the rows."""
        found = _with_parts(self.own, self.partial, lambda ends: exchange.own_sum(ends, 2), exchange.axis.size)
        common = self.replicated
        before = [exchange.own(common.lower_bound(), 1)] if common.values or common.errors else []
        return Tally([*found.values, *before], found.errors).lower_bound()


def _with_parts(tally: Tally, partial: Tally, add_up: Callable[[Tensor], Tensor], ranks: int) -> Tally:
    """What the ranks' parts come to is at least the sum of their bounds, added up in any order, less what that loses.

    All ranks have a part, or none has.
    """
    if not partial.values and not partial.errors:
        return tally
    own = partial.lower_bound()
    total, sizes = add_up(torch.stack([own, own.abs()])).unbind()
    return Tally([*tally.values, total], [*tally.errors, gamma(ranks + 1) * sizes])
