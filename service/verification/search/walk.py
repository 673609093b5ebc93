"""What the parameters of many domains prove, and in which direction they prove more (beta-CROWN, Wang et al., 2021).

Only the rows of the property walk, one for each domain: bounds of hidden values are the root's, clipped where a
domain is split. The rows of a disjunct are combined with weights w ≥ 0 that sum to 1: where Σ w·(row·y − threshold)
is positive, some row is, and that is all that a proof needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from service.bounds.backward import Pass
from service.bounds.interval import Interval
from service.bounds.network import Network
from service.bounds.relaxation import Family, Relaxed
from service.bounds.split import Multipliers, Sites, Splits, constrained
from service.verification.certify import ABSOLUTE_MARGIN, RELATIVE_MARGIN
from service.verification.search.choices import Choices
from service.verification.search.domains import Domains
from service.verification.search.numbering import Numbering, Numbers, Placed


class Asked(Protocol):
    """Rows of some disjuncts over the value of node ``start``, filled up to equally many."""

    @property
    def start(self) -> str: ...

    def of(self, disjunct: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """For disjuncts ``(n,)``: rows ``(n, rows, entries)``, what each must exceed, and which of them are used."""


@dataclass(frozen=True, eq=False)
class Question:
    """``rows`` ``(disjuncts, rows, entries)``; ``offsets`` ``(disjuncts, rows)`` is what a row must exceed, thresholds
    with the margin for rounding; ``used`` tells the rows that are there from the filling.
    """

    start: str
    rows: Tensor
    offsets: Tensor
    used: Tensor

    def of(self, disjunct: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.rows[disjunct], self.offsets[disjunct], self.used[disjunct]


@dataclass(frozen=True, eq=False)
class Parameters:
    """What an optimiser moves: ``slopes`` ``(n, parameters)``, ``beta`` ``(n, depth)``, ``weights`` ``(n, rows)``."""

    slopes: Tensor
    beta: Tensor
    weights: Tensor

    @classmethod
    def of(cls, domains: Domains) -> Parameters:
        return cls(domains.slopes, domains.beta, domains.weights)

    @property
    def each(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.slopes, self.beta, self.weights


@dataclass(frozen=True, eq=False)
class Fixed:
    """What does not change while a batch of ``n`` domains is optimised.

    ``number`` and ``splits`` ``(n, depth)`` are the splits over all ranks and this rank's, ``site`` and ``held`` the
    sites and bounds of their entries; ``empty`` ``(n,)`` are the domains in which nothing is. ``bounds`` are by value,
    ``families`` by node; ``rows`` ``(n, rows, entries)``, ``offsets`` and ``used`` ``(n, rows)`` those of the domains'
    disjuncts. A multiplier's step is in units of ``scale`` ``(n, depth)``. ``own`` ``(n, any)`` are entries of sites
    whose values are added to the rows', with the sign as a factor.
    """

    number: Tensor
    splits: Placed
    site: Tensor
    held: Interval
    empty: Tensor
    bounds: Mapping[str, Interval]
    families: Mapping[str, Family]
    rows: Tensor
    offsets: Tensor
    used: Tensor
    scale: Tensor
    own: Placed


class Walk:
    """Back through a network, for domains of one ``box``; all sites have the ``bounds`` ``(1, entries)`` there.

    Bounds may also be ``(disjuncts, entries)``: of each disjunct those that matter to it.
    The network is all here, or divided over tensor-parallel ranks.
    """

    def __init__(self, network: Network, box: Interval, bounds: Interval, question: Asked) -> None:
        self.network, self.box, self.bounds, self.question = network, box, bounds, question
        self.sites = Sites.of(network)
        self._site_of = self.sites.numbers(box.lower.device)
        self.numbering = self._numbered(box.lower.device)
        before = {node.name for node in network.graph.until(question.start)}
        self.relaxed = tuple(node for node in network.nonlinear if node.name in before)
        root = self.shaped(bounds)
        self.choices = Choices(network, self.relaxed, root)
        self._common = self._drifting()
        self._reach = self.sites.flattened(_largest(root))[0]

    def _numbered(self, device: torch.device) -> Numbers:
        return Numbering.of(self.network, self.sites, device)

    def _drifting(self) -> Tensor | None:
        """Slopes that ranks have together: replicas that drift apart would bound nothing."""
        common = self.choices.common
        return None if self.numbering.is_whole or not bool(common.any()) else common

    @property
    def is_alone(self) -> bool:
        """Whether no other process has a part of the network."""
        return self.network.exchange.axis.size == 1

    def tighten(self, bounds: Interval) -> None:
        """Take other bounds at the root, within those before: domains keep their meaning and their margins."""
        self.bounds = bounds
        self.choices.tighten(self.shaped(bounds))

    def shaped(self, bounds: Interval) -> dict[str, Interval]:
        """``(n, entries)`` of all sites as bounds of each value."""
        lower, upper = self.sites.unflattened(bounds.lower), self.sites.unflattened(bounds.upper)
        return {value: Interval(lower[value], upper[value]) for value in lower}

    def boxes(self, count: int) -> Interval:
        """The box, once for each of ``count`` domains."""
        return self.box.arranged(lambda end: end.expand(count, *end.shape[1:]))

    def fixed(self, domains: Domains, scale: Tensor) -> Fixed:
        """``scale`` of the multipliers is by number."""
        splits = self.numbering.placed(domains.index, domains.sign)
        clipped = Splits(splits.index, splits.sign, domains.at).clipped(self.known(domains.disjunct))
        within = clipped.meet(clipped)
        bounds = self.shaped(within)
        rows, offsets, used = self.question.of(domains.disjunct)
        return Fixed(
            number=domains.index,
            splits=splits,
            site=self._site_of[splits.index],
            held=within.arranged(lambda end: end.gather(1, splits.index)),
            empty=self.numbering.anywhere(self.empty(clipped)),
            bounds=bounds,
            families=self.choices.families(bounds),
            rows=rows,
            offsets=offsets,
            used=used,
            scale=scale[domains.index],
            own=Placed(domains.index[:, :0], domains.sign[:, :0]),
        )

    def known(self, disjunct: Tensor) -> Interval:
        """Bounds ``(n or 1, entries)`` of all sites for disjuncts ``(n,)``."""
        bounds = self.bounds
        return bounds if len(bounds.lower) == 1 else bounds.arranged(lambda end: end[disjunct])

    def empty(self, bounds: Interval) -> Tensor:
        """Whether ends ``(n, entries)`` of some entry cross by more than rounding, ``(n,)``: nothing is between."""
        return _empty(bounds, self._reach)

    def margins(self, fixed: Fixed, boxes: Interval, parameters: Parameters) -> Tensor:
        """``(n,)``."""
        relaxed = self.constrained(fixed, self.choices.pulling(fixed.families, parameters.slopes), parameters.beta)
        return self.walked(fixed, relaxed, boxes, parameters.weights)

    def constrained(
        self, fixed: Fixed, relaxed: dict[str, Relaxed], beta: Tensor, probe: Tensor | None = None
    ) -> dict[str, Relaxed]:
        """With the multipliers of the splits, and coefficients ``probe`` ``(n, entries)`` at all sites."""
        if not beta.shape[1] and not fixed.own.index.shape[1] and probe is None:
            return relaxed
        multipliers = Multipliers(beta * fixed.splits.here, fixed.splits.index, fixed.held)
        added, biases = (
            multipliers.coefficients(self.sites.entries),
            multipliers.biases(fixed.site, len(self.sites.each)),
        )
        if fixed.own.index.shape[1]:
            added = added.scatter_add(1, fixed.own.index, fixed.own.sign)
        return constrained(self.network, self.sites, relaxed, added if probe is None else added + probe, biases)

    def walked(self, fixed: Fixed, relaxed: Mapping[str, Relaxed], boxes: Interval, weights: Tensor) -> Tensor:
        """What a pass through the relaxations proves, ``(n,)``."""
        rows, offset = self.combined(fixed, weights)
        start = self.network.nodes[self.question.start]
        backward = Pass(self.network, {self.network.graph.input.name: boxes}, relaxed, ascends=True)
        found = backward.lower_bounds(start.name, rows.reshape(len(rows), 1, *start.shape)).squeeze(1) - offset
        return self.network.exchange.agree(found)

    @staticmethod
    def combined(fixed: Fixed, weights: Tensor) -> tuple[Tensor, Tensor]:
        """The combined row ``(n, 1, entries)`` of each domain, and its offset ``(n,)``."""
        weights = weights / weights.sum(dim=1, keepdim=True)
        return torch.bmm(weights[:, None], fixed.rows), (weights * fixed.offsets).sum(dim=1)

    def has_weights(self, fixed: Fixed) -> bool:
        """Whether there is anything to choose."""
        return fixed.used.shape[1] > 1

    def project(self, fixed: Fixed, weights: Tensor) -> None:
        """In place, to weights that sum to 1, of rows that are there."""
        used = fixed.used.to(weights.dtype)
        weights.mul_(used)
        total = weights.sum(dim=1, keepdim=True)
        weights.copy_(torch.where(total > 0, weights / total, used))

    def descent(self, fixed: Fixed, margin: Tensor, parameters: Parameters) -> Parameters:
        """Gradients of the negated margins: 0 where nothing depends on a parameter, perhaps no number without a bound.

        Those of multipliers are numbers, and lead away from a kink.
        """
        found = torch.autograd.grad(margin.sum().neg(), parameters.each, allow_unused=True, materialize_grads=True)
        slopes, beta, weights = found
        multipliers = Multipliers(parameters.beta.detach(), fixed.splits.index, fixed.held)
        climbing = multipliers.climbing(beta.nan_to_num(0, 0, 0).neg()) * fixed.splits.here
        falling = self.numbering.total(fixed.number, climbing).neg()
        if self._common is not None:
            slopes[:, self._common] = self.network.exchange.agree(slopes[:, self._common])
        return Parameters(slopes, falling, self._agreed(weights))

    def _agreed(self, weights: Tensor) -> Tensor:
        return self.network.exchange.agree(weights)

    def minimiser(self, boxes: Interval, arrived: Sequence[Tensor]) -> Tensor:
        """Where the bounds are attained, of the coefficients that arrived at the input."""
        slope = arrived[-1].detach().squeeze(1)
        corner = torch.where(slope > 0, boxes.lower, torch.where(slope < 0, boxes.upper, boxes.centre))
        return self.network.exchange.agree(boxes.nearest(corner))


def _empty(clipped: Interval, reach: Tensor) -> Tensor:
    """Domains ``(n,)`` in which the ends of some entry cross by more than rounding: nothing satisfies their splits.

    ``reach`` ``(entries,)`` is how large values like it are: an end near 0 may be what is left of larger terms.
    """
    dtype = clipped.lower.dtype
    return (clipped.lower - clipped.upper > ABSOLUTE_MARGIN[dtype] + RELATIVE_MARGIN[dtype] * reach).any(dim=1)


def _largest(values: Mapping[str, Interval]) -> dict[str, Tensor]:
    """Of each value the largest end of any of its entries, ``(1, *shape)``: the largest number if that is infinite."""
    sizes = {name: torch.maximum(each.lower[:1].abs(), each.upper[:1].abs()) for name, each in values.items()}
    return {name: size.nan_to_num(nan=torch.inf).nan_to_num().amax().expand_as(size) for name, size in sizes.items()}
