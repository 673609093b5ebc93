"""Numbers hidden entries over all tensor-parallel ranks that divide them.

All ranks search the same domains, and base every decision on numbers that are equal to the last bit. A rank handles a
domain's splits of its own entries and of replicated ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from service.bounds.network import Network
from service.bounds.rank_group import RankGroup
from service.bounds.split import Preactivations


@dataclass(frozen=True, eq=False)
class LocalSplits:
    """Splits from this rank's view: ``index`` over its own entries, ``sign`` 0 for entries of other ranks."""

    index: Tensor
    sign: Tensor

    @property
    def here(self) -> Tensor:
        return self.sign != 0


class NeuronIndexing(Protocol):
    """Numbers all entries; this rank has a part of them, and all ranks call the same methods."""

    @property
    def is_whole(self) -> bool:
        """Return whether this rank has all entries."""

    def localise(self, number: Tensor, sign: Tensor) -> LocalSplits:
        """Return ``(n, depth)`` splits as this rank sees them."""

    def total(self, number: Tensor, values: Tensor) -> Tensor:
        """Sum values ``(n, depth)`` over the ranks; the one that has a split's entry supplies its value, others 0."""

    def everywhere(self, values: Tensor) -> Tensor:
        """Gather ``(entries,)`` of this rank to those of all entries, by number."""

    def anywhere(self, flags: Tensor) -> Tensor:
        """Return the flags ``(n,)`` that any rank has set."""

    def least(self, count: int) -> int:
        """Return the least of all ranks' numbers."""

    def best(self, scores: Tensor, count: int, fields: Sequence[Tensor]) -> list[Tensor]:
        """Return the ``count`` best entries ``(n, count)`` of every domain: their scores, numbers, and ``fields``.

        Scores and fields are ``(n, entries)`` of this rank; an entry with a score of −∞ is not a candidate.
        """


@dataclass(frozen=True, eq=False)
class NeuronIndex:
    """:class:`NeuronIndexing` over a tensor-parallel group.

    Entry e of rank r has the number ``r · entries + e``, a replicated one that of the first rank.

    ``replicated`` is bool ``(entries,)``.
    """

    tp_group: RankGroup
    replicated: Tensor

    @classmethod
    def of(cls, network: Network, preactivations: Preactivations, device: torch.device) -> NeuronIndex:
        flags = [
            torch.full((preactivation.size,), not network.is_own(preactivation.value), device=device)
            for preactivation in preactivations.each
        ]
        return cls(network.tp_group, torch.cat(flags) if flags else torch.zeros(0, dtype=torch.bool, device=device))

    @property
    def entries(self) -> int:
        return len(self.replicated)

    @property
    def is_whole(self) -> bool:
        return self.tp_group.axis.size == 1

    def localise(self, number: Tensor, sign: Tensor) -> LocalSplits:
        if self.is_whole:
            return LocalSplits(number, sign)
        index = number % self.entries
        here = self.leads(number) | self.replicated[index]
        return LocalSplits(torch.where(here, index, 0), torch.where(here, sign, 0))

    def leads(self, number: Tensor) -> Tensor:
        """Return the entries that this rank reports; exactly one rank reports each."""
        return number // self.entries == self.tp_group.axis.rank

    def total(self, number: Tensor, values: Tensor) -> Tensor:
        return values if self.is_whole else self.tp_group.sum(torch.where(self.leads(number), values, 0))

    def everywhere(self, values: Tensor) -> Tensor:
        return self.tp_group.gather(values, 0)

    def anywhere(self, flags: Tensor) -> Tensor:
        return flags if self.is_whole else self.tp_group.sum(flags.to(torch.int32)) > 0

    def least(self, count: int) -> int:
        return self.tp_group.least(count, self.replicated.device)

    def best(self, scores: Tensor, count: int, fields: Sequence[Tensor]) -> list[Tensor]:
        if not self.is_whole and self.tp_group.axis.rank:
            scores = torch.where(self.replicated, -torch.inf, scores)
        best = scores.topk(min(count, self.entries), dim=1)
        found = [each.gather(1, best.indices) for each in fields]
        if self.is_whole:
            return [best.values, best.indices, *found]
        number = best.indices + self.tp_group.axis.rank * self.entries
        # An entry's number is exact in float64, and so is everything else.
        offered = torch.stack([each.double() for each in (number, best.values, *found)])
        everyone = self.tp_group.gather(offered, 2)
        chosen = everyone[1].topk(best.indices.shape[1], dim=1).indices
        number, *rest = everyone.gather(2, chosen.expand(len(everyone), -1, -1)).unbind()
        return [rest[0].to(scores.dtype), number.long(), *(each.to(scores.dtype) for each in rest[1:])]
