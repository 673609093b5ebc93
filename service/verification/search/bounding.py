"""Bounds of many domains at once, optimised over relaxations and multipliers (beta-CROWN, Wang et al., 2021)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import TypeVar

import torch
from torch import Tensor

from service.bounds.interval import Interval
from service.bounds.memory import UNLIMITED, MemoryBudget, in_parts, make_room
from service.bounds.relaxation import Family, Relaxed
from service.bounds.split import Recorded
from service.verification.search.ascent import Climb
from service.verification.search.domains import Domains
from service.verification.search.recording import AsWritten, FromRecords
from service.verification.search.walk import Fixed, Parameters, Walk

T = TypeVar("T")
FLOATS_PER_VALUE, FLOATS_PER_PIECEWISE, FLOATS_PER_CURVED = 8, 24, 100
"""What a pass with gradients keeps of each domain, roughly: for each value, and for each that is relaxed by two lines,
or by one of a family of curves or planes."""
AT_MOST = 2**31
"""Bytes of a batch on the host, where larger ones are no faster."""
PLANNED_FOR = 1.0
"""Seconds after which free memory is asked for again: a driver takes its time to answer."""
ENOUGH = 2**15
"""Domains at once: more are no faster, and other processes may want the memory, too."""


@dataclass(frozen=True, eq=False)
class Closer:
    """A look at bounded domains: what arrives at each non-linear operator, and where the bound is attained.

    ``coefficients`` ``(n, 1, *shape)`` by node, at its output; ``families``, ``relaxed`` and ``bounds`` are those of
    the operators, by node, and of the values that they read, by value; ``minimiser`` ``(n, *input shape)`` is the
    input with the least value of the linear bound over the box, or near it over a ball. ``reached`` ``(n, entries)``
    are the values of all sites there, if every operator were the line that bounds it.
    """

    margin: Tensor
    coefficients: Mapping[str, Tensor]
    families: Mapping[str, Family]
    relaxed: Mapping[str, Relaxed]
    bounds: Mapping[str, Interval]
    minimiser: Tensor
    reached: Tensor


@dataclass(frozen=True, eq=False)
class _Watched(Interval):
    """``whole``, and the coefficients ``(n, rows, *shape)`` that it was asked about."""

    whole: Interval
    arrived: list[Tensor]

    def least(self, coefficients: Tensor) -> Tensor:
        self.arrived.append(coefficients)
        return self.whole.least(coefficients)


class Bounding:
    """The domains of one search, or of one layer's: all are bounded by the same ``walk``."""

    def __init__(self, walk: Walk, memory: MemoryBudget = UNLIMITED) -> None:
        self.memory, self._planned, self._expires = memory, 0, -inf
        self.walk, self.network, self.question = walk, walk.network, walk.question
        self.box, self.sites, self.numbering = walk.box, walk.sites, walk.numbering
        self.scale = self.numbering.everywhere(torch.ones_like(walk.bounds.lower[0]))
        device = self.box.lower.device
        self.ascents: AsWritten | FromRecords = AsWritten(walk)
        if device.type == "cuda" and walk.is_alone:
            self.ascents = FromRecords.on(device, walk, self._bytes, memory)

    @property
    def bounds(self) -> Interval:
        """``(1, entries)`` of all sites at the root."""
        return self.walk.bounds

    @property
    def _bytes(self) -> int:
        """Of one domain."""
        floats = FLOATS_PER_VALUE * sum(node.size for node in self.network.graph.nodes)
        for node in self.network.nonlinear:
            is_piecewise = self.network.operator_of(node).pieces(node) is not None
            floats += node.size * (FLOATS_PER_PIECEWISE if is_piecewise else FLOATS_PER_CURVED)
        return floats * self.box.lower.element_size()

    @property
    def device(self) -> torch.device:
        return self.box.lower.device

    @property
    def capacity(self) -> int:
        """How many domains may be optimised together. All ranks that bound them must ask, at the same point."""
        now = time.monotonic()
        if not self.walk.is_alone or now > self._expires:
            most = ENOUGH if self.device.type != "cpu" else max(2, min(ENOUGH, AT_MOST // 2 // self._bytes))
            kept, least = self.ascents.held, self.numbering.least
            self._planned = self.memory.plan(self.device, self._bytes, most, share=2, kept=kept, least=least)
            self._expires = now + PLANNED_FOR
        return self._planned

    def make_room(self) -> None:
        """Give up what is only kept for speed, and plan anew."""
        self.ascents.forget()
        make_room(self.device)
        self._expires = -inf

    def roots(self, margins: Tensor) -> Domains:
        """One domain for each disjunct, without splits, of which ``margins`` ``(disjuncts, rows)`` are proved."""
        count, most = margins.shape
        nothing = margins.new_zeros(count, 0)
        return Domains(
            margin=margins.amax(dim=1),
            disjunct=torch.arange(count, device=margins.device),
            index=torch.zeros(count, 0, dtype=torch.int64, device=margins.device),
            sign=nothing,
            at=nothing,
            beta=nothing,
            weights=torch.nn.functional.one_hot(margins.argmax(dim=1), most).to(margins.dtype),
            slopes=self.walk.choices.start.to(margins).expand(count, -1),
        )

    def optimised(self, domains: Domains, climb: Climb) -> Domains:
        """The domains with the best margins met, never less than before, and the parameters that gave them."""
        return self.ascents.optimised(domains, climb, self.scale)

    @torch.no_grad()
    def margins(self, domains: Domains) -> Tensor:
        """What the domains' parameters prove, ``(n,)``."""

        def margins(rows: slice) -> Tensor:
            part = domains.rows(rows)
            fixed = self._fixed(part)
            return torch.where(fixed.empty, torch.inf, self._margins(fixed, Parameters.of(part)))

        return torch.cat(self.in_parts(len(domains), self.capacity, margins))

    def in_parts(self, total: int, at_once: int, run: Callable[[slice], T]) -> list[T]:
        """``run`` for some of ``total`` domains at a time, fewer where memory runs out and no other rank waits."""
        return in_parts(total, at_once, run, self.device, alone=self.walk.is_alone)

    @torch.no_grad()
    def best_of(self, domains: Domains, betas: Sequence[Tensor]) -> Domains:
        """The domains with the best of some multipliers, or with their own margins where these are better."""
        fixed = self._fixed(domains)
        best, kept = torch.where(fixed.empty, torch.inf, domains.margin), domains.beta
        for beta in betas:
            margin = self._margins(fixed, Parameters(domains.slopes, beta, domains.weights))
            better = margin > best
            best, kept = torch.where(better, margin, best), torch.where(better[:, None], beta, kept)
        return domains.with_(margin=best, beta=kept)

    @torch.no_grad()
    def closer(self, domains: Domains) -> Closer:
        fixed, boxes = self._fixed(domains), self.walk.boxes(len(domains))
        arrived: dict[str, Tensor] = {}
        relaxed = self.walk.choices.members(fixed.families, domains.slopes)
        box = _Watched(boxes.lower, boxes.upper, boxes, [])
        with torch.enable_grad():
            # What the bound gains by a change of the coefficient of a value is that value.
            probe = domains.slopes.new_zeros(len(domains), self.sites.entries, requires_grad=True)
            probed = self.walk.constrained(fixed, relaxed, domains.beta, probe)
            recorded = {name: Recorded(each, name, arrived) for name, each in probed.items()}
            weights = domains.weights.detach().requires_grad_()
            margin = self.walk.walked(fixed, recorded, box, weights)
            # Weights only so that rows have a gradient, for which other ranks may wait.
            reached, _ = torch.autograd.grad(margin.sum(), [probe, weights], allow_unused=True)
        coefficients = {name: each.detach() for name, each in arrived.items()}
        minimiser = self.walk.minimiser(boxes, box.arrived)
        reached = torch.zeros_like(probe) if reached is None else reached
        return Closer(margin.detach(), coefficients, fixed.families, relaxed, fixed.bounds, minimiser, reached)

    def calibrate(self, domains: Domains) -> None:
        """Take the size of the multipliers' steps from the coefficients that arrive in some domains."""
        closer = self.closer(domains)
        sizes = {value: torch.zeros_like(each.lower[0]) for value, each in closer.bounds.items()}
        for node in self.walk.relaxed:
            if node.name in closer.coefficients and len(node.inputs) == 1:
                sizes[node.inputs[0]] += closer.coefficients[node.name].abs().mean(dim=(0, 1))
        for value, size in sizes.items():
            sizes[value] = size + 0.1 * size.mean()
        own = self.sites.flattened({value: size[None] for value, size in sizes.items()})[0]
        self.scale = self.numbering.everywhere(own)

    def _fixed(self, domains: Domains) -> Fixed:
        return self.walk.fixed(domains, self.scale)

    def _margins(self, fixed: Fixed, parameters: Parameters) -> Tensor:
        return self.walk.margins(fixed, self.walk.boxes(len(fixed.empty)), parameters)
