"""A backward pass whose bounds hold in real arithmetic.

The coefficients are whatever float64 makes of them. Each step's allowance, joining the coefficients of two consumers,
the sum over the box and the sum of the biases are all charged to one error that is taken off at the end.

On tensor-parallel ranks the pass is that of :class:`~service.bounds.backward.Pass`. Where values are divided every
rank is charged for its own coefficients; where they are replicated each has a share of the rows, which no other rank
computes in another way, or all have all rows, of which the first rank's count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from service.bounds.backward import Pass
from service.bounds.ball import Ball
from service.bounds.graph import Node
from service.bounds.interval import Interval
from service.bounds.network import Network
from service.bounds.operators import LINEAR
from service.bounds.operators.allowance import Step
from service.bounds.operators.base import Coefficients, Crossing, LinearOperator, Pulled, UnitRows
from service.bounds.rigorous.sums import charge, least_in, weighted
from service.bounds.rigorous.tally import Tallies, Tally
from service.bounds.rounding import TINY, UNIT, down, gamma, magnitude, up
from service.bounds.shares import asked, filled, own_share

Answer = Callable[[Tensor, bool], Tensor]
"""``(rows, own)`` of a stage's input to lower bounds ``(batch, rows)``."""


@dataclass(frozen=True, eq=False)
class _Waiting:
    """Coefficients that wait at a node. ``own``: the rows are this rank's alone."""

    coefficients: Coefficients
    own: bool


@dataclass(frozen=True, eq=False)
class _Walk:
    """What one walk has met. ``shared``: common rows that came divide over the ranks; ``own`` as for the pass."""

    own: bool
    divided: bool
    shared: bool
    tallies: Tallies


@dataclass(frozen=True, eq=False)
class RigorousPass:
    """``intervals`` and ``steps`` hold rigorously, for every node before the one that a pass starts at.

    The input ends a pass, or hands it over to the stages before, and so do the nodes of ``frontier``, by their
    intervals. Where it is ``divided``, each rank has a share of the rows outside of tensor-parallel regions. ``before``
    answers instead of the network's own stages before. All ranks must call the same methods.
    """

    network: Network
    intervals: Mapping[str, Interval]
    steps: Mapping[str, Step]
    frontier: frozenset[str] = frozenset()
    divided: bool = True
    before: Answer | None = None

    def lower_bounds(
        self, start: str, rows: Coefficients, held: Mapping[str, Tensor] | None = None, own: bool | None = None
    ) -> Tensor:
        """Lower bounds ``(batch, rows)`` of ``rows · value of start`` over the reals; −inf where there is none.

        Rows are exact, ``(batch or 1, rows, *shape)`` or unit rows. Where ``start`` is divided over the ranks they are
        over this rank's entries, equally many on each, and so is the result; unless ``own`` is false: then they are
        this rank's part of common rows. ``held`` δ ``(batch, rows, *shape)``, by nodes before the start, are
        multipliers of the nodes' own bounds: ``a·z = (a − δ)·z + δ·z``, where ``δ·z`` is at least its least value in
        the node's interval.
        """
        walk = self._begun(start, own)
        arrived = self._walked(walk, start, rows, held or {})
        if arrived is not None:
            self._end(walk, arrived)
        return self._told(walk, self._total(walk), rows)

    def planes(self, start: str, rows: Tensor, own: bool | None = None) -> tuple[Tensor, Tensor]:
        """Of affine functions of the model's input below ``rows · value of start``: coefficients ``(batch, rows,
        features)``, which are exact, and constants ``(batch, rows)``. They are divided as lower bounds are.
        """
        walk = self._begun(start, own)
        arrived = self._walked(walk, start, rows, {})
        count = -(-rows.shape[1] // self._ranks) if walk.shared else rows.shape[1]
        waiting = arrived or _Waiting(self._like.new_zeros(1, count, 0), walk.divided)
        slopes, constants = self._planes_before(waiting)
        (walk.tallies.own if waiting.own else walk.tallies.replicated).values.append(constants)
        if walk.divided and not waiting.own:
            slopes = self.network.exchange.own(slopes, 1)
        elif not walk.divided:
            slopes = self.network.exchange.agree(slopes)
        return self._told(walk, slopes, rows), self._told(walk, self._total(walk), rows)

    def _planes_before(self, arrived: _Waiting) -> tuple[Tensor, Tensor]:
        """Of the coefficients of the input, or of none."""
        first, before, batch = self.network.graph.input, self.network.before, len(self._like)
        coefficients = self._dense(first, arrived)
        rows = coefficients.shape[1]
        if not coefficients.shape[2]:
            features = first.size if before is None else before.features
            return coefficients.new_zeros(batch, rows, features), coefficients.new_zeros(batch, rows)
        if before is not None:
            return before.planes(coefficients, arrived.own)
        return coefficients.flatten(2).expand(batch, -1, -1), coefficients.new_zeros(batch, rows)

    @property
    def plain(self) -> Pass:
        """On the same intervals, without relaxations."""
        return Pass(self.network, self.intervals, {}, divided=self.divided)

    @property
    def _ranks(self) -> int:
        return self.network.exchange.axis.size

    def _begun(self, start: str, own: bool | None) -> _Walk:
        own = self._ranks == 1 or (self.network.is_own(start) if own is None else own)
        divided = self.divided or own
        return _Walk(own, divided, divided and not own, Tallies())

    def _total(self, walk: _Walk) -> Tensor:
        exchange = self.network.exchange
        return walk.tallies.of_own_rows(exchange) if walk.divided else walk.tallies.of_common_rows(exchange)

    def _told(self, walk: _Walk, found: Tensor, rows: Coefficients) -> Tensor:
        """Of all ranks' shares of the rows, where they were shared."""
        return asked(self.network.exchange.gather(found, 1), rows) if walk.shared else found

    def _end(self, walk: _Walk, arrived: _Waiting) -> None:
        """At the input, by its interval or by the stages before, which sum up what ranks have of common rows."""
        first, before = self.network.graph.input, self.before
        if before is None and self.network.before is not None:
            before = self.network.before.lower_bounds
        if before is None:
            self._concretise(walk, first, arrived)
        else:
            tally = walk.tallies.own if arrived.own else walk.tallies.replicated
            tally.values.append(before(self._dense(first, arrived), arrived.own))

    def _walked(self, walk: _Walk, start: str, rows: Coefficients, held: Mapping[str, Tensor]) -> _Waiting | None:
        """All that is charged on the way, and the coefficients of the input, if it is reached."""
        pending: dict[str, _Waiting] = {}
        for name, each in held.items():
            pending[name] = self._hold(walk, name, self._placed(walk, name, each))
        pending[start] = self._joined(walk, start, pending.get(start), self._placed(walk, start, rows))
        for node in reversed(self.network.graph.until(start)):
            waiting = pending.pop(node.name, None)
            if waiting is None:
                continue
            if node is self.network.graph.input:
                return waiting
            if node.name in self.frontier:
                self._concretise(walk, node, waiting)
                continue
            step = self.steps[node.name]
            tally = self._tally(walk, node.name, waiting.own)
            tally.errors.append(charge(waiting.coefficients, step))
            pulled, own = self._pull(walk, node, waiting, step)
            if pulled.bias is not None:
                tally.values.append(self._for_batch(pulled.bias))
            for name, coefficients in zip(node.inputs, pulled.coefficients, strict=True):
                assert isinstance(coefficients, Tensor | UnitRows)
                pending[name] = self._joined(walk, name, pending.get(name), _Waiting(coefficients, own))
        return None

    def _placed(self, walk: _Walk, name: str, rows: Coefficients) -> _Waiting:
        """Rows as they begin at a node: this rank's own, or its share of common ones, or all."""
        if not walk.shared:
            return _Waiting(rows, walk.own)
        whole, node = filled(rows, self._ranks), self.network.nodes[name]
        if self.network.is_own(name):
            return _Waiting(whole, own=False)
        return _Waiting(own_share(whole, node.shape, self._like, self.network.exchange), own=True)

    def _tally(self, walk: _Walk, name: str, own: bool) -> Tally:
        if own:
            return walk.tallies.own
        return walk.tallies.partial if self.network.is_own(name) else walk.tallies.replicated

    def _hold(self, walk: _Walk, name: str, waiting: _Waiting) -> _Waiting:
        """−δ, once the least value of ``δ·z`` is counted."""
        multipliers = self._dense(self.network.nodes[name], waiting)
        bounds = self.intervals[name].map(lambda end: end.unsqueeze(1))
        least = torch.where(multipliers > 0, bounds.lower, bounds.upper) * multipliers
        # No multiplier, no term, even where there is no bound.
        least = torch.where(multipliers == 0, 0.0, least).flatten(2)
        tally = self._tally(walk, name, waiting.own)
        tally.values.append(least.sum(dim=2))
        tally.errors.append(gamma(least.shape[2] + 1) * least.abs().sum(dim=2) + least.shape[2] * TINY)
        return _Waiting(-multipliers, waiting.own)

    def _pull(self, walk: _Walk, node: Node, waiting: _Waiting, step: Step) -> tuple[Pulled, bool]:
        """The step, and whether rows are this rank's alone before it."""
        if step.relaxed is not None:
            return Pulled(*step.relaxed.pull(self._dense(node, waiting))), waiting.own
        linear, exchange = LINEAR[node.operator], self.network.exchange
        if linear.crossing is not None:
            return self._cross(walk, node, linear, waiting)
        units = waiting.coefficients
        pulled = linear.pull_units(node, units, exchange) if isinstance(units, UnitRows) else None
        if pulled is None or not all(isinstance(each, Tensor | UnitRows) for each in pulled.coefficients):
            pulled = linear.pull(node, self._dense(node, waiting), exchange)
        return pulled, waiting.own

    def _cross(self, walk: _Walk, node: Node, collective: LinearOperator, waiting: _Waiting) -> tuple[Pulled, bool]:
        exchange, coefficients = self.network.exchange, self._dense(node, waiting)
        if collective.crossing is Crossing.LEAVE and not waiting.own:
            # Each rank goes on with the coefficients of its part of one sum: these must be the same to the last bit.
            coefficients = exchange.agree(coefficients)
        return collective.pull_rows(node, coefficients, exchange, waiting.own, walk.divided)

    def _joined(self, walk: _Walk, name: str, earlier: _Waiting | None, new: _Waiting) -> _Waiting:
        if earlier is None:
            return new
        node, own = self.network.nodes[name], earlier.own and new.own
        total = self._in_rows(node, earlier, own) + self._in_rows(node, new, own)
        size = magnitude(self.intervals[name])
        self._tally(walk, name, own).errors.append(weighted(total.abs(), 2 * UNIT * size.unsqueeze(1)))
        return _Waiting(total, own)

    def _in_rows(self, node: Node, waiting: _Waiting, own: bool) -> Tensor:
        """The coefficients over this rank's rows, or over everybody's, of which other ranks' are zero here."""
        coefficients = self._dense(node, waiting)
        if waiting.own == own:
            return coefficients
        batch, rows = coefficients.shape[:2]
        everyone = coefficients.new_zeros(batch, rows * self._ranks, *node.shape)
        everyone[:, self.network.exchange.own_range(everyone.shape[1])] = coefficients
        return everyone

    def _concretise(self, walk: _Walk, node: Node, waiting: _Waiting) -> None:
        """``A·c − |A|·r`` for a centre c as rounded and a radius r that reaches both ends from there."""
        box, coefficients = self.intervals[node.name], self._dense(node, waiting)
        centre = box.centre
        radius = up(torch.maximum(box.upper - centre, centre - box.lower))
        terms, sizes = coefficients[0, 0].numel(), coefficients.abs()
        least = weighted(coefficients, centre.unsqueeze(1)) - weighted(sizes, radius.unsqueeze(1))
        error = weighted(sizes, gamma(terms + 6) * (centre.abs() + radius).unsqueeze(1)) + terms * 8 * TINY
        found = down(least - error)
        if isinstance(box, Ball):
            found = torch.maximum(found, least_in(box, coefficients))
        self._tally(walk, node.name, waiting.own).values.append(found)

    def _dense(self, node: Node, waiting: _Waiting) -> Tensor:
        rows = waiting.coefficients
        return rows if isinstance(rows, Tensor) else rows.dense(node.shape, self._like)

    @property
    def _like(self) -> Tensor:
        return self.intervals[self.network.graph.input.name].lower

    def _for_batch(self, bias: Tensor) -> Tensor:
        return bias.expand(len(self._like), bias.shape[1])
