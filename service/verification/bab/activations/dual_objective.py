"""The dual objective of β-CROWN (Wang et al., 2021): the margin that parameters of many domains prove, and its
gradient.

Only the specification's rows go backward, one for each domain: bounds of hidden values are the root's, clipped where a
domain is split. The rows of a disjunct are combined with weights w ≥ 0 that sum to 1: if Σ w·(row·y −
threshold) is positive, some row is positive, which is all that a proof needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from service.bounds.flat import by_instance
from service.bounds.graph import Node
from service.bounds.interval import Interval
from service.bounds.linear.plain import Pass
from service.bounds.near import NearLayers, NearPieces, with_offsets
from service.bounds.network import Network
from service.bounds.relaxation import Family, Relaxed
from service.bounds.split import Multipliers, PiecewiseSlopes, Places, Preactivations, Splits
from service.verification.bab.activations.domains import Domains
from service.verification.bab.activations.neuron_index import LocalSplits, NeuronIndex, NeuronIndexing
from service.verification.verdict import ABSOLUTE_MARGIN, RELATIVE_MARGIN


class SpecificationRows(Protocol):
    """Specification rows of some disjuncts over the value of node ``start``, filled up to equally many (C matrices)."""

    @property
    def start(self) -> str:
        """Return the name of the node."""

    def of(self, disjunct: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return for disjuncts ``(n,)`` rows ``(n, rows, entries)``, their thresholds, and which are used."""


@dataclass(frozen=True, eq=False)
class DisjunctRows:
    """``rows`` ``(disjuncts, rows, entries)``; ``offsets`` ``(disjuncts, rows)`` are the values that rows must exceed:
    thresholds with the margin for rounding; ``used`` marks real rows, not padding.
    """

    start: str
    rows: Tensor
    offsets: Tensor
    used: Tensor

    def of(self, disjunct: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.rows[disjunct], self.offsets[disjunct], self.used[disjunct]


@dataclass(frozen=True, eq=False)
class DualParameters:
    """The parameters of domains: ``slopes`` ``(n, parameters)``, ``beta`` ``(n, depth)``, ``weights`` ``(n, rows)``."""

    slopes: Tensor
    beta: Tensor
    weights: Tensor

    @classmethod
    def of(cls, domains: Domains) -> DualParameters:
        return cls(domains.slopes, domains.beta, domains.weights)

    @property
    def each(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.slopes, self.beta, self.weights


@dataclass(frozen=True, eq=False)
class DomainBatch:
    """Constants of the optimisation of a batch of ``n`` domains.

    ``number`` and ``splits`` ``(n, depth)`` are the splits over all ranks and this rank's, ``preactivation`` and
    ``held`` the numbers of the preactivations and the bounds of their entries; ``empty`` ``(n,)`` marks domains whose
    splits contradict each other. ``bounds`` are by value, ``families`` by node, and so is ``near``, what a ball of
    inputs adds to the relaxations; ``rows`` ``(n, rows, entries)``, ``offsets`` and ``used`` ``(n, rows)`` those of the
    domains' disjuncts. A multiplier's step is in units of ``scale`` ``(n, depth)``.
    ``own`` ``(n, any)`` are entries whose values are added to the rows', with the sign as a factor.
    """

    number: Tensor
    splits: LocalSplits
    preactivation: Tensor
    held: Interval
    empty: Tensor
    bounds: Mapping[str, Interval]
    families: Mapping[str, Family]
    near: Mapping[str, NearPieces]
    rows: Tensor
    offsets: Tensor
    used: Tensor
    scale: Tensor
    own: LocalSplits


@dataclass(frozen=True, eq=False)
class _Constrained(Relaxed):
    """An operator with ``added`` ``(batch, *shape)`` to each input's coefficients, and to the bias ``(batch,)``."""

    relaxed: Relaxed
    added: Sequence[Tensor | None]
    bias: Tensor
    reaches_deciding = True

    def backward(self, coefficients: Tensor) -> tuple[tuple[Tensor, ...], Tensor | None]:
        propagated, bias = self.relaxed.backward(coefficients)
        joined = tuple(
            through if extra is None else through + extra.unsqueeze(1)
            for through, extra in zip(propagated, self.added, strict=True)
        )
        constant = self.bias.unsqueeze(1).expand(-1, joined[0].shape[1])
        return joined, constant if bias is None else bias + constant


def _add_terms(
    network: Network,
    preactivations: Preactivations,
    relaxed: Mapping[str, Relaxed],
    coefficients: Tensor,
    biases: Tensor,
) -> dict[str, Relaxed]:
    """Return ``relaxed``, by node, with the multipliers' terms at the values that they read.

    ``coefficients`` are ``(batch, entries)``, ``biases`` ``(batch, preactivations)``.
    """
    added = preactivations.unflattened(coefficients)
    bias = dict(zip(preactivations.each, biases.unbind(dim=1), strict=True))
    result = dict(relaxed)
    for name in dict.fromkeys(each.reader for each in preactivations.each if each.reader in relaxed):
        own = {each.position: each for each in preactivations.each if each.reader == name}
        extra = [added[own[place].value] if place in own else None for place in range(len(network.nodes[name].inputs))]
        first, *others = (bias[preactivation] for preactivation in own.values())
        result[name] = _Constrained(relaxed[name], extra, sum(others, start=first))
    return result


class DualObjective:
    """The dual objective for domains of one ``box``, in which preactivations have the ``bounds`` ``(1, entries)``.

    Bounds may also be ``(disjuncts, entries)``: of each disjunct those that matter to it. Domains have bounds of their
    own for the entries ``clipped``.
    The network is all here, or divided over tensor-parallel ranks.
    """

    def __init__(
        self,
        network: Network,
        box: Interval,
        bounds: Interval,
        specification_rows: SpecificationRows,
        clipped: Tensor | None = None,
    ) -> None:
        self.network, self.box, self.bounds, self.specification_rows = network, box, bounds, specification_rows
        self.clipped = torch.zeros(0, dtype=torch.int64, device=box.lower.device) if clipped is None else clipped
        self.preactivations = Preactivations.of(network)
        self._preactivation_number = self.preactivations.numbers(box.lower.device)
        self.neuron_index = self._index_neurons(box.lower.device)
        before = {node.name for node in network.graph.until(specification_rows.start)}
        self.relaxed_nodes = tuple(node for node in network.nonlinear if node.name in before)
        root = self.shape_bounds(bounds)
        self.slope_parameters = _SlopeParameters(network, self.relaxed_nodes, root)
        self._common = self._drifting()
        self._near = NearLayers.of(network, box)
        self._reach = self.preactivations.flattened(_largest(root))[0]

    def _index_neurons(self, device: torch.device) -> NeuronIndexing:
        return NeuronIndex.of(self.network, self.preactivations, device)

    def _drifting(self) -> Tensor | None:
        """Return the slopes that ranks share: if replicas drifted apart, the bounds would be wrong."""
        common = self.slope_parameters.common
        return None if self.neuron_index.is_whole or not bool(common.any()) else common

    @property
    def is_alone(self) -> bool:
        """Return whether no other process has a part of the network."""
        return self.network.tp_group.axis.size == 1

    def tighten(self, bounds: Interval) -> None:
        """Take tighter bounds at the root: domains keep their meaning and their margins."""
        self.bounds = bounds
        self.slope_parameters.tighten(self.shape_bounds(bounds))

    def shape_bounds(self, bounds: Interval) -> dict[str, Interval]:
        """Return bounds ``(n, entries)`` of all preactivations as bounds of each value."""
        lower, upper = self.preactivations.unflattened(bounds.lower), self.preactivations.unflattened(bounds.upper)
        return {value: Interval(lower[value], upper[value]) for value in lower}

    def boxes(self, count: int) -> Interval:
        """Return the box, once for each of ``count`` domains."""
        return self.box.arranged(lambda end: end.expand(count, *end.shape[1:]))

    def batch_of(self, domains: Domains, scale: Tensor) -> DomainBatch:
        """Prepare a batch of domains; ``scale`` of the multipliers is by number."""
        splits = self.neuron_index.localise(domains.index, domains.sign)
        clipped = self.within(domains)
        within = clipped.meet(clipped)
        bounds = self.shape_bounds(within)
        rows, offsets, used = self.specification_rows.of(domains.disjunct)
        return DomainBatch(
            number=domains.index,
            splits=splits,
            preactivation=self._preactivation_number[splits.index],
            held=within.arranged(lambda end: end.gather(1, splits.index)),
            empty=self.neuron_index.anywhere(self.empty(clipped)),
            bounds=bounds,
            families=self.slope_parameters.families(bounds),
            near=self._near.pieces(self.relaxed_nodes, bounds),
            rows=rows,
            offsets=offsets,
            used=used,
            scale=scale[domains.index],
            own=LocalSplits(domains.index[:, :0], domains.sign[:, :0]),
        )

    def within(self, domains: Domains) -> Interval:
        """Return bounds ``(n, entries)`` of all preactivations in the domains; ends cross if nothing is in them."""
        splits = self.neuron_index.localise(domains.index, domains.sign)
        bounds = Splits(splits.index, splits.sign, domains.at).clipped(self.known(domains.disjunct))
        if not len(self.clipped):
            return bounds
        place = self.clipped.expand(len(domains), -1)
        return Interval(
            bounds.lower.scatter_reduce(1, place, domains.lower, "amax"),
            bounds.upper.scatter_reduce(1, place, domains.upper, "amin"),
        )

    def known(self, disjunct: Tensor) -> Interval:
        """Return bounds ``(n or 1, entries)`` of all preactivations for disjuncts ``(n,)``."""
        bounds = self.bounds
        return bounds if len(bounds.lower) == 1 else bounds.arranged(lambda end: end[disjunct])

    def empty(self, bounds: Interval) -> Tensor:
        """Return ``(n,)`` whether the ends ``(n, entries)`` of an entry cross by more than rounding, so that no value
        is between.
        """
        return _empty(bounds, self._reach)

    def margins(self, batch: DomainBatch, boxes: Interval, parameters: DualParameters) -> Tensor:
        """Return the margins ``(n,)`` that the parameters prove."""
        chosen = self.slope_parameters.relaxations(batch.families, parameters.slopes)
        relaxed = self.add_multipliers(batch, with_offsets(chosen, batch.near), parameters.beta)
        return self.backward_bound(batch, relaxed, boxes, parameters.weights)

    def add_multipliers(
        self, batch: DomainBatch, relaxed: dict[str, Relaxed], beta: Tensor, probe: Tensor | None = None
    ) -> dict[str, Relaxed]:
        """Add the multipliers of the splits, and coefficients ``probe`` ``(n, entries)`` at all preactivations."""
        if not beta.shape[1] and not batch.own.index.shape[1] and probe is None:
            return relaxed
        multipliers = Multipliers(beta * batch.splits.here, batch.splits.index, batch.held)
        added = multipliers.coefficients(self.preactivations.entries)
        biases = multipliers.biases(batch.preactivation, len(self.preactivations.each))
        if batch.own.index.shape[1]:
            added = added.scatter_add(1, batch.own.index, batch.own.sign)
        return _add_terms(self.network, self.preactivations, relaxed, added if probe is None else added + probe, biases)

    def backward_bound(
        self, batch: DomainBatch, relaxed: Mapping[str, Relaxed], boxes: Interval, weights: Tensor
    ) -> Tensor:
        """Return the bounds that a backward pass through the relaxations proves, ``(n,)``."""
        rows, offset = self.combine_rows(batch, weights)
        start = self.network.nodes[self.specification_rows.start]
        backward = Pass(self.network, {self.network.graph.input.name: boxes}, relaxed, ascends=True)
        found = backward.lower_bounds(start.name, rows.reshape(len(rows), 1, *start.shape)).squeeze(1) - offset
        return self.network.tp_group.agree(found)

    @staticmethod
    def combine_rows(batch: DomainBatch, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return the combined row ``(n, 1, entries)`` of each domain, and its offset ``(n,)``."""
        weights = weights / weights.sum(dim=1, keepdim=True)
        return torch.bmm(weights[:, None], batch.rows), (weights * batch.offsets).sum(dim=1)

    def has_weights(self, batch: DomainBatch) -> bool:
        """Return whether there are several rows to weigh."""
        return batch.used.shape[1] > 1

    def project(self, batch: DomainBatch, weights: Tensor) -> None:
        """Project the weights in place: they sum to 1, over rows that are in use."""
        used = batch.used.to(weights.dtype)
        weights.mul_(used)
        total = weights.sum(dim=1, keepdim=True)
        weights.copy_(torch.where(total > 0, weights / total, used))

    def descent(self, batch: DomainBatch, margin: Tensor, parameters: DualParameters) -> DualParameters:
        """Return gradients of the negated margins: 0 without influence, perhaps NaN beside an infinite bound.

        Gradients of multipliers are always finite, and point in a direction of ascent even at a kink of the objective.
        """
        found = torch.autograd.grad(margin.sum().neg(), parameters.each, allow_unused=True, materialize_grads=True)
        slopes, beta, weights = found
        multipliers = Multipliers(parameters.beta.detach(), batch.splits.index, batch.held)
        rising = multipliers.ascent_direction(beta.nan_to_num(0, 0, 0).neg()) * batch.splits.here
        falling = self.neuron_index.total(batch.number, rising).neg()
        if self._common is not None:
            slopes[:, self._common] = self.network.tp_group.agree(slopes[:, self._common])
        return DualParameters(slopes, falling, self._agree_on(weights))

    def _agree_on(self, weights: Tensor) -> Tensor:
        return self.network.tp_group.agree(weights)

    def minimiser(self, boxes: Interval, arrived: Sequence[Tensor]) -> Tensor:
        """Return the inputs at which the bounds are attained, from the coefficients at the input; the centres
        of the boxes if there are none, for example behind comparisons whose answers are both constants.
        """
        if not arrived:
            return self.network.tp_group.agree(boxes.centre)
        slope = arrived[-1].detach().squeeze(1)
        return self.network.tp_group.agree(boxes.minimiser(slope))


def _empty(clipped: Interval, reach: Tensor) -> Tensor:
    """Return the domains ``(n,)`` in which the ends of some entry cross by more than rounding, so that nothing
    satisfies their splits.

    ``reach`` ``(entries,)`` is the size of such values: an end near 0 may be the remainder of larger terms.
    """
    dtype = clipped.lower.dtype
    return (clipped.lower - clipped.upper > ABSOLUTE_MARGIN[dtype] + RELATIVE_MARGIN[dtype] * reach).any(dim=1)


def _largest(values: Mapping[str, Interval]) -> dict[str, Tensor]:
    """Return for each value the largest end of any of its entries, ``(1, *shape)``: the largest number if that is
    infinite.
    """
    sizes = {name: torch.maximum(each.lower[:1].abs(), each.upper[:1].abs()) for name, each in values.items()}
    return {name: size.nan_to_num(nan=torch.inf).nan_to_num().amax().expand_as(size) for name, size in sizes.items()}


Bounds = Mapping[str, Interval]
"""Bounds of the values that non-linear operators read, by value."""


class _SlopeParameters:
    """Parameters of the non-linear operators ``nodes``, whose inputs have the bounds ``root`` of one instance."""

    def __init__(self, network: Network, nodes: Sequence[Node], root: Bounds) -> None:
        self.network, self.nodes = network, nodes
        unstable = {
            node.name: network.operator_of(node).unstable_on(node, [root[value] for value in node.inputs])[0]
            for node in nodes
        }
        self._open = {name: Places.of(entries) for name, entries in unstable.items()}
        self.tighten(root)

    def tighten(self, root: Bounds) -> None:
        """Take other bounds of the root, within the former ones, so that parameters keep their meaning."""
        self._starts = {name: family.start for name, family in self.families(root).items()}

    @property
    def start(self) -> Tensor:
        """Return CROWN's own slopes as parameters, ``(roots, parameters)``; one row where all roots share them."""
        each = [by_instance(start) for starts in self._starts.values() for start in starts]
        return torch.cat(each, dim=1) if each else torch.zeros(1, 0)

    @property
    def common(self) -> Tensor:
        """Return which parameters, bool ``(parameters,)``, are of operators that all tensor-parallel ranks have."""
        flags = [
            torch.full((start[0].numel(),), not self.network.is_own(name), device=start.device)
            for name, starts in self._starts.items()
            for start in starts
        ]
        return torch.cat(flags) if flags else torch.zeros(0, dtype=torch.bool)

    def families(self, bounds: Bounds) -> dict[str, Family]:
        """Return the family of each operator on these bounds, by node."""
        return {node.name: self._family(node, [bounds[value] for value in node.inputs]) for node in self.nodes}

    def members(self, families: Mapping[str, Family], parameters: Tensor) -> dict[str, Relaxed]:
        """Return the relaxations that rows ``(n, parameters)`` choose, by node."""
        return {name: families[name].member(own) for name, own in self._by_node(parameters)}

    def relaxations(self, families: Mapping[str, Family], parameters: Tensor) -> dict[str, Relaxed]:
        """Return the same relaxations in a form only for a backward pass."""
        found: dict[str, Relaxed] = {}
        for name, own in self._by_node(parameters):
            family = families[name]
            found[name] = family.fused_member(own) if isinstance(family, PiecewiseSlopes) else family.member(own)
        return found

    def _by_node(self, parameters: Tensor) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
        """Yield every node's share, ``(n, 1, *any)`` as its family takes it."""
        sizes = [start[0].numel() for starts in self._starts.values() for start in starts]
        parts = iter(torch.split(parameters, sizes, dim=1)) if sizes else iter(())
        for name, starts in self._starts.items():
            yield name, tuple(next(parts).reshape(len(parameters), 1, *start.shape[1:]) for start in starts)

    def _family(self, node: Node, bounds: Sequence[Interval]) -> Family:
        operator = self.network.operator_of(node)
        pieces = operator.pieces(node)
        if pieces is not None:
            return PiecewiseSlopes.on(pieces, bounds[0], self._open[node.name])
        return operator.family(node, bounds)
