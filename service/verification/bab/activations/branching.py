"""Chooses the preactivation at which a domain is split: filtered smart branching (FSB, De Palma et al., 2021).

Every score of :mod:`service.verification.bab.heuristics` nominates the best few entries of each domain. Both halves of
each nominated entry are bounded for real, and the entry whose halves gain most wins. Halves start from the slopes, row
weights and multipliers of their domain, and the new multiplier from the best of a few values. A search then optimises
all of these by its ``warm_start``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from service.bounds.relaxation import Lines
from service.bounds.split import breakpoint_of
from service.verification.bab.activations.domain_bounds import DomainBounds, DomainInspection
from service.verification.bab.activations.domains import Domains
from service.verification.bab.heuristics import ActivationScore, ActivationView
from service.verification.bab.settings import BranchingSettings


@dataclass(frozen=True, eq=False)
class Branched:
    """Holds the ``halves`` of split domains, first all of one side, and the domains that could not be split."""

    halves: Domains
    unsplit: Domains


@dataclass(frozen=True, eq=False)
class _Candidates:
    """Entries ``index`` that may be split ``at`` a value, ``(n, k)``, and first multipliers of both halves.

    ``prior`` decides if bounds of the halves show no gain.
    """

    index: Tensor
    at: Tensor
    upper: Tensor
    lower: Tensor
    prior: Tensor

    def rows(self, which: slice) -> _Candidates:
        columns = (self.index, self.at, self.upper, self.lower, self.prior)
        return _Candidates(*(column[which] for column in columns))


class ActivationBranching:
    """Splits domains of ``domain_bounds`` at the entries that ``scores`` nominate."""

    def __init__(
        self, domain_bounds: DomainBounds, scores: Sequence[ActivationScore], settings: BranchingSettings
    ) -> None:
        self.domain_bounds, self.network, self.scores = domain_bounds, domain_bounds.network, scores
        self.preactivations, self.settings = domain_bounds.preactivations, settings
        self._root_width = domain_bounds.bounds.width

    @torch.no_grad()
    def split(self, domains: Domains, inspection: DomainInspection) -> Branched:
        """Split every domain in two, with the margins of a first pass, or their parents' where these are better."""
        points = self._split_points(inspection)
        scores = self._scores(inspection, points)
        fields = [points, *self._multipliers(inspection), scores[0]]
        nominated = [self.domain_bounds.neuron_index.best(score, self.settings.candidates, fields) for score in scores]
        values, index, *of_candidates = (torch.cat(column, dim=1) for column in zip(*nominated, strict=True))
        possible = values > -torch.inf
        splittable = possible.any(dim=1)
        unsplit = domains.rows(~splittable)
        domains, possible = domains.rows(splittable), possible[splittable]
        if not len(domains):
            return Branched(domains, unsplit)
        # A domain with fewer candidates repeats its best one, which is harmless.
        index, at, upper, lower, prior = (
            torch.where(possible, column[splittable], column[splittable][:, :1]) for column in (index, *of_candidates)
        )
        return Branched(
            self._in_parts(domains, _Candidates(index, at, upper, lower, self.settings.prior_weight * prior)), unsplit
        )

    def _in_parts(self, domains: Domains, candidates: _Candidates) -> Domains:
        """Split part by part as memory allows; return first all of one side and then all of the other."""
        at_once = max(1, self.domain_bounds.capacity // (2 * candidates.index.shape[1]))
        halves = self.domain_bounds.in_parts(
            len(domains), at_once, lambda part: self._best_of(domains.rows(part), candidates.rows(part))
        )
        return Domains.join([upper for upper, _ in halves] + [lower for _, lower in halves])

    def _best_of(self, domains: Domains, candidates: _Candidates) -> tuple[Domains, Domains]:
        """Return the upper and the lower half of each domain, by the candidate whose halves gain most."""
        count, per_domain = candidates.index.shape
        repeated = domains.repeat(2 * per_domain)
        index, at = (torch.cat([column, column], dim=1).reshape(-1) for column in (candidates.index, candidates.at))
        sign = torch.cat([torch.ones_like(candidates.at), -torch.ones_like(candidates.at)], dim=1).reshape(-1)
        # With the full multiplier, the half has the bound of its domain; with less, perhaps a better one.
        starts = torch.cat([candidates.upper, candidates.lower], dim=1).reshape(-1)
        halves = repeated.split_further(index, sign, at, starts)
        best = self.domain_bounds.best_of(
            halves,
            [torch.cat([repeated.beta, share * starts[:, None]], dim=1) for share in self.settings.multiplier_shares],
        )
        # Proved domains need no further work.
        gains = torch.minimum(best.margin - repeated.margin, -repeated.margin).nan_to_num(nan=0.0)
        above, below = gains.view(count, 2, per_domain).unbind(dim=1)
        worse, better = torch.minimum(above, below), torch.maximum(above, below)
        score = worse + self.settings.better_half_weight * better + candidates.prior
        chosen = score.argmax(dim=1) + torch.arange(count, device=index.device) * 2 * per_domain
        return best.rows(chosen), best.rows(chosen + per_domain)

    def _split_points(self, inspection: DomainInspection) -> Tensor:
        """Return the value at which each entry would be split, ``(n, entries)``."""
        middles = {
            preactivation.value: inspection.bounds[preactivation.value].centre
            if (at := breakpoint_of(self.network, preactivation)) is None
            else torch.full_like(inspection.bounds[preactivation.value].lower, at)
            for preactivation in self.preactivations.each
        }
        return self.preactivations.flattened(middles)

    def _scores(self, inspection: DomainInspection, points: Tensor) -> list[Tensor]:
        """Return each score's values ``(n, entries)``; −inf for useless splits."""
        view = ActivationView(
            self.network, self.preactivations, self.domain_bounds.objective.relaxed_nodes, inspection, points
        )
        useful = self._useful(inspection, view.lower, view.upper)
        return [torch.where(useful, score.scores(view).nan_to_num(), -torch.inf) for score in self.scores]

    def _useful(self, inspection: DomainInspection, lower: Tensor, upper: Tensor) -> Tensor:
        """Return the entries ``(n, entries)`` at which a split tightens a relaxation by more than rounding."""
        unstable = {
            preactivation.value: torch.zeros_like(inspection.bounds[preactivation.value].lower, dtype=torch.bool)
            for preactivation in self.preactivations.each
        }
        for node in self.domain_bounds.objective.relaxed_nodes:
            masks = self.network.operator_of(node).unstable_on(node, [inspection.bounds[name] for name in node.inputs])
            for name, mask in zip(node.inputs, masks, strict=True):
                unstable[name] = unstable[name] | mask
        has_breakpoint = torch.cat(
            [
                torch.full(
                    (preactivation.size,), breakpoint_of(self.network, preactivation) is not None, device=lower.device
                )
                for preactivation in self.preactivations.each
            ]
        )
        wide = has_breakpoint | (upper - lower > self.settings.narrowest * self._root_width)
        return self.preactivations.flattened(unstable) & wide & lower.isfinite() & upper.isfinite()

    def _multipliers(self, inspection: DomainInspection) -> list[Tensor]:
        """Return the initial multipliers of a split, ``(n, entries)``: of the upper half, then of the lower.

        In a half the function's slope k takes the place of the relaxation's λ. With δ = a·(k − λ) for the
        coefficient a at the output, the half begins with the bound of the split domain.
        """
        upper = {
            preactivation.value: torch.zeros_like(inspection.bounds[preactivation.value].lower)
            for preactivation in self.preactivations.each
        }
        lower = dict(upper)
        for node in self.domain_bounds.objective.relaxed_nodes:
            pieces = self.network.operator_of(node).pieces(node)
            relaxed, name = inspection.relaxations[node.name], node.inputs[0]
            if node.name in inspection.coefficients and pieces is not None:
                assert isinstance(relaxed, Lines)
                arrived = inspection.coefficients[node.name]
                slope = torch.where(arrived > 0, relaxed.lower_slope, relaxed.upper_slope)
                upper[name] = upper[name] + (arrived * (1 - slope)).squeeze(1)
                lower[name] = lower[name] + (arrived * (pieces.slope - slope)).squeeze(1)
        return [self.preactivations.flattened(upper), self.preactivations.flattened(lower)]
