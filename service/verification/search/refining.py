"""Tighter bounds of hidden values by branch and bound over the activations before them.

A relaxation is as tight as the bounds that it is made on, and all domains of a search share those of the root: what
is spent on them once is gained in every domain. Each end of each entry is a problem of its own; the loosest domains
of all problems of a layer are split together, and the layer's bounds are those of the layers after it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import Tensor

from service.bounds.interval import Interval
from service.bounds.network import Network
from service.bounds.split import Site, Sites
from service.verification.search.ascent import Climb
from service.verification.search.bounding import Bounding
from service.verification.search.branching import Branching
from service.verification.search.domains import Domains
from service.verification.search.intermediate import wanted
from service.verification.search.walk import Question, Walk

FROM_SCRATCH, ONWARD = Climb(20, slopes=0.2), Climb(10, slopes=0.02)
FEWEST, MOST = 32, 1024
"""Entries that are split together: more where the first few did not take long."""
NOT_LONG = 0.5
"""Seconds."""


@torch.no_grad()
def refined(network: Network, box: Interval, bounds: Interval, deadline: float) -> Interval:
    """``bounds`` ``(1, entries)`` of all sites, tightened until ``deadline`` (``time.monotonic``)."""
    sites = _after_relaxations(network)
    for number, site in enumerate(sites):
        now = time.monotonic()
        if now > deadline:
            break
        # Later layers have more before them, and what is gained in earlier ones helps them.
        bounds = _of_site(network, box, bounds, site, now + (deadline - now) / (len(sites) - number))
    return bounds


def _after_relaxations(network: Network) -> list[Site]:
    """Sites with a non-linear operator before them: bounds of the others are exact or as good as that."""
    reached: dict[str, bool] = {}
    relaxed = {node.name for node in network.nonlinear}
    for node in network.graph.nodes:
        reached[node.name] = node.name in relaxed or any(reached[name] for name in node.inputs)
    return [site for site in Sites.of(network).each if reached[site.value]]


def _of_site(network: Network, box: Interval, bounds: Interval, site: Site, deadline: float) -> Interval:
    entries = wanted(network, bounds, site).nonzero().squeeze(1)
    if not len(entries):
        return bounds
    lower, upper = bounds.lower.clone(), bounds.upper.clone()
    count = FEWEST
    while len(entries) and (now := time.monotonic()) < deadline:
        part, left = entries[:count], len(entries)
        entries = entries[count:]
        problems = _Problems(network, box, bounds, site, part)
        if time.monotonic() - now < NOT_LONG:
            count = min(2 * count, MOST)
        least = problems.least(now + (deadline - now) * len(part) / left)
        place = site.offset + part
        lower[0, place] = torch.maximum(lower[0, place], least[: len(part)])
        upper[0, place] = torch.minimum(upper[0, place], -least[len(part) :])
    return Interval(torch.minimum(lower, upper), torch.maximum(lower, upper))


class _Problems:
    """The lower ends of some entries of a site, and then the negated upper ends, from below."""

    def __init__(self, network: Network, box: Interval, bounds: Interval, site: Site, entries: Tensor) -> None:
        rows = bounds.lower.new_zeros(len(entries), site.size).scatter_(1, entries[:, None], 1)
        rows = torch.cat([rows, -rows])[:, None]
        offsets = rows.new_zeros(len(rows), 1)
        question = Question(site.value, rows, offsets, torch.ones_like(offsets, dtype=torch.bool))
        self.bounding = Bounding(Walk(network, box, bounds, question))
        self.branching = Branching(self.bounding)
        place = site.offset + entries
        self.known = torch.cat([bounds.lower[0, place], -bounds.upper[0, place]])
        self.leaves = self._optimised(self.bounding.roots(self.known[:, None]), FROM_SCRATCH)
        self.bounding.calibrate(self.leaves)

    def least(self, deadline: float) -> Tensor:
        """``(problems,)``, never less than what was known."""
        leaves = self.leaves
        while time.monotonic() < deadline:
            chosen = self._loosest(leaves)
            if not bool(chosen.any()) or 2 * int(chosen.sum()) + len(leaves) > 4 * self.bounding.capacity:
                break
            parts = [leaves.rows(~chosen), *self._split(leaves.rows(chosen))]
            leaves = Domains.joined(parts)
        return self._least(leaves)

    def _least(self, leaves: Domains) -> Tensor:
        start = torch.full_like(self.known, torch.inf)
        return start.scatter_reduce(0, leaves.disjunct, leaves.margin, "amin")

    def _loosest(self, leaves: Domains) -> Tensor:
        """Of each problem whose sign is open, the leaves at or below the mean."""
        mean = torch.zeros_like(self.known).scatter_reduce(
            0, leaves.disjunct, leaves.margin, "mean", include_self=False
        )
        return (leaves.margin <= mean[leaves.disjunct]) & (leaves.margin <= 0)

    def _split(self, leaves: Domains) -> Iterator[Domains]:
        """Both halves, part by part as memory allows."""
        size = max(1, self.bounding.capacity // 2)
        for start in range(0, len(leaves), size):
            part = leaves.rows(slice(start, start + size))
            branched = self.branching.split(part, self.bounding.closer(part))
            yield branched.whole
            if len(branched.halves):
                yield self._optimised(branched.halves, ONWARD)

    def _optimised(self, domains: Domains, climb: Climb) -> Domains:
        size = self.bounding.capacity
        parts = [domains.rows(slice(start, start + size)) for start in range(0, len(domains), size)]
        return Domains.joined([self.bounding.optimised(part, climb) for part in parts])
