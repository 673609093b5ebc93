"""Tightens bounds of hidden values by branch and bound over earlier activations.

A relaxation is as tight as its bounds, and all domains of a search share the root's: tightening them costs once
and helps every domain. Each end of each entry is a problem of its own; the loosest domains of all problems of
a layer are split together, and the layer's bounds serve the layers after it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from service.bounds.interval import Interval
from service.bounds.methods import BoundOptions
from service.bounds.network import Network
from service.bounds.split import Preactivation, Preactivations
from service.verification.bab.activations.branching import ActivationBranching
from service.verification.bab.activations.domain_bounds import DomainBounds
from service.verification.bab.activations.domains import Domains
from service.verification.bab.activations.dual_objective import DualObjective
from service.verification.bab.activations.intermediate_bounds import unstable_entries
from service.verification.bab.heuristics import ActivationScore
from service.verification.bab.settings import ActivationSearchSettings, IntermediateSettings, OptimiserSettings
from service.verification.bab.shared_work import SharedWork
from service.verification.bab.time_plan import share_of_rest


@torch.no_grad()
def refine_intermediate_bounds(
    network: Network,
    box: Interval,
    bounds: Interval,
    deadline: float,
    options: BoundOptions,
    *,
    scores: Sequence[ActivationScore],
    settings: ActivationSearchSettings,
    work: SharedWork | None = None,
) -> Interval:
    """Return ``bounds`` ``(1, entries)`` of all preactivations, tightened until ``deadline`` (``time.monotonic``), by
    all ranks that share the ``work``.

    ``scores`` nominate splits, as in the search that uses the bounds.
    """
    work, preactivations = work or SharedWork(), after_relaxations(network)
    for number, preactivation in enumerate(preactivations):
        now = time.monotonic()
        # Later layers have more layers before them, and benefit from gains in earlier ones.
        until = share_of_rest(now, deadline, 1, len(preactivations) - number)
        entries = work.own(unstable_entries(network, bounds, preactivation).nonzero().squeeze(1))
        if not work.is_divided and (now > deadline or not len(entries)):
            continue

        def refine(
            known: Interval = bounds, layer: Preactivation = preactivation, own: Tensor = entries, until: float = until
        ) -> Interval:
            if not len(own) or time.monotonic() > deadline:
                return known
            ends = _Ends(layer.value, layer.size, own, known.lower)
            domain_bounds = DomainBounds(
                DualObjective(network, box, known, ends), options.memory, settings.domain_bounds
            )
            branching = ActivationBranching(domain_bounds, scores, settings.branching)
            return _of_ends(branching, layer.offset + own, until, options, settings.intermediate)

        bounds = bounds.meet(work.tightest(refine, bounds))
    return bounds


def after_relaxations(network: Network) -> list[Preactivation]:
    """Return the preactivations behind a non-linear operator: the bounds of the others are exact or nearly exact."""
    reached: dict[str, bool] = {}
    relaxed = {node.name for node in network.nonlinear}
    for node in network.graph.nodes:
        reached[node.name] = node.name in relaxed or any(reached[name] for name in node.inputs)
    return [preactivation for preactivation in Preactivations.of(network).each if reached[preactivation.value]]


def _of_ends(
    branching: ActivationBranching,
    place: Tensor,
    deadline: float,
    options: BoundOptions,
    settings: IntermediateSettings,
) -> Interval:
    """Return the bounds of all preactivations with better ends of the entries ``place``, part by part."""
    bounds, entries = branching.domain_bounds.bounds, len(place)
    known = torch.cat([bounds.lower[0, place], -bounds.upper[0, place]])
    least, count, done = known.clone(), settings.batches.first(known.is_cuda), 0
    while done < entries and (now := time.monotonic()) < deadline:
        part = torch.arange(done, min(done + count, entries), device=known.device)
        problems = _Problems(branching, torch.cat([part, part + entries]), known, options, settings)
        count = settings.batches.after(count, time.monotonic() - now)
        least[problems.disjunct] = problems.least(share_of_rest(now, deadline, len(part), entries - done))
        done += len(part)
    lower, upper = bounds.lower.clone(), bounds.upper.clone()
    lower[0, place], upper[0, place] = least[:entries], -least[entries:]
    return Interval(torch.minimum(lower, upper), torch.maximum(lower, upper))


@dataclass(frozen=True, eq=False)
class _Ends:
    """The ends of some ``entries`` of a value of ``size``, from below: the lower ones, and then the negated upper ones.

    Rows are like ``like``.
    """

    start: str
    size: int
    entries: Tensor
    like: Tensor

    def of(self, disjunct: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        count = len(self.entries)
        place = self.entries[disjunct % count].reshape(-1, 1, 1)
        sign = torch.where(disjunct < count, 1, -1).to(self.like.dtype).reshape(-1, 1, 1)
        offsets = self.like.new_zeros(len(disjunct), 1)
        rows = self.like.new_zeros(len(disjunct), 1, self.size).scatter_(2, place, sign)
        return rows, offsets, torch.ones_like(offsets, dtype=torch.bool)


class _Problems:
    """Branch and bound for some of the ends of a preactivation, the disjuncts ``(problems,)`` of its domains.

    ``known`` has a bound for every end.
    """

    def __init__(
        self,
        branching: ActivationBranching,
        disjunct: Tensor,
        known: Tensor,
        options: BoundOptions,
        settings: IntermediateSettings,
    ) -> None:
        self.branching, self.disjunct, self.known, self.settings = branching, disjunct, known, settings
        self.domain_bounds = domain_bounds = branching.domain_bounds
        first, self.warm_start = (each.within(options) for each in (settings.from_scratch, settings.warm_start))
        self.leaves = self._optimise(domain_bounds.roots(known[:, None]).rows(disjunct), first)
        domain_bounds.calibrate(self.leaves)

    def least(self, deadline: float) -> Tensor:
        """Return bounds ``(problems,)`` at ``deadline``, never below the known ones."""
        leaves = self.leaves
        while time.monotonic() < deadline:
            chosen = self._loosest(leaves)
            most = self.settings.most_leaves * self.domain_bounds.capacity
            if not bool(chosen.any()) or 2 * int(chosen.sum()) + len(leaves) > most:
                break
            parts = [leaves.rows(~chosen), *self._split(leaves.rows(chosen), deadline)]
            leaves = Domains.join(parts)
        return self._least(leaves)

    def _least(self, leaves: Domains) -> Tensor:
        start = torch.full_like(self.known, torch.inf)
        return start.scatter_reduce(0, leaves.disjunct, leaves.margin, "amin")[self.disjunct]

    def _loosest(self, leaves: Domains) -> Tensor:
        """Return which leaves are at or below the mean of their problem, if its sign is open."""
        mean = torch.zeros_like(self.known).scatter_reduce(
            0, leaves.disjunct, leaves.margin, "mean", include_self=False
        )
        return (leaves.margin <= mean[leaves.disjunct]) & (leaves.margin <= 0)

    def _split(self, leaves: Domains, deadline: float) -> Iterator[Domains]:
        """Yield both halves, part by part as memory allows; the leaves themselves when the time is over."""
        size = max(1, self.domain_bounds.capacity // 2)
        for start in range(0, len(leaves), size):
            part = leaves.rows(slice(start, start + size))
            if time.monotonic() > deadline:
                yield part
                continue
            branched = self.branching.split(part, self.domain_bounds.inspect(part))
            yield branched.unsplit
            if len(branched.halves):
                yield self._optimise(branched.halves, self.warm_start)

    def _optimise(self, domains: Domains, settings: OptimiserSettings) -> Domains:
        return Domains.join(
            self.domain_bounds.in_parts(
                len(domains),
                self.domain_bounds.capacity,
                lambda part: self.domain_bounds.optimise(domains.rows(part), settings),
            )
        )
