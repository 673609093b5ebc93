"""A backward pass whose bounds hold in real arithmetic.

The coefficients are whatever float64 makes of them. Each step's allowance, joining the coefficients of two consumers,
the sum over the box and the sum of the biases are all charged to one error that is taken off at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from service.bounds.ball import Ball
from service.bounds.exchange import Exchange
from service.bounds.graph import Node
from service.bounds.interval import Interval
from service.bounds.network import Network
from service.bounds.rigorous.rounding import TINY, UNIT, down, gamma, magnitude, up
from service.bounds.rigorous.steps import Step
from service.bounds.rules import RULES
from service.bounds.rules.base import Coefficients, LinearRule, Pulled, UnitRows


@dataclass(eq=False)
class _Tally:
    values: list[Tensor] = field(default_factory=list)
    errors: list[Tensor] = field(default_factory=list)

    def lower_bound(self) -> Tensor:
        """The values' sum less all errors; −inf where overflow has left no number."""
        values = torch.stack(self.values)
        error = gamma(len(values)) * values.abs().sum(dim=0) + TINY
        if self.errors:
            error = error + torch.stack(self.errors).sum(dim=0)
        # Sums of so few and of so many terms are themselves right to far better than a millionth.
        found = down(values.sum(dim=0) - error * (1 + 1e-6))
        return found.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)


@dataclass(frozen=True, eq=False)
class RigorousPass:
    """``intervals`` and ``steps`` hold rigorously, for every node before the one that a pass starts at.

    The input ends a pass, and so do the nodes of ``frontier``, by their intervals.
    """

    network: Network
    intervals: Mapping[str, Interval]
    steps: Mapping[str, Step]
    frontier: frozenset[str] = frozenset()

    def lower_bounds(self, start: str, rows: Coefficients, held: Mapping[str, Tensor] | None = None) -> Tensor:
        """Lower bounds ``(batch, rows)`` of ``rows · value of start`` over the reals; −inf where there is none.

        Rows are exact, ``(batch or 1, rows, *shape)`` or unit rows. ``held`` δ ``(batch, rows, *shape)``, by nodes
        before the start, are multipliers of the nodes' own bounds: ``a·z = (a − δ)·z + δ·z``, where ``δ·z`` is at least
        its least value in the node's interval.
        """
        tally, arrived = self._walked(start, rows, held or {})
        if arrived is not None:
            self._concretise(tally, self.network.graph.input.name, arrived)
        return tally.lower_bound()

    def planes(self, start: str, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Of affine functions of the input below ``rows · value of start``: coefficients ``(batch, rows, *input)``,
        which are exact, and constants ``(batch, rows)``.
        """
        tally, arrived = self._walked(start, rows, {})
        box = self.intervals[self.network.graph.input.name].lower
        shape = len(box), rows.shape[1], *box.shape[1:]
        tally.values.append(box.new_zeros(*shape[:2]))
        return box.new_zeros(shape) if arrived is None else arrived.expand(shape), tally.lower_bound()

    def _walked(self, start: str, rows: Coefficients, held: Mapping[str, Tensor]) -> tuple[_Tally, Tensor | None]:
        """All that was charged on the way, and the coefficients of the input, if it was reached."""
        tally = _Tally()
        pending = {name: self._hold(tally, name, each) for name, each in held.items()}
        pending[start] = self._joined(tally, start, pending.get(start), rows)
        for node in reversed(self.network.graph.until(start)):
            waiting = pending.pop(node.name, None)
            if waiting is None:
                continue
            if node is self.network.graph.input:
                return tally, self._dense(node, waiting)
            if node.name in self.frontier:
                self._concretise(tally, node.name, self._dense(node, waiting))
                continue
            step = self.steps[node.name]
            tally.errors.append(_charge(waiting, step))
            pulled = self._pull(node, waiting, step)
            if pulled.bias is not None:
                tally.values.append(self._for_batch(pulled.bias))
            for name, coefficients in zip(node.inputs, pulled.coefficients, strict=True):
                assert isinstance(coefficients, Tensor | UnitRows)
                pending[name] = self._joined(tally, name, pending.get(name), coefficients)
        return tally, None

    def _hold(self, tally: _Tally, name: str, multipliers: Tensor) -> Coefficients:
        """−δ, once the least value of ``δ·z`` is counted."""
        bounds = self.intervals[name].map(lambda end: end.unsqueeze(1))
        least = torch.where(multipliers > 0, bounds.lower, bounds.upper) * multipliers
        # No multiplier, no term, even where there is no bound.
        least = torch.where(multipliers == 0, 0.0, least).flatten(2)
        tally.values.append(least.sum(dim=2))
        tally.errors.append(gamma(least.shape[2] + 1) * least.abs().sum(dim=2) + least.shape[2] * TINY)
        return -multipliers

    def _pull(self, node: Node, waiting: Coefficients, step: Step) -> Pulled:
        rule = RULES[node.operator]
        if step.relaxed is not None:
            return Pulled(*step.relaxed.pull(self._dense(node, waiting)))
        assert isinstance(rule, LinearRule)
        pulled = rule.pull_units(node, waiting, Exchange()) if isinstance(waiting, UnitRows) else None
        if pulled is not None and all(isinstance(each, Tensor | UnitRows) for each in pulled.coefficients):
            return pulled
        return rule.pull(node, self._dense(node, waiting), Exchange())

    def _joined(self, tally: _Tally, name: str, earlier: Coefficients | None, new: Coefficients) -> Coefficients:
        if earlier is None:
            return new
        node = self.network.nodes[name]
        total = self._dense(node, earlier) + self._dense(node, new)
        size = magnitude(self.intervals[name])
        tally.errors.append(_weighted(total.abs(), 2 * UNIT * size.unsqueeze(1)))
        return total

    def _concretise(self, tally: _Tally, name: str, coefficients: Tensor) -> None:
        """``A·c − |A|·r`` for a centre c as rounded and a radius r that reaches both ends from there."""
        box = self.intervals[name]
        centre = box.centre
        radius = up(torch.maximum(box.upper - centre, centre - box.lower))
        terms, sizes = coefficients[0, 0].numel(), coefficients.abs()
        least = _weighted(coefficients, centre.unsqueeze(1)) - _weighted(sizes, radius.unsqueeze(1))
        error = _weighted(sizes, gamma(terms + 6) * (centre.abs() + radius).unsqueeze(1)) + terms * 8 * TINY
        found = down(least - error)
        if isinstance(box, Ball):
            found = torch.maximum(found, _least_in(box, coefficients))
        tally.values.append(found)

    def _dense(self, node: Node, coefficients: Coefficients) -> Tensor:
        if isinstance(coefficients, Tensor):
            return coefficients
        return coefficients.dense(node.shape, self.intervals[self.network.graph.input.name].lower)

    def _for_batch(self, bias: Tensor) -> Tensor:
        batch = len(self.intervals[self.network.graph.input.name].lower)
        return bias.expand(batch, bias.shape[1])


def _least_in(ball: Ball, coefficients: Tensor) -> Tensor:
    """``A·m − d·‖A‖₂``, rounded down."""
    batch, terms = len(ball.lower), coefficients[0, 0].numel()
    distance = ball.distance.flatten(1)[:, :1]
    reach = distance * coefficients.flatten(2).expand(batch, -1, -1).norm(dim=2)
    at_middle, sizes = ball.middle.unsqueeze(1), coefficients.abs()
    # Squares below the normal numbers are lost, of which the root is far above them.
    lost = terms * 2.0**-500 * (1 + distance)
    error = gamma(terms + 8) * (_weighted(sizes, at_middle.abs()) + reach) + lost
    return down(_weighted(coefficients, at_middle) - reach - error)


def _charge(waiting: Coefficients, step: Step) -> Tensor:
    """``|A|·error + lost``, ``(batch, rows)``."""
    if isinstance(waiting, UnitRows) and step.error.shape[1] == 1:
        entries = step.error.flatten(1)
        one = entries.gather(1, waiting.index.expand(len(entries), -1))
        charged = torch.cat([one, one], dim=1) if waiting.mirrored else one
    else:
        like = step.error
        dense = waiting if isinstance(waiting, Tensor) else waiting.dense(tuple(like.shape[2:]), like)
        charged = _weighted(dense.abs(), step.error)
    return charged + step.lost.unsqueeze(1)


def _weighted(coefficients: Tensor, entries: Tensor) -> Tensor:
    """``(batch or 1, rows, *shape)`` times ``(batch, rows or 1, *shape)``: ``(batch, rows)``."""
    batch = len(entries)
    flat = coefficients.flatten(2).expand(batch, -1, -1)
    if entries.shape[1] == 1:
        return torch.bmm(flat, entries.reshape(batch, -1, 1)).squeeze(-1)
    return (flat * entries.flatten(2)).sum(dim=2)
