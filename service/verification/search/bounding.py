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
from service.bounds.split import Bent, Multipliers, Recorded, Sites, Splits, constrained
from service.verification.certify import ABSOLUTE_MARGIN, RELATIVE_MARGIN
from service.verification.search.ascent import Adam, Climb
from service.verification.search.domains import Domains
from service.verification.search.numbering import Numbering, Numbers, Placed

FLOATS_PER_VALUE = 40
"""What a pass with gradients keeps for each value of each domain, roughly."""
HOST_BYTES = 2**31
"""For a batch on a device without a memory of its own."""
CHECK_EVERY = 5
"""Iterations between looks at whether all domains are proved, each of which waits for the device."""


@dataclass(frozen=True, eq=False)
class Question:
    """Rows of each disjunct over the value of node ``start``, filled up to equally many.

    ``rows`` ``(disjuncts, rows, entries)``; ``offsets`` ``(disjuncts, rows)`` is what a row must exceed, thresholds
    with the margin for rounding; ``used`` tells the rows that are there from the filling.
    """

    start: str
    rows: Tensor
    offsets: Tensor
    used: Tensor


@dataclass(frozen=True, eq=False)
class Closer:
    """A look at bounded domains: what arrives at each non-linear operator, and where the bound is attained.

    ``coefficients`` ``(n, 1, *shape)`` by node, at its output; ``relaxed`` and ``bounds`` are those of the operators,
    by node, and of the values that they read, by value; ``minimiser`` ``(n, *input shape)`` is the input with the
    least value of the linear bound over the box, or near it over a ball. ``reached`` ``(n, entries)`` are the values
    of all sites there, if every operator were the line that bounds it.
    """

    margin: Tensor
    coefficients: Mapping[str, Tensor]
    relaxed: Mapping[str, Relaxed]
    bounds: Mapping[str, Interval]
    minimiser: Tensor
    reached: Tensor


@dataclass(frozen=True, eq=False)
class Fixed:
    """What does not change while a batch of domains is optimised."""

    domains: Domains
    splits: Placed
    empty: Tensor
    held: Interval
    bounds: Mapping[str, Interval]
    families: Mapping[str, Family]
    box: Interval


@dataclass(frozen=True, eq=False)
class _Watched(Interval):
    """``whole``, and the coefficients ``(n, rows, *shape)`` that it was asked about."""

    whole: Interval
    arrived: list[Tensor]

    def least(self, coefficients: Tensor) -> Tensor:
        self.arrived.append(coefficients)
        return self.whole.least(coefficients)


class Bounding:
    """A network on one box, whose hidden values have the ``bounds`` ``(1, entries)`` of all sites at the root."""

    def __init__(self, network: Network, box: Interval, bounds: Interval, question: Question) -> None:
        self.network, self.box, self.question = network, box, question
        self.sites = Sites.of(network)
        self.bounds = bounds
        self.numbering = self._numbered(bounds.lower.device)
        self.scale = self.numbering.everywhere(torch.ones_like(bounds.lower[0]))
        before = {node.name for node in network.graph.until(question.start)}
        self.relaxed = tuple(node for node in network.nonlinear if node.name in before)
        root = self.shaped(bounds)
        self._open = {node.name: _entries(self._improvable(node, root)) for node in self.relaxed}
        self._reach = self.sites.flattened(_largest(root))[0]
        self.tighten(bounds)

    def _numbered(self, device: torch.device) -> Numbers:
        return Numbering.of(self.network, self.sites, device)

    def tighten(self, bounds: Interval) -> None:
        """Take other bounds at the root, within those before: domains keep their meaning and their margins."""
        self.bounds = bounds
        self._slopes = {name: family.start for name, family in self._families(self.shaped(bounds)).items()}
        common = [not self.network.is_own(name) for name, starts in self._slopes.items() for _ in starts]
        sizes = [start.numel() for starts in self._slopes.values() for start in starts]
        flags = torch.tensor(common, dtype=torch.bool).repeat_interleave(torch.tensor(sizes, dtype=torch.int64))
        self._common = flags.to(bounds.lower.device)

    @property
    def capacity(self) -> int:
        """How many domains may be optimised together."""
        floats = FLOATS_PER_VALUE * sum(node.size for node in self.network.graph.nodes)
        count = max(2, _free_bytes(self.box.lower.device) // 2 // (floats * self.box.lower.element_size()))
        return self.numbering.least(count)

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

    def optimised(self, domains: Domains, climb: Climb) -> Domains:
        """The domains with the best margins met, never less than before, and the parameters that gave them."""
        fixed = self._fixed(domains)
        moving = [domains.slopes, domains.beta, domains.weights]
        best, kept = torch.where(fixed.empty, torch.inf, domains.margin), list(moving)
        rates: list[float | Tensor] = [climb.slopes, climb.multipliers * self.scale[domains.index], climb.weights]
        adam = Adam(moving, rates, climb.decay)
        for step in range(climb.iterations + 1):
            with torch.enable_grad():
                inputs = [each.detach().requires_grad_() for each in moving]
                margin = self._margin(fixed, *inputs)
                gradients = self._gradients(fixed, margin, inputs) if step < climb.iterations else []
            margin = margin.detach()
            better = margin > best
            best = torch.where(better, margin, best)
            kept = [torch.where(better[:, None], new, old) for new, old in zip(moving, kept, strict=True)]
            if step == climb.iterations or (step % CHECK_EVERY == 0 and bool((best > 0).all())):
                break
            moving = self._projected(fixed, moving, adam.step(moving, gradients))
        return domains.with_(margin=best, slopes=kept[0], beta=kept[1], weights=kept[2])

    def members(self, domains: Domains, bounds: Mapping[str, Interval]) -> dict[str, Relaxed]:
        """The relaxations that the domains' slopes choose on such bounds of the sites, by node."""
        return self._chosen(self._families(bounds), domains.slopes)

    @torch.no_grad()
    def margins(self, domains: Domains) -> Tensor:
        """What the domains' parameters prove, ``(n,)``."""
        found = []
        size = self.capacity  # once: on a device it changes with every look
        for start in range(0, len(domains), size):
            part = domains.rows(slice(start, start + size))
            fixed = self._fixed(part)
            margin = self._margin(fixed, part.slopes, part.beta, part.weights)
            found.append(torch.where(fixed.empty, torch.inf, margin))
        return torch.cat(found)

    @torch.no_grad()
    def best_of(self, domains: Domains, betas: Sequence[Tensor]) -> Domains:
        """The domains with the best of some multipliers, or with their own margins where these are better."""
        fixed = self._fixed(domains)
        best, kept = torch.where(fixed.empty, torch.inf, domains.margin), domains.beta
        for beta in betas:
            margin = self._margin(fixed, domains.slopes, beta, domains.weights)
            better = margin > best
            best, kept = torch.where(better, margin, best), torch.where(better[:, None], beta, kept)
        return domains.with_(margin=best, beta=kept)

    @torch.no_grad()
    def closer(self, domains: Domains) -> Closer:
        fixed = self._fixed(domains)
        arrived: dict[str, Tensor] = {}
        relaxed = self._chosen(fixed.families, domains.slopes)
        box = _Watched(fixed.box.lower, fixed.box.upper, fixed.box, [])
        with torch.enable_grad():
            # What the bound gains by a change of the coefficient of a value is that value.
            probe = domains.slopes.new_zeros(len(domains), self.sites.entries, requires_grad=True)
            probed = self._constrained(fixed, relaxed, domains.beta, probe)
            recorded = {name: Recorded(each, name, arrived) for name, each in probed.items()}
            weights = domains.weights.detach().requires_grad_()
            margin = self._walked(fixed, recorded, box, weights)
            # Weights only so that rows have a gradient, for which other ranks may wait.
            reached, _ = torch.autograd.grad(margin.sum(), [probe, weights], allow_unused=True)
        coefficients = {name: each.detach() for name, each in arrived.items()}
        minimiser = self._minimiser(fixed, box.arrived)
        reached = torch.zeros_like(probe) if reached is None else reached
        return Closer(margin.detach(), coefficients, relaxed, fixed.bounds, minimiser, reached)

    def _minimiser(self, fixed: Fixed, arrived: Sequence[Tensor]) -> Tensor:
        """Of the coefficients that arrived at the input."""
        box, slope = fixed.box, arrived[-1].detach().squeeze(1)
        corner = torch.where(slope > 0, box.lower, torch.where(slope < 0, box.upper, box.centre))
        return self.network.exchange.agree(box.nearest(corner))

    def calibrate(self, domains: Domains) -> None:
        """Take the size of the multipliers' steps from the coefficients that arrive in some domains."""
        closer = self.closer(domains)
        sizes = {value: torch.zeros_like(each.lower[0]) for value, each in closer.bounds.items()}
        for node in self.relaxed:
            if node.name in closer.coefficients and len(node.inputs) == 1:
                sizes[node.inputs[0]] += closer.coefficients[node.name].abs().mean(dim=(0, 1))
        for value, size in sizes.items():
            sizes[value] = size + 0.1 * size.mean()
        own = self.sites.flattened({value: size[None] for value, size in sizes.items()})[0]
        self.scale = self.numbering.everywhere(own)

    def _margin(self, fixed: Fixed, slopes: Tensor, beta: Tensor, weights: Tensor) -> Tensor:
        relaxed = self._constrained(fixed, self._chosen(fixed.families, slopes), beta)
        return self._walked(fixed, relaxed, fixed.box, weights)

    def _walked(self, fixed: Fixed, relaxed: Mapping[str, Relaxed], box: Interval, weights: Tensor) -> Tensor:
        rows, offset = self._rows(fixed, weights)
        start = self.network.nodes[self.question.start]
        backward = Pass(self.network, {self.network.graph.input.name: box}, relaxed)
        found = backward.lower_bounds(start.name, rows.reshape(len(rows), 1, *start.shape)).squeeze(1) - offset
        return self.network.exchange.agree(found)

    def _rows(self, fixed: Fixed, weights: Tensor) -> tuple[Tensor, Tensor]:
        """The combined row ``(n, 1, entries)`` of each domain, and its offset ``(n,)``."""
        weights = weights / weights.sum(dim=1, keepdim=True)
        disjunct = fixed.domains.disjunct
        rows = torch.bmm(weights[:, None], self.question.rows[disjunct])
        return rows, (weights * self.question.offsets[disjunct]).sum(dim=1)

    def _chosen(self, families: Mapping[str, Family], slopes: Tensor) -> dict[str, Relaxed]:
        sizes = [start.numel() for starts in self._slopes.values() for start in starts]
        parts = iter(torch.split(slopes, sizes, dim=1))
        relaxed: dict[str, Relaxed] = {}
        for name, starts in self._slopes.items():
            own = tuple(next(parts).reshape(len(slopes), 1, *start.shape[1:]) for start in starts)
            relaxed[name] = families[name].member(own)
        return relaxed

    def _constrained(
        self, fixed: Fixed, relaxed: dict[str, Relaxed], beta: Tensor, probe: Tensor | None = None
    ) -> dict[str, Relaxed]:
        if not beta.shape[1] and probe is None:
            return relaxed
        multipliers = Multipliers(torch.where(fixed.splits.here, beta, 0), fixed.splits.index, fixed.held)
        added, biases = multipliers.coefficients(self.sites.entries), multipliers.biases(self.sites.entries)
        return constrained(self.network, self.sites, relaxed, added if probe is None else added + probe, biases)

    def _gradients(self, fixed: Fixed, margin: Tensor, inputs: list[Tensor]) -> list[Tensor]:
        """Zero where nothing depends on an input, or where a bound is not finite."""
        found = torch.autograd.grad(margin.sum(), inputs, allow_unused=True)
        slopes, beta, weights = (
            torch.zeros_like(each) if gradient is None else gradient.nan_to_num(0, 0, 0)
            for each, gradient in zip(inputs, found, strict=True)
        )
        climbing = Multipliers(inputs[1].detach(), fixed.splits.index, fixed.held).climbing(beta) * fixed.splits.here
        climbing = self.numbering.total(fixed.domains.index, climbing)
        return [self._equal_slopes(slopes), climbing, self.network.exchange.agree(weights)]

    def _equal_slopes(self, slopes: Tensor) -> Tensor:
        """The same on all ranks where the operators are: replicas that drift apart would bound nothing."""
        if self.numbering.is_whole or not self._common.any():
            return slopes
        slopes[:, self._common] = self.network.exchange.agree(slopes[:, self._common])
        return slopes

    def _projected(self, fixed: Fixed, before: list[Tensor], moving: list[Tensor]) -> list[Tensor]:
        slopes, beta, weights = moving
        # A multiplier that would change its sign stops at the kink.
        beta = torch.where(before[1] * beta < 0, torch.zeros_like(beta), beta)
        weights = weights.clamp(min=0) * self.question.used[fixed.domains.disjunct]
        total = weights.sum(dim=1, keepdim=True)
        used = self.question.used[fixed.domains.disjunct].to(weights.dtype)
        return [slopes.clamp(0, 1), beta, torch.where(total > 0, weights / total, used)]

    @torch.no_grad()
    def _fixed(self, domains: Domains) -> Fixed:
        splits = self.numbering.placed(domains.index, domains.sign)
        clipped = Splits(splits.index, splits.sign, domains.at).clipped(self.bounds)
        met = clipped.meet(clipped)
        bounds, held = self.shaped(met), met.arranged(lambda end: end.gather(1, splits.index))
        box = self.box.arranged(lambda end: end.expand(len(domains), *end.shape[1:]))
        empty = self.numbering.anywhere(_empty(clipped, self._reach))
        return Fixed(domains, splits, empty, held, bounds, self._families(bounds), box)

    def shaped(self, bounds: Interval) -> dict[str, Interval]:
        """``(n, entries)`` of all sites as bounds of each value."""
        lower, upper = self.sites.unflattened(bounds.lower), self.sites.unflattened(bounds.upper)
        return {value: Interval(lower[value], upper[value]) for value in lower}

    def _improvable(self, node: Node, bounds: Mapping[str, Interval]) -> Tensor:
        return self.network.rule_of(node).improvable_on(node, [bounds[value] for value in node.inputs])[0]

    def _families(self, bounds: Mapping[str, Interval]) -> dict[str, Family]:
        return {node.name: self._family(node, [bounds[value] for value in node.inputs]) for node in self.relaxed}

    def _family(self, node: Node, bounds: Sequence[Interval]) -> Family:
        rule = self.network.rule_of(node)
        if isinstance(rule, LeakyRelu):
            return Bent.on(node, rule, bounds[0], self._open[node.name])
        return rule.family(node, bounds)


def _free_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return HOST_BYTES
    # What torch holds without using it is free for it too.
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _entries(mask: Tensor) -> Tensor:
    """Numbers of the entries that are set in any instance, int64."""
    return mask.flatten(1).any(dim=0).nonzero().squeeze(1)


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
