"""Linear bounds, propagated backward, that hold in real arithmetic.

The coefficients are whatever float64 makes of them. Each step's allowance, joining the coefficients of two consumers,
the sum over the box and the sum of the biases are all charged to one error that is taken off at the end.

Rows are sharded over tensor-parallel ranks as in the plain arithmetic. Where values are divided every rank is charged
for its own coefficients; where they are replicated each has a share of the rows, which no other rank computes in
another way, or all have all rows, of which the first rank's count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from service.bounds.ball import Ball
from service.bounds.graph import Node
from service.bounds.interval import Interval
from service.bounds.linear.plain import Pass
from service.bounds.linear.propagation import InitialRows, Propagated
from service.bounds.linear.rounding_error import RoundedSums, RoundedTerms, charge, least_in, weighted
from service.bounds.linear.sharding import Pending, RowSharding, dense
from service.bounds.linear.traversal import traverse_backward
from service.bounds.network import Network
from service.bounds.operators import COLLECTIVES, LINEAR
from service.bounds.operators.allowance import RigorousStep
from service.bounds.operators.base import Crossing
from service.bounds.rounding import TINY, UNIT, down, gamma, magnitude, up

Answer = Callable[[Tensor, bool], Tensor]
"""``(rows, own)`` of a stage's input to lower bounds ``(batch, rows)``."""


@dataclass(frozen=True, eq=False)
class RigorousPass:
    """``intervals`` and ``steps`` hold rigorously, for every node before the one that a pass starts at.

    The input ends a pass, or hands it over to the stages before, and so do the nodes of ``frontier``, by their
    intervals. Where it is ``divided``, each rank has a share of the rows outside of tensor-parallel regions. ``before``
    answers instead of the network's own stages before. All ranks must call the same methods.
    """

    network: Network
    intervals: Mapping[str, Interval]
    steps: Mapping[str, RigorousStep]
    frontier: frozenset[str] = frozenset()
    divided: bool = True
    before: Answer | None = None

    def lower_bounds(
        self, start: str, rows: InitialRows, held: Mapping[str, Tensor] | None = None, own: bool | None = None
    ) -> Tensor:
        """Return lower bounds ``(batch, rows)`` of ``rows · value of start`` over the reals; −inf where there is none.

        Rows are exact, ``(batch or 1, rows, *shape)`` or of the identity. Where ``start`` is divided over the ranks
        they are over this rank's entries, equally many on each, and so is the result; unless ``own`` is false: then
        they are this rank's part of common rows. ``held`` δ ``(batch, rows, *shape)``, by nodes before the start, are
        multipliers of the nodes' own bounds: ``a·z = (a − δ)·z + δ·z``, where ``δ·z`` is at least its least value in
        the node's interval.
        """
        traversal = self._traversed(start, rows, held or {}, own)
        if traversal.arrived is not None:
            traversal.end(traversal.arrived)
        return traversal.gathered(traversal.total(), rows)

    def planes(self, start: str, rows: Tensor, own: bool | None = None) -> tuple[Tensor, Tensor]:
        """Return affine functions of the model's input below ``rows · value of start``: coefficients ``(batch, rows,
        features)``, which are exact, and constants ``(batch, rows)``. They are divided as lower bounds are.
        """
        traversal = self._traversed(start, rows, {}, own)
        count = -(-rows.shape[1] // self.sharding.ranks) if traversal.shared else rows.shape[1]
        arrived = traversal.arrived or Pending(self.like.new_zeros(1, count, 0), traversal.divided)
        slopes, constants = self._planes_before(arrived)
        (traversal.sums.own if arrived.own else traversal.sums.replicated).values.append(constants)
        if traversal.divided and not arrived.own:
            slopes = self.network.tp_group.own(slopes, 1)
        elif not traversal.divided:
            slopes = self.network.tp_group.agree(slopes)
        return traversal.gathered(slopes, rows), traversal.gathered(traversal.total(), rows)

    def _planes_before(self, arrived: Pending) -> tuple[Tensor, Tensor]:
        """Return planes below the coefficients of the input, or of none."""
        first, before, batch = self.network.graph.input, self.network.before, len(self.like)
        coefficients = dense(first, arrived.rows, self.like)
        rows = coefficients.shape[1]
        if not coefficients.shape[2]:
            features = first.size if before is None else before.features
            return coefficients.new_zeros(batch, rows, features), coefficients.new_zeros(batch, rows)
        if before is not None:
            return before.planes(coefficients, arrived.own)
        return coefficients.flatten(2).expand(batch, -1, -1), coefficients.new_zeros(batch, rows)

    def _traversed(
        self, start: str, rows: InitialRows, held: Mapping[str, Tensor], own: bool | None
    ) -> _RigorousTraversal:
        own = self.sharding.ranks == 1 or (self.network.is_own(start) if own is None else own)
        divided = self.divided or own
        traversal = _RigorousTraversal(self, own, divided, shared=divided and not own)
        for name, multipliers in held.items():
            traversal.hold(name, multipliers)
        traversal.begin(start, rows)
        nodes = self.network.graph.nodes[self.network.position[start] :: -1]
        traverse_backward(nodes, traversal.pending, traversal.propagate, traversal.join)
        return traversal

    @property
    def plain(self) -> Pass:
        """Return a plain pass on the same intervals, on which relaxations may be optimised."""
        return Pass(self.network, self.intervals, {}, divided=self.divided)

    @cached_property
    def sharding(self) -> RowSharding:
        return RowSharding(self.network, self.divided)

    @property
    def like(self) -> Tensor:
        """Return a tensor with the batch, the dtype and the device of the bounds."""
        return self.intervals[self.network.graph.input.name].lower


@dataclass(eq=False)
class _RigorousTraversal:
    """The arithmetic of one traversal, with its error account. ``own`` as for the pass's rows; ``divided``: results are
    those of a rank's own rows; ``shared``: these are a share of common rows.
    """

    backward: RigorousPass
    own: bool
    divided: bool
    shared: bool
    pending: dict[str, Pending] = field(default_factory=dict)
    sums: RoundedSums = field(default_factory=RoundedSums.empty)
    arrived: Pending | None = None
    """The coefficients of the input, once it is reached."""

    def total(self) -> Tensor:
        tp_group = self.backward.network.tp_group
        return self.sums.of_own_rows(tp_group) if self.divided else self.sums.of_common_rows(tp_group)

    def gathered(self, found: Tensor, rows: InitialRows) -> Tensor:
        """Return what all ranks have found for their shares of the rows, where they were shared."""
        return self.backward.sharding.gathered(found, rows) if self.shared else found

    def begin(self, name: str, rows: InitialRows) -> None:
        new = self._placed(name, rows)
        self.pending[name] = self.join(name, self.pending[name], new) if name in self.pending else new

    def hold(self, name: str, multipliers: Tensor) -> None:
        """Begin with −δ at a node, and count the least value of ``δ·z``."""
        arrived = self._placed(name, multipliers)
        delta = self._dense(self.backward.network.nodes[name], arrived)
        bounds = self.backward.intervals[name].map(lambda end: end.unsqueeze(1))
        least = torch.where(delta > 0, bounds.lower, bounds.upper) * delta
        # No multiplier, no term, even where there is no bound.
        least = torch.where(delta == 0, 0.0, least).flatten(2)
        terms = self._terms(name, arrived.own)
        terms.values.append(least.sum(dim=2))
        terms.errors.append(gamma(least.shape[2] + 1) * least.abs().sum(dim=2) + least.shape[2] * TINY)
        self.pending[name] = Pending(-delta, arrived.own)

    def _placed(self, name: str, rows: InitialRows) -> Pending:
        """Return rows as they begin at a node: this rank's own, or its share of common ones, or all."""
        if not self.shared:
            return Pending(rows, self.own)
        sharding, node = self.backward.sharding, self.backward.network.nodes[name]
        whole = sharding.filled(rows)
        if self.backward.network.is_own(name):
            return Pending(whole, own=False)
        return Pending(sharding.own_share(whole, node.shape, self.backward.like), own=True)

    def propagate(self, node: Node, arrived: Pending) -> Iterable[tuple[str, Pending]]:
        if node is self.backward.network.graph.input:
            self.arrived = arrived
            return ()
        if node.name in self.backward.frontier:
            self._concretise(node, arrived)
            return ()
        allowance = self.backward.steps[node.name]
        terms = self._terms(node.name, arrived.own)
        assert isinstance(arrived.rows, InitialRows)
        terms.errors.append(charge(arrived.rows, allowance))
        step, own = self._step(node, arrived, allowance)
        if step.bias is not None:
            terms.values.append(step.bias.expand(len(self.backward.like), step.bias.shape[1]))
        return [(name, Pending(rows, own)) for name, rows in zip(node.inputs, step.coefficients, strict=True)]

    def _step(self, node: Node, arrived: Pending, allowance: RigorousStep) -> tuple[Propagated, bool]:
        """Return the step, and whether rows are this rank's alone before it."""
        if allowance.relaxed is not None:
            return Propagated(*allowance.relaxed.backward(self._dense(node, arrived))), arrived.own
        linear, tp_group = LINEAR[node.operator], self.backward.network.tp_group
        if (collective := COLLECTIVES.get(node.operator)) is not None:
            coefficients = self._dense(node, arrived)
            if collective.crossing is Crossing.LEAVE and not arrived.own:
                # Each rank goes on with the coefficients of its part of one sum: they must be equal to the last bit.
                coefficients = tp_group.agree(coefficients)
            return collective.backward_across_ranks(node, coefficients, tp_group, arrived.own, self.divided)
        step = None
        if not isinstance(arrived.rows, Tensor):
            step = linear.propagate_backward(node, arrived.rows, tp_group)
        # Rows gathered or in patches would need allowances of their own.
        if step is None or not all(isinstance(rows, InitialRows) for rows in step.coefficients):
            step = linear.backward(node, self._dense(node, arrived), tp_group)
        return step, arrived.own

    def join(self, name: str, earlier: Pending, new: Pending) -> Pending:
        """Add the coefficients of two consumers, and charge for the sum."""
        node, own = self.backward.network.nodes[name], earlier.own and new.own
        first, second = (
            self.backward.sharding.over_rows(node, self._dense(node, pending), held_alone=pending.own, own=own)
            for pending in (earlier, new)
        )
        total = first + second
        size = magnitude(self.backward.intervals[name])
        self._terms(name, own).errors.append(weighted(total.abs(), 2 * UNIT * size.unsqueeze(1)))
        return Pending(total, own)

    def end(self, arrived: Pending) -> None:
        """End at the input, by its interval or by the stages before, which sum up what ranks have of common rows."""
        network = self.backward.network
        first, before = network.graph.input, self.backward.before
        if before is None and network.before is not None:
            before = network.before.lower_bounds
        if before is None:
            self._concretise(first, arrived)
        else:
            terms = self.sums.own if arrived.own else self.sums.replicated
            terms.values.append(before(self._dense(first, arrived), arrived.own))

    def _concretise(self, node: Node, arrived: Pending) -> None:
        """Count ``A·c − |A|·r`` for a centre c as rounded and a radius r that reaches both ends from there."""
        box, coefficients = self.backward.intervals[node.name], self._dense(node, arrived)
        centre = box.centre
        radius = up(torch.maximum(box.upper - centre, centre - box.lower))
        terms, sizes = coefficients[0, 0].numel(), coefficients.abs()
        least = weighted(coefficients, centre.unsqueeze(1)) - weighted(sizes, radius.unsqueeze(1))
        error = weighted(sizes, gamma(terms + 6) * (centre.abs() + radius).unsqueeze(1)) + terms * 8 * TINY
        found = down(least - error)
        if isinstance(box, Ball):
            found = torch.maximum(found, least_in(box, coefficients))
        self._terms(node.name, arrived.own).values.append(found)

    def _dense(self, node: Node, pending: Pending) -> Tensor:
        return dense(node, pending.rows, self.backward.like)

    def _terms(self, name: str, own: bool) -> RoundedTerms:
        return self.backward.sharding.account(self.sums, name, own)
