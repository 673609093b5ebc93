"""Bounds of hidden values at the inputs where a property fails (INVPROP, Kotha et al., 2023).

A counterexample of a disjunct has all of its rows at most at their thresholds, so that any γ ≥ 0 bounds a hidden value
there by z ≥ min (z + γ·(row·y − threshold)), one pass from the output with z added on the way. The closer a search is
to a proof, the fewer inputs are left and the tighter these bounds: they are taken again as long as that gains. Where
the ends of a value cross there is no counterexample.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from service.bounds.interval import Interval
from service.bounds.memory import UNLIMITED, MemoryBudget
from service.bounds.split import Site
from service.verification.search.ascent import Climb
from service.verification.search.bounding import Bounding
from service.verification.search.domains import Domains
from service.verification.search.intermediate import wanted
from service.verification.search.numbering import Placed
from service.verification.search.refining import FEWEST, MOST, NOT_LONG, after_relaxations
from service.verification.search.walk import Fixed, Question, Walk

CLIMB = Climb(20, slopes=0.1)
PRESSURE = 0.3
"""A weight of 1 is this share of an entry's width for the margin that the whole box lacks."""
WORTHWHILE = 0.01
"""Of the widths of a site's open entries: where a look gains less, the next one is not taken."""
SMALLEST = 1e-6
"""Margin that counts as lacking."""
GAIN = 0.05
"""Of what the whole box lacks, that another look at all sites should have brought."""


class GivenFailure(Walk):
    """Ends of hidden values, each a domain of its own, where a disjunct of another walk's question fails.

    A domain's ``disjunct`` is the :meth:`number` of an end; its weights are the γ of the rows, any numbers ≥ 0, in
    units in which 1 is much: ``lacking`` ``(disjuncts,)`` is by how much the whole box is not proved.
    """

    def __init__(self, walk: Walk, question: Question) -> None:
        super().__init__(walk.network, walk.box, walk.bounds, question)
        self.used = question.used
        self.lacking = walk.bounds.lower.new_ones(len(question.used))

    def number(self, disjunct: int, entry: Tensor, sign: int) -> Tensor:
        """Of the lower ends of entries (``sign`` 1), or of their upper ends (−1), whose negatives are bounded."""
        return (2 * disjunct + (sign < 0)) * self.sites.entries + entry

    def fixed(self, domains: Domains, scale: Tensor) -> Fixed:
        side, entry = domains.disjunct // self.sites.entries, domains.disjunct[:, None] % self.sites.entries
        disjunct, sign = side // 2, 1 - 2 * (side % 2)  # as number() has it
        fixed = super().fixed(domains.with_(disjunct=disjunct), scale)
        width = self.known(disjunct).width.expand(len(entry), -1).gather(1, entry)
        unit = PRESSURE * width / self.lacking[disjunct, None]
        return replace(
            fixed,
            rows=fixed.rows * unit[:, :, None],
            offsets=fixed.offsets * unit,
            own=Placed(entry, sign.to(width)[:, None]),
        )

    @staticmethod
    def combined(fixed: Fixed, weights: Tensor) -> tuple[Tensor, Tensor]:
        return torch.bmm(weights[:, None], fixed.rows), (weights * fixed.offsets).sum(dim=1)

    def has_weights(self, fixed: Fixed) -> bool:
        return True

    def project(self, fixed: Fixed, weights: Tensor) -> None:
        weights.mul_(fixed.used).clamp_(min=0)


class Given:
    """Of the disjuncts of ``walk``, which takes the bounds that are found."""

    def __init__(self, walk: Walk, question: Question, climb: Climb, memory: MemoryBudget = UNLIMITED) -> None:
        self.walk, self.climb = walk, climb
        self.failing = GivenFailure(walk, question)
        self.bounding = Bounding(self.failing, memory)
        self.sites: Sequence[Site] = after_relaxations(walk.network)[::-1]
        """The last ones gain most, and what they gain helps the others."""

    @torch.no_grad()
    def tighten(self, disjunct: int, margin: float, sites: Sequence[Site], deadline: float) -> Sequence[Site] | None:
        """Those of some sites that it was worth it for; none at all if there is no counterexample.

        ``margin`` is that of the whole box. What time does not suffice for is left as it is.
        """
        self.failing.lacking[disjunct] = max(-margin, SMALLEST)
        gained = []
        for site in sites:
            if time.monotonic() > deadline:
                break
            before = self._bounds(disjunct)
            entries = site.offset + wanted(self.walk.network, before, site).nonzero().squeeze(1)
            after = self._of_entries(disjunct, entries, before, deadline)
            if bool(self.walk.empty(after)):
                return None
            self._take(disjunct, after.meet(after))
            if _total(after, entries) < (1 - WORTHWHILE) * _total(before, entries):
                gained.append(site)
        return gained

    def _bounds(self, disjunct: int) -> Interval:
        return self.walk.known(torch.tensor([disjunct], device=self.failing.lacking.device))

    def _take(self, disjunct: int, bounds: Interval) -> None:
        count = len(self.failing.lacking)
        lower, upper = (end.expand(count, -1).clone() for end in (self.walk.bounds.lower, self.walk.bounds.upper))
        lower[disjunct], upper[disjunct] = bounds.lower[0], bounds.upper[0]
        both = Interval(lower, upper)
        self.walk.tighten(both)
        self.failing.tighten(both)

    def _of_entries(self, disjunct: int, entries: Tensor, bounds: Interval, deadline: float) -> Interval:
        """``bounds`` ``(1, entries)`` of all sites with better ends of some entries."""
        lower, upper = bounds.lower.clone(), bounds.upper.clone()
        for part in _parts(entries, deadline):
            ends = self._ends(disjunct, part, bounds)
            found = self._margins(ends)
            known = torch.where(found.isfinite(), found, ends.margin)
            lower[0, part], upper[0, part] = known[: len(part)], -known[len(part) :]
        return Interval(lower, upper)

    def _margins(self, ends: Domains) -> Tensor:
        parts = self.bounding.in_parts(
            len(ends), self.bounding.capacity, lambda part: self.bounding.optimised(ends.rows(part), self.climb).margin
        )
        return torch.cat(parts)

    def _ends(self, disjunct: int, entries: Tensor, bounds: Interval) -> Domains:
        """Lower ends, and then upper ends."""
        roots = self.bounding.roots(torch.zeros_like(self.failing.used, dtype=bounds.lower.dtype))
        ends = roots.rows(torch.full((2 * len(entries),), disjunct, device=entries.device))
        numbers = [self.failing.number(disjunct, entries, sign) for sign in (1, -1)]
        known = torch.cat([bounds.lower[0, entries], -bounds.upper[0, entries]])
        return ends.with_(margin=known, disjunct=torch.cat(numbers), weights=torch.zeros_like(ends.weights))


def _total(bounds: Interval, entries: Tensor) -> float:
    return float(bounds.width[0, entries].sum())


def _parts(entries: Tensor, deadline: float) -> Iterator[Tensor]:
    done, count = 0, MOST if entries.is_cuda else FEWEST
    while done < len(entries) and (now := time.monotonic()) < deadline:
        yield entries[done : done + count]
        done += count
        if time.monotonic() - now < NOT_LONG:
            count = min(2 * count, MOST)
