"""Bounds of many domains at once, optimised over relaxations and multipliers (beta-CROWN, Wang et al., 2021).

Only the rows of the property walk, one for each domain: bounds of hidden values are the root's, clipped where a
domain is split. The rows of a disjunct are combined with weights w ≥ 0 that sum to 1: where Σ w·(row·y − threshold)
is positive, some row is, and that is all that a proof needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from service.bounds.backward import Pass
from service.bounds.graph import Node
from service.bounds.interval import Interval
from service.bounds.network import Network
from service.bounds.relaxation import Family, Relaxed
from service.bounds.rules.piecewise import LeakyRelu
from service.bounds.split import Bent, Recorded, Sites, Splits, constrained, kink
from service.verification.search.domains import Domains

SLOPE_RATE, MULTIPLIER_RATE, WEIGHT_RATE = 0.1, 0.1, 0.1
DECAY = 0.97
FLOATS_PER_VALUE = 40
"""What a pass with gradients keeps for each value of each domain, roughly."""
HOST_BYTES = 2**31
"""For a batch on a device without a memory of its own."""
CHECK_EVERY = 5
"""Iterations between looks at whether all domains are proved, each of which waits for the device."""


@dataclass(frozen=True, eq=False)
class Question:
    """Rows of each disjunct, filled up to equally many.

    ``rows`` ``(disjuncts, rows, outputs)``; ``offsets`` ``(disjuncts, rows)`` is what a row must exceed, thresholds
    with the margin for rounding; ``used`` tells the rows that are there from the filling.
    """

    rows: Tensor
    offsets: Tensor
    used: Tensor


@dataclass(frozen=True, eq=False)
class Closer:
    """A look at bounded domains: what arrives at each non-linear operator, and where the bound is attained.

    ``coefficients`` ``(n, 1, *shape)`` by node, at its output; ``bounds`` of the values that the operators read, by
    value; ``minimiser`` ``(n, *input shape)`` is the input with the least value of the linear bound.
    """

    margin: Tensor
    coefficients: Mapping[str, Tensor]
    bounds: Mapping[str, Interval]
    minimiser: Tensor


@dataclass(frozen=True, eq=False)
class _Fixed:
    """What does not change while a batch of domains is optimised."""

    domains: Domains
    splits: Splits
    bounds: Mapping[str, Interval]
    families: Mapping[str, Family]
    box: Interval


class Bounding:
    """A network on one box, whose hidden values have the root's ``bounds``, ``(1, *shape)`` by value."""

    def __init__(self, network: Network, box: Interval, bounds: Mapping[str, Interval], question: Question) -> None:
        self.network, self.box, self.question = network, box, question
        self.sites = Sites.of(network)
        self.lower = self.sites.flattened({name: each.lower for name, each in bounds.items()})
        self.upper = self.sites.flattened({name: each.upper for name, each in bounds.items()})
        self.anywhere = any(kink(network, site) != 0 for site in self.sites.each)
        root = self._bounds(self._no_splits())
        self._open = {
            node.name: self.network.rule_of(node)
            .improvable_on(node, [root[value] for value in node.inputs])[0]
            .flatten(1)
            .any(dim=0)
            .nonzero()
            .squeeze(1)
            for node in network.nonlinear
        }
        self._slopes = {name: family.start for name, family in self._families(root).items()}

    @property
    def capacity(self) -> int:
        """How many domains may be optimised together."""
        floats = FLOATS_PER_VALUE * sum(node.size for node in self.network.graph.nodes)
        free = torch.cuda.mem_get_info(self.lower.device)[0] if self.lower.is_cuda else HOST_BYTES
        return max(2, free // 2 // (floats * self.lower.element_size()))

    def roots(self, margins: Tensor) -> Domains:
        """One domain for each disjunct, without splits, of which ``margins`` ``(disjuncts, rows)`` are proved."""
        rows = self.question.rows
        count, most = rows.shape[:2]
        nothing = rows.new_zeros(count, 0)
        starts = [start.reshape(1, -1) for every in self._slopes.values() for start in every]
        slopes = torch.cat(starts, dim=1) if starts else rows.new_zeros(1, 0)
        return Domains(
            margin=margins.amax(dim=1),
            disjunct=torch.arange(count, device=rows.device),
            index=torch.zeros(count, 0, dtype=torch.int64, device=rows.device),
            sign=nothing,
            at=nothing,
            beta=nothing,
            weights=torch.nn.functional.one_hot(margins.argmax(dim=1), most).to(rows.dtype),
            slopes=slopes.expand(count, -1).clone(),
        )

    def optimised(self, domains: Domains, iterations: int) -> Domains:
        """The domains with the best margins met, never less than before, and the parameters that gave them."""
        fixed = self._fixed(domains)
        moving = [domains.slopes, domains.beta, domains.weights]
        best, kept = domains.margin, list(moving)
        adam = _Adam(moving, [SLOPE_RATE, MULTIPLIER_RATE, WEIGHT_RATE])
        for step in range(iterations + 1):
            with torch.enable_grad():
                inputs = [each.detach().requires_grad_() for each in moving]
                margin = self._margin(fixed, *inputs)
                gradients = _gradients(margin, inputs) if step < iterations else []
            margin = margin.detach()
            better = margin > best
            best = torch.where(better, margin, best)
            kept = [torch.where(better[:, None], new, old) for new, old in zip(moving, kept, strict=True)]
            if step == iterations or (step % CHECK_EVERY == 0 and bool((best > 0).all())):
                break
            moving = self._projected(fixed, adam.step(moving, gradients))
        return domains.with_(margin=best, slopes=kept[0], beta=kept[1], weights=kept[2])

    @torch.no_grad()
    def margins(self, domains: Domains) -> Tensor:
        """What the domains' parameters prove, ``(n,)``."""
        found = []
        for start in range(0, len(domains), self.capacity):
            part = domains.rows(slice(start, start + self.capacity))
            found.append(self._margin(self._fixed(part), part.slopes, part.beta, part.weights))
        return torch.cat(found)

    @torch.no_grad()
    def closer(self, domains: Domains) -> Closer:
        fixed = self._fixed(domains)
        arrived: dict[str, Tensor] = {}
        relaxed = self._relaxed(fixed, domains.slopes, domains.beta)
        recorded = {name: Recorded(each, name, arrived) for name, each in relaxed.items()}
        with torch.enable_grad():
            # The gradient with respect to the box's centre is what arrives at the input.
            centre = fixed.box.centre.detach().requires_grad_()
            box = Interval.around(centre, fixed.box.radius)
            margin = self._walked(fixed, recorded, box, domains.weights)
            (slope,) = torch.autograd.grad(margin.sum(), centre)
        minimiser = torch.where(slope > 0, fixed.box.lower, torch.where(slope < 0, fixed.box.upper, fixed.box.centre))
        return Closer(margin.detach(), arrived, fixed.bounds, minimiser)

    def _margin(self, fixed: _Fixed, slopes: Tensor, beta: Tensor, weights: Tensor) -> Tensor:
        return self._walked(fixed, self._relaxed(fixed, slopes, beta), fixed.box, weights)

    def _walked(self, fixed: _Fixed, relaxed: Mapping[str, Relaxed], box: Interval, weights: Tensor) -> Tensor:
        weights = weights / weights.sum(dim=1, keepdim=True)
        disjunct = fixed.domains.disjunct
        rows = torch.bmm(weights[:, None], self.question.rows[disjunct])
        offset = (weights * self.question.offsets[disjunct]).sum(dim=1)
        start = self.network.graph.output
        backward = Pass(self.network, {self.network.graph.input.name: box}, relaxed)
        return backward.lower_bounds(start.name, rows.reshape(len(rows), 1, *start.shape)).squeeze(1) - offset

    def _relaxed(self, fixed: _Fixed, slopes: Tensor, beta: Tensor) -> dict[str, Relaxed]:
        sizes = [start.numel() for starts in self._slopes.values() for start in starts]
        parts = iter(torch.split(slopes, sizes, dim=1))
        relaxed: dict[str, Relaxed] = {}
        for name, starts in self._slopes.items():
            own = tuple(next(parts).reshape(-1, 1, *start.shape[1:]) for start in starts)
            relaxed[name] = fixed.families[name].member(own)
        if not beta.shape[1]:
            return relaxed
        return constrained(self.network, self.sites, relaxed, fixed.splits, beta)

    def _projected(self, fixed: _Fixed, moving: list[Tensor]) -> list[Tensor]:
        slopes, beta, weights = moving
        weights = weights.clamp(min=0) * self.question.used[fixed.domains.disjunct]
        total = weights.sum(dim=1, keepdim=True)
        used = self.question.used[fixed.domains.disjunct].to(weights.dtype)
        return [slopes.clamp(0, 1), beta.clamp(min=0), torch.where(total > 0, weights / total, used)]

    @torch.no_grad()
    def _fixed(self, domains: Domains) -> _Fixed:
        splits = Splits(domains.index, domains.sign, domains.at if self.anywhere else None)
        bounds = self._bounds(splits)
        box = self.box.map(lambda end: end.expand(len(domains), *end.shape[1:]))
        return _Fixed(domains, splits, bounds, self._families(bounds), box)

    def _no_splits(self) -> Splits:
        nothing = self.lower[:, :0]
        return Splits(nothing.long(), nothing)

    def _bounds(self, splits: Splits) -> dict[str, Interval]:
        clipped = splits.clipped(self.lower, self.upper)
        lower, upper = self.sites.unflattened(clipped.lower), self.sites.unflattened(clipped.upper)
        return {value: Interval(lower[value], upper[value]) for value in lower}

    def _families(self, bounds: Mapping[str, Interval]) -> dict[str, Family]:
        return {
            node.name: self._family(node, [bounds[value] for value in node.inputs]) for node in self.network.nonlinear
        }

    def _family(self, node: Node, bounds: Sequence[Interval]) -> Family:
        rule = self.network.rule_of(node)
        if isinstance(rule, LeakyRelu):
            return Bent.on(node, rule, bounds[0], self._open[node.name])
        return rule.family(node, bounds)


class _Adam:
    """Ascent (Kingma and Ba, 2015) of several tensors, each at its own rate."""

    def __init__(self, moving: list[Tensor], rates: list[float]) -> None:
        self.rates, self.count = rates, 0
        self.first = [torch.zeros_like(each) for each in moving]
        self.second = [torch.zeros_like(each) for each in moving]

    def step(self, moving: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
        self.count += 1
        scale = (1 - 0.999**self.count) ** 0.5 / (1 - 0.9**self.count) * DECAY**self.count
        stepped = []
        for each, gradient, first, second, rate in zip(
            moving, gradients, self.first, self.second, self.rates, strict=True
        ):
            first.lerp_(gradient, 0.1)
            second.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
            stepped.append(torch.addcdiv(each, first, second.sqrt().add_(1e-12), value=rate * scale))
        return stepped


def _gradients(margin: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """Zero where nothing depends on an input, or where a bound is not finite."""
    found = torch.autograd.grad(margin.sum(), inputs, allow_unused=True)
    return [
        torch.zeros_like(each) if gradient is None else gradient.nan_to_num(0, 0, 0)
        for each, gradient in zip(inputs, found, strict=True)
    ]
