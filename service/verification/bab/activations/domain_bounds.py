"""Bounds many domains at once, optimised over slopes and multipliers (α,β-CROWN; Wang et al., 2021)."""

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
from service.verification.bab.activations.domains import Domains
from service.verification.bab.activations.dual_objective import DomainBatch, DualObjective, DualParameters
from service.verification.bab.activations.recorded_optimisation import DirectOptimisation, RecordedOptimisation
from service.verification.bab.settings import DomainBoundsSettings, OptimiserSettings
from service.verification.bab.split_tree import UNKNOWN

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class DomainInspection:
    """An inspection of bounded domains: the coefficients at each non-linear operator, and where the bound is attained.

    ``coefficients`` ``(n, 1, *shape)`` by node, at its output; ``families`` and ``relaxations`` are the operators', by
    node, and ``bounds`` those of their inputs, by value; ``minimiser`` ``(n, *input shape)`` is the input with the
    least value of the linear bound over the box or the ball. ``reached`` ``(n, entries)`` are the values of
    all preactivations there, if every operator were the line that bounds it.
    """

    margin: Tensor
    coefficients: Mapping[str, Tensor]
    families: Mapping[str, Family]
    relaxations: Mapping[str, Relaxed]
    bounds: Mapping[str, Interval]
    minimiser: Tensor
    reached: Tensor


@dataclass(frozen=True, eq=False)
class CoefficientRecorder(Interval):
    """The set ``box``; records the coefficients ``(n, rows, *shape)`` that are minimised over it."""

    box: Interval
    arrived: list[Tensor]

    def least(self, coefficients: Tensor) -> Tensor:
        self.arrived.append(coefficients)
        return self.box.least(coefficients)


@dataclass(frozen=True, eq=False)
class _RecordedRelaxation(Relaxed):
    """An operator that keeps the coefficients ``(batch, rows, *shape)`` of its output, under its name."""

    relaxed: Relaxed
    name: str
    arrived: dict[str, Tensor]
    reaches_deciding = True

    def backward(self, coefficients: Tensor) -> tuple[tuple[Tensor, ...], Tensor | None]:
        self.arrived[self.name] = coefficients
        return self.relaxed.backward(coefficients)


class DomainBounds:
    """Bounds the domains of one search, or of one layer's, by the same ``objective``."""

    def __init__(
        self, objective: DualObjective, memory: MemoryBudget = UNLIMITED, settings: DomainBoundsSettings | None = None
    ) -> None:
        self.settings = settings or DomainBoundsSettings()
        self.memory, self._planned, self._expires = memory, 0, -inf
        self.objective, self.network, self.specification_rows = (
            objective,
            objective.network,
            objective.specification_rows,
        )
        self.box, self.preactivations, self.neuron_index = (
            objective.box,
            objective.preactivations,
            objective.neuron_index,
        )
        self.scale = self.neuron_index.everywhere(torch.ones_like(objective.bounds.lower[0]))
        device = self.box.lower.device
        self.optimisation: DirectOptimisation | RecordedOptimisation = DirectOptimisation(objective)
        if device.type == "cuda" and objective.is_alone:
            self.optimisation = RecordedOptimisation.on(device, objective, self._bytes, memory, self.settings.recording)

    @property
    def bounds(self) -> Interval:
        """Return the bounds ``(1, entries)`` of all preactivations at the root."""
        return self.objective.bounds

    @property
    def _bytes(self) -> int:
        """Return the bytes of one domain."""
        settings = self.settings
        floats = settings.floats_per_value * sum(node.size for node in self.network.graph.nodes)
        for node in self.network.nonlinear:
            is_piecewise = self.network.operator_of(node).pieces(node) is not None
            floats += node.size * (settings.floats_per_piecewise if is_piecewise else settings.floats_per_curved)
        return floats * self.box.lower.element_size()

    @property
    def device(self) -> torch.device:
        return self.box.lower.device

    @property
    def capacity(self) -> int:
        """Return how many domains may be optimised together. All ranks that bound them must ask, at the same point."""
        now = time.monotonic()
        if not self.objective.is_alone or now > self._expires:
            most = self.settings.most_domains
            if self.device.type == "cpu":
                most = max(2, min(most, self.settings.largest_host_bytes // 2 // self._bytes))
            kept, least = self.optimisation.held, self.neuron_index.least
            self._planned = self.memory.plan(self.device, self._bytes, most, share=2, kept=kept, least=least)
            self._expires = now + self.settings.plan_seconds
        return self._planned

    def make_room(self) -> None:
        """Free everything kept for speed alone, and plan anew."""
        self.optimisation.forget()
        make_room(self.device)
        self._expires = -inf

    def roots(self, margins: Tensor) -> Domains:
        """Return one domain per disjunct, without splits, with the proved ``margins`` ``(disjuncts, rows)``."""
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
            slopes=self.objective.slope_parameters.start.to(margins).expand(count, -1),
            lower=margins.new_full((count, len(self.objective.clipped)), -inf),
            upper=margins.new_full((count, len(self.objective.clipped)), inf),
            node=torch.full((count,), UNKNOWN, device=margins.device),
        )

    def optimise(self, domains: Domains, settings: OptimiserSettings) -> Domains:
        """Return the domains with the best margins found, never less than before, and their parameters."""
        return self.optimisation.optimise(domains, settings, self.scale)

    @torch.no_grad()
    def margins(self, domains: Domains) -> Tensor:
        """Return the margins that the domains' parameters prove, ``(n,)``."""

        def margins(rows: slice) -> Tensor:
            part = domains.rows(rows)
            batch = self._batch_of(part)
            return torch.where(batch.empty, torch.inf, self._margins(batch, DualParameters.of(part)))

        return torch.cat(self.in_parts(len(domains), self.capacity, margins))

    def in_parts(self, total: int, at_once: int, run: Callable[[slice], T]) -> list[T]:
        """Run ``run`` for some of ``total`` domains at a time, fewer where memory runs out and no other rank waits."""
        return in_parts(total, at_once, run, self.device, alone=self.objective.is_alone)

    @torch.no_grad()
    def best_of(self, domains: Domains, betas: Sequence[Tensor]) -> Domains:
        """Return the domains with the best of some multipliers, or with their own margins where these are better."""
        batch = self._batch_of(domains)
        best, kept = torch.where(batch.empty, torch.inf, domains.margin), domains.beta
        for beta in betas:
            margin = self._margins(batch, DualParameters(domains.slopes, beta, domains.weights))
            better = margin > best
            best, kept = torch.where(better, margin, best), torch.where(better[:, None], beta, kept)
        return domains.with_(margin=best, beta=kept)

    @torch.no_grad()
    def inspect(self, domains: Domains) -> DomainInspection:
        batch, boxes = self._batch_of(domains), self.objective.boxes(len(domains))
        arrived: dict[str, Tensor] = {}
        relaxed = self.objective.slope_parameters.members(batch.families, domains.slopes)
        box = CoefficientRecorder(boxes.lower, boxes.upper, boxes, [])
        with torch.enable_grad():
            # The derivative of the bound by a value's coefficient is that value.
            probe = domains.slopes.new_zeros(len(domains), self.preactivations.entries, requires_grad=True)
            probed = self.objective.add_multipliers(batch, relaxed, domains.beta, probe)
            recorded = {name: _RecordedRelaxation(each, name, arrived) for name, each in probed.items()}
            weights = domains.weights.detach().requires_grad_()
            margin = self.objective.backward_bound(batch, recorded, box, weights)
            # The weights only give rows a gradient, for which other ranks may wait.
            reached, _ = torch.autograd.grad(margin.sum(), [probe, weights], allow_unused=True)
        coefficients = {name: each.detach() for name, each in arrived.items()}
        minimiser = self.objective.minimiser(boxes, box.arrived)
        reached = torch.zeros_like(probe) if reached is None else reached
        return DomainInspection(
            margin.detach(), coefficients, batch.families, relaxed, batch.bounds, minimiser, reached
        )

    def planes(self, domains: Domains) -> tuple[Tensor, Tensor]:
        """Return coefficients ``(n, *input shape)`` and constants ``(n,)`` of functions of the input that are at most
        the combined rows less their offsets, within the domains.
        """
        batch, boxes = self._batch_of(domains), self.objective.boxes(len(domains))
        box = CoefficientRecorder(boxes.lower, boxes.upper, boxes, [])
        margin = self.objective.margins(batch, box, DualParameters.of(domains))
        if not box.arrived:  # the bound says nothing about the input
            return torch.zeros_like(boxes.lower), margin
        return box.arrived[-1].squeeze(1), margin - boxes.least(box.arrived[-1]).squeeze(1)

    def calibrate(self, domains: Domains) -> None:
        """Set the size of the multipliers' steps from the coefficients in some domains."""
        inspection = self.inspect(domains)
        sizes = {value: torch.zeros_like(each.lower[0]) for value, each in inspection.bounds.items()}
        for node in self.objective.relaxed_nodes:
            if node.name in inspection.coefficients and len(node.inputs) == 1:
                sizes[node.inputs[0]] += inspection.coefficients[node.name].abs().mean(dim=(0, 1))
        for value, size in sizes.items():
            sizes[value] = size + 0.1 * size.mean()
        own = self.preactivations.flattened({value: size[None] for value, size in sizes.items()})[0]
        self.scale = self.neuron_index.everywhere(own)

    def _batch_of(self, domains: Domains) -> DomainBatch:
        return self.objective.batch_of(domains, self.scale)

    def _margins(self, batch: DomainBatch, parameters: DualParameters) -> Tensor:
        return self.objective.margins(batch, self.objective.boxes(len(batch.empty)), parameters)
