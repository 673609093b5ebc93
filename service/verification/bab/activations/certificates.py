"""Bounds domains of a search over activations once more, in real arithmetic.

An optimiser chose slopes, multipliers and weights; any choice is sound. A rigorous search relies only on the bounds
that they prove with every rounding accounted for, and splits a domain that these leave open.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from service.bounds.flat import by_instance
from service.bounds.interval import Interval
from service.bounds.linear.rigorous import RigorousPass
from service.bounds.methods import Analysis
from service.bounds.operators import NONLINEAR
from service.bounds.relaxation import Relaxed, RigorousStep
from service.bounds.rigorous import RigorousAnalysis
from service.bounds.rigorous.method import plain_convolutions
from service.bounds.rounding import UNIT, gamma, magnitude
from service.bounds.split import Multipliers, Splits
from service.bounds.stages import StagedAnalysis, StageLink
from service.verification.bab.activations.domain_bounds import DomainBounds
from service.verification.bab.activations.domains import Domains
from service.verification.engine import BoundingEngine


@dataclass(frozen=True, eq=False)
class Certificates:
    """Certifies the domains of ``domain_bounds``, whose root's bounds are those of ``root``."""

    domain_bounds: DomainBounds
    root: RigorousAnalysis

    @torch.no_grad()
    def certify(self, domains: Domains) -> Domains:
        """Return the domains with the margins that their parameters prove; +inf for contradictory splits."""
        if not len(domains):
            return domains
        at_once = max(1, self.domain_bounds.capacity // 4)
        with plain_convolutions():
            parts = self.domain_bounds.in_parts(len(domains), at_once, lambda part: self._margins(domains.rows(part)))
        return domains.with_(margin=torch.cat(parts))

    def _margins(self, domains: Domains) -> Tensor:
        splits = self.domain_bounds.neuron_index.localise(domains.index, domains.sign)
        clipped = Splits(splits.index, splits.sign, domains.at).clipped(self.domain_bounds.bounds)
        empty = self.domain_bounds.neuron_index.anywhere((clipped.lower > clipped.upper).any(dim=1))
        preactivations, within = self.domain_bounds.preactivations, clipped.meet(clipped)
        backward = self._backward(domains, self.domain_bounds.objective.shape_bounds(within))
        beta = torch.where(splits.here, domains.beta, 0)
        multipliers = Multipliers(beta, splits.index, within).coefficients(preactivations.entries)
        held = {value: -each.unsqueeze(1) for value, each in preactivations.unflattened(multipliers).items()}
        proved = self._bound_combined_rows(backward, domains, held if domains.depth else {})
        return torch.where(empty, torch.inf, proved)

    def _backward(self, domains: Domains, within: Mapping[str, Interval]) -> RigorousPass:
        """Return the root's pass on the domains' bounds of non-linear inputs, through their chosen lines.

        Every rank has the single row of each domain.
        """
        backward, count = self.root.backward, len(domains)
        intervals = {
            name: each.arranged(lambda end: end.expand(count, *end.shape[1:]))
            for name, each in backward.intervals.items()
        }
        # the part of a ball that is left after splits of inputs
        intervals |= {
            name: replace(intervals[name], lower=each.lower, upper=each.upper) for name, each in within.items()
        }
        slope_parameters = self.domain_bounds.objective.slope_parameters
        chosen = slope_parameters.members(slope_parameters.families(within), domains.slopes)
        steps = {
            name: self._own(name, intervals, chosen[name])
            if name in chosen
            else replace(step, error=step.error.expand(count, *step.error.shape[1:]), lost=step.lost.expand(count))
            for name, step in backward.steps.items()
        }
        return replace(backward, intervals=intervals, steps=steps, divided=False)

    def _own(self, name: str, intervals: Mapping[str, Interval], relaxed: Relaxed) -> RigorousStep:
        node = self.domain_bounds.network.nodes[name]
        return NONLINEAR[node.operator].rigorous_step(node, [intervals[each] for each in node.inputs], relaxed)

    def _bound_combined_rows(self, backward: RigorousPass, domains: Domains, held: Mapping[str, Tensor]) -> Tensor:
        """Return rows of ``Σ w·(row·y − offset)``: a row that alone has weight is exact, the others are rounded."""
        specification_rows, network = self.domain_bounds.specification_rows, self.domain_bounds.network
        weights = (domains.weights / domains.weights.sum(dim=1, keepdim=True)).unsqueeze(1)
        rows, offsets, _ = specification_rows.of(domains.disjunct)
        offsets = offsets.unsqueeze(2)
        start = network.nodes[specification_rows.start]
        combined = torch.bmm(weights, rows).reshape(len(domains), 1, *start.shape)
        least = backward.lower_bounds(start.name, combined, held).squeeze(1)
        size = by_instance(magnitude(backward.intervals[start.name])).unsqueeze(2)
        reach = torch.bmm(weights, torch.bmm(rows.abs(), size) + offsets.abs())
        single = (weights != 0).sum(dim=2) == 1
        lost = torch.where(single, 0.0, gamma(weights.shape[2] + 4) * reach.squeeze(1)).flatten()
        offset = torch.bmm(weights, offsets).flatten()
        margin = least - offset - lost - 8 * UNIT * (least.abs() + offset.abs() + lost)
        margin = margin.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        return network.tp_group.agree(margin)


@dataclass(frozen=True, eq=False)
class _StagedCertificates(Certificates):
    """Certifies domains of a model in stages. Each stage has its own part of every domain, and all of them call it."""

    line: StageLink

    def _bound_combined_rows(self, backward: RigorousPass, domains: Domains, held: Mapping[str, Tensor]) -> Tensor:
        """Return the last stage's rows: rows go up the line, and bounds come back."""
        line, margin = self.line, None
        backward = backward if line.is_first else replace(backward, before=self._before)
        if line.is_last:
            margin = super()._bound_combined_rows(backward, domains, held)
        else:
            rows = line.from_next()
            line.to_next(backward.lower_bounds(self.domain_bounds.specification_rows.start, rows, held, own=False))
        return line.of_last(margin)

    def _before(self, rows: Tensor, own: bool) -> Tensor:
        self.line.to_previous(rows)
        return self.line.from_previous()


def certificates_of(engine: BoundingEngine, domain_bounds: DomainBounds, root: Analysis) -> Certificates | None:
    """Return the certificates over the reals, by the analysis of the domains' root, for a rigorous search."""

    def certificates() -> Certificates:
        analysis = root.analysis if isinstance(root, StagedAnalysis) else root
        assert isinstance(analysis, RigorousAnalysis)
        if engine.stages is None:
            return Certificates(domain_bounds, analysis)
        return _StagedCertificates(domain_bounds, analysis, engine.stages.line)

    return engine.arithmetic.certifying(certificates)
