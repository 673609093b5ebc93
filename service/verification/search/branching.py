"""Which hidden value a domain is split at.

Each candidate has an estimate of what its relaxation costs the bound; the best few of every domain are tried with a
real bound of both halves (filtered smart branching, De Palma et al., 2021), and the one whose halves gain most wins.
Estimates: the loss where the relaxation is loosest (as in BaBSR, Bunel et al., 2020), and the loss at the point where
the bound is attained, if every operator were the line that bounds it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from service.bounds.graph import Node
from service.bounds.interval import Interval
from service.bounds.operators.relu import LeakyRelu
from service.bounds.parts import Parts
from service.bounds.relaxation import Lines, Relaxation
from service.bounds.split import Bent, kink
from service.verification.search.bounding import Bounding, Closer
from service.verification.search.domains import Domains

CANDIDATES = 2
"""Of each estimate."""
TRIED_SHARES = (0.0, 0.5)
"""Of a half's first multiplier."""
BETTER_HALF = 0.5
"""What the gain of the half that gains more counts for beside that of the other."""
HOPE = 0.02
"""What an estimate counts for beside a gain that is there."""
NARROWEST = 1e-4
"""Of the width at the root: an entry is not split below that, unless at a kink."""


@dataclass(frozen=True, eq=False)
class Branched:
    """``halves`` of the domains that could be split, first all of one side; ``whole`` are those that could not."""

    halves: Domains
    whole: Domains


@dataclass(frozen=True, eq=False)
class _Candidates:
    """Entries ``index`` that may be split ``at`` a value, ``(n, k)``, and where multipliers of both halves begin.

    ``hope`` decides where one pass shows no gain.
    """

    index: Tensor
    at: Tensor
    upper: Tensor
    lower: Tensor
    hope: Tensor

    def rows(self, which: slice) -> _Candidates:
        columns = (self.index, self.at, self.upper, self.lower, self.hope)
        return _Candidates(*(each[which] for each in columns))


class Branching:
    def __init__(self, bounding: Bounding) -> None:
        self.bounding, self.network = bounding, bounding.network
        self.sites = bounding.sites
        self._root_width = bounding.bounds.width

    @torch.no_grad()
    def split(self, domains: Domains, closer: Closer) -> Branched:
        """Halves with the margins that a first pass proves, or their parents' where these are better."""
        points = self._points(closer)
        estimates = self._estimates(closer, points)
        fields = [points, *self._multipliers(closer), estimates[0]]
        chosen = [self.bounding.numbering.most(each, CANDIDATES, fields) for each in estimates]
        scores, index, *found = (torch.cat(each, dim=1) for each in zip(*chosen, strict=True))
        possible = scores > -torch.inf
        able = possible.any(dim=1)
        whole = domains.rows(~able)
        domains, possible = domains.rows(able), possible[able]
        if not len(domains):
            return Branched(domains, whole)
        # Repeating a domain's best candidate is harmless where it has fewer.
        index, at, upper, lower, estimate = (
            torch.where(possible, each[able], each[able][:, :1]) for each in (index, *found)
        )
        return Branched(self._in_parts(domains, _Candidates(index, at, upper, lower, HOPE * estimate)), whole)

    def _in_parts(self, domains: Domains, tried: _Candidates) -> Domains:
        """First all of one side and then all of the other, tried part by part as memory allows."""
        at_once = max(1, self.bounding.capacity // (2 * tried.index.shape[1]))
        halves = self.bounding.in_parts(
            len(domains), at_once, lambda part: self._best_of(domains.rows(part), tried.rows(part))
        )
        return Domains.joined([upper for upper, _ in halves] + [lower for _, lower in halves])

    def _best_of(self, domains: Domains, tried: _Candidates) -> tuple[Domains, Domains]:
        """Both halves, by the candidate whose halves gain most."""
        count, each = tried.index.shape
        repeated = domains.repeated(2 * each)
        index, at = (torch.cat([places, places], dim=1).reshape(-1) for places in (tried.index, tried.at))
        sign = torch.cat([torch.ones_like(tried.at), -torch.ones_like(tried.at)], dim=1).reshape(-1)
        # With all of the start the half has the bound of its whole; with less, perhaps a better one.
        starts = torch.cat([tried.upper, tried.lower], dim=1).reshape(-1)
        halves = repeated.split_further(index, sign, at, starts)
        best = self.bounding.best_of(
            halves, [torch.cat([repeated.beta, share * starts[:, None]], dim=1) for share in TRIED_SHARES]
        )
        # What is proved needs no more.
        gains = torch.minimum(best.margin - repeated.margin, -repeated.margin).nan_to_num(nan=0.0)
        above, below = gains.view(count, 2, each).unbind(dim=1)
        score = torch.minimum(above, below) + BETTER_HALF * torch.maximum(above, below) + tried.hope
        chosen = score.argmax(dim=1) + torch.arange(count, device=index.device) * 2 * each
        return best.rows(chosen), best.rows(chosen + each)

    def _points(self, closer: Closer) -> Tensor:
        """Where each entry would be split, ``(n, entries)``."""
        middles = {
            site.value: closer.bounds[site.value].centre
            if (at := kink(self.network, site)) is None
            else torch.full_like(closer.bounds[site.value].lower, at)
            for site in self.sites.each
        }
        return self.sites.flattened(middles)

    def _estimates(self, closer: Closer, points: Tensor) -> tuple[Tensor, Tensor]:
        """Losses at ``points`` and at the minimiser, ``(n, entries)``; −inf where a split is of no use."""
        lower = self.sites.flattened({name: each.lower for name, each in closer.bounds.items()})
        upper = self.sites.flattened({name: each.upper for name, each in closer.bounds.items()})
        losses = self._losses(closer, torch.stack([points, closer.reached.clamp(min=lower, max=upper)]))
        first, second = torch.where(self._useful(closer, lower, upper), losses.nan_to_num(), -torch.inf).unbind()
        return first, second

    def _useful(self, closer: Closer, lower: Tensor, upper: Tensor) -> Tensor:
        wanted = {
            site.value: torch.zeros_like(closer.bounds[site.value].lower, dtype=torch.bool) for site in self.sites.each
        }
        for node in self.bounding.walk.relaxed:
            masks = self.network.operator_of(node).improvable_on(node, [closer.bounds[name] for name in node.inputs])
            for name, mask in zip(node.inputs, masks, strict=True):
                wanted[name] = wanted[name] | mask
        kinked = torch.cat(
            [
                torch.full((site.size,), kink(self.network, site) is not None, device=lower.device)
                for site in self.sites.each
            ]
        )
        wide = kinked | (upper - lower > NARROWEST * self._root_width)
        return self.sites.flattened(wanted) & wide & lower.isfinite() & upper.isfinite()

    def _losses(self, closer: Closer, at: Tensor) -> Tensor:
        """What the relaxations lose at ``(points, n, entries)``."""
        points = self.sites.unflattened(at.flatten(0, 1))
        losses = {value: torch.zeros_like(point) for value, point in points.items()}
        for node in self.bounding.walk.relaxed:
            if node.name not in closer.coefficients:
                continue
            for name, loss in zip(node.inputs, self._losses_of(node, closer, points, len(at)), strict=True):
                losses[name] = losses[name] + loss
        return self.sites.flattened(losses).reshape(at.shape)

    def _losses_of(self, node: Node, closer: Closer, points: dict[str, Tensor], times: int) -> list[Tensor]:
        """By input, ``(times · n, *shape)``."""
        bounds = [closer.bounds[name] for name in node.inputs]
        arrived, operator = closer.coefficients[node.name].squeeze(1), self.network.operator_of(node)
        if isinstance(operator, Parts):
            arrived = arrived - operator.middle(arrived.unsqueeze(1), operator.widths(bounds)).squeeze(1)
        if len(bounds) > 1:
            return [_repeated(loss, times) for loss in self._spread(node, bounds, arrived)]
        family, z = closer.families[node.name], points[node.inputs[0]]
        relaxed = family.relaxation if isinstance(family, Bent) else operator.relax_on(node, bounds)
        assert isinstance(relaxed, Relaxation)
        value = self.network.interval(node, {node.inputs[0]: Interval.point(z)}).lower
        shape = times, *arrived.shape
        return [_loss(relaxed, arrived, z.reshape(shape), value.reshape(shape)).flatten(0, 1)]

    def _multipliers(self, closer: Closer) -> list[Tensor]:
        """Where the multipliers of a split at each entry begin, ``(n, entries)``: of the upper and the lower half.

        In a half the function's slope k takes the place of the relaxation's λ. With δ = a·(k − λ) for the
        coefficient a that arrives, the half begins with the bound of the whole.
        """
        upper = {site.value: torch.zeros_like(closer.bounds[site.value].lower) for site in self.sites.each}
        lower = dict(upper)
        for node in self.bounding.walk.relaxed:
            operator, relaxed, name = self.network.operator_of(node), closer.relaxed[node.name], node.inputs[0]
            if node.name in closer.coefficients and isinstance(operator, LeakyRelu):
                assert isinstance(relaxed, Lines)
                arrived = closer.coefficients[node.name]
                slope = torch.where(arrived > 0, relaxed.lower_slope, relaxed.upper_slope)
                upper[name] = upper[name] + (arrived * (1 - slope)).squeeze(1)
                lower[name] = lower[name] + (arrived * (operator.negative_slope(node) - slope)).squeeze(1)
        return [self.sites.flattened(upper), self.sites.flattened(lower)]

    def _spread(self, node: Node, bounds: list[Interval], arrived: Tensor) -> list[Tensor]:
        """Of an operator of several inputs: how much of the output's radius each input's radius makes."""
        radii = [each.radius.requires_grad_() for each in bounds]
        centres = [each.centre for each in bounds]
        with torch.enable_grad():
            known = {
                name: Interval.around(centre, radius)
                for name, centre, radius in zip(node.inputs, centres, radii, strict=True)
            }
            weight = (self.network.interval(node, known).radius * arrived.abs()).sum()
            gradients = torch.autograd.grad(weight, radii)
        return [gradient * radius.detach() for gradient, radius in zip(gradients, radii, strict=True)]


def _repeated(values: Tensor, times: int) -> Tensor:
    return values.expand(times, *values.shape).flatten(0, 1)


def _loss(relaxed: Relaxation, coefficients: Tensor, z: Tensor, value: Tensor) -> Tensor:
    """``coefficients·f(z)`` less the line that bounds it from below."""
    low, high = relaxed.lower_slope * z, relaxed.upper_slope * z
    low = low if relaxed.lower_intercept is None else low + relaxed.lower_intercept
    high = high if relaxed.upper_intercept is None else high + relaxed.upper_intercept
    return coefficients * value - coefficients.clamp(min=0) * low - coefficients.clamp(max=0) * high
