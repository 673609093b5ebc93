"""Linear bounds, propagated backward (CROWN, Zhang et al., 2018; general graphs: auto_LiRPA, Xu et al., 2020).

A pass bounds rows ``C·v`` of one node's value v from below; upper bounds are those of the negated rows. On a mesh
there are up to three biases: replicated ones count once, partial ones are summed over the ranks at the end, and
those of rows that only one rank knows yet are its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from service.bounds.graph import Node
from service.bounds.interval import Interval
from service.bounds.network import Network
from service.bounds.relaxation import Relaxed
from service.bounds.rules import RULES
from service.bounds.rules.base import Coefficients, EnteringRule, LinearRule, Pulled, UnitRows


@dataclass(frozen=True, eq=False)
class Pending:
    """Coefficients that wait at a node. ``own``: the rows are this rank's alone, and so are their values so far."""

    coefficients: Coefficients
    own: bool


@dataclass(eq=False)
class _Biases:
    replicated: list[Tensor] = field(default_factory=list)
    partial: list[Tensor] = field(default_factory=list)
    own: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Pass:
    """One walk from a node back to ``frontier``, names of nodes whose intervals end it.

    The input always ends it, or hands it over to the stages before. ``intervals`` holds the frontier's,
    ``relaxations`` one for each non-linear node on the way.
    """

    network: Network
    intervals: Mapping[str, Interval]
    relaxations: Mapping[str, Relaxed]
    frontier: frozenset[str] = frozenset()

    @property
    def batch(self) -> int:
        return len(self.intervals[self.network.graph.input.name].lower)

    @property
    def device(self) -> torch.device:
        return self.intervals[self.network.graph.input.name].lower.device

    def lower_bounds(self, start: str, rows: Coefficients, own: bool | None = None) -> Tensor:
        """Lower bounds ``(batch, rows)`` of ``rows`` times the value of ``start``; −inf where there is none.

        Rows are ``(batch or 1, rows, *shape)`` or :class:`UnitRows`. Where ``start`` is divided over the ranks, the
        rows are over this rank's entries, equally many on each, and so is the result; unless ``own`` is false: then
        they are this rank's part of common rows. All ranks must call it.
        """
        biases, own = _Biases(), self.network.is_own(start) if own is None else own
        pending = {start: Pending(rows, own)}
        for node in self.network.graph.nodes[self.network.position[start] :: -1]:
            waiting = pending.pop(node.name, None)
            if waiting is None:
                continue
            if node.name in self.frontier or node is self.network.graph.input:
                self._end(biases, node, waiting)
                continue
            pulled, still_own = self._pull(node, waiting)
            if pulled.bias is not None:
                self._account(biases, node, waiting, pulled.bias)
            for name, coefficients in zip(node.inputs, pulled.coefficients, strict=True):
                pending[name] = self._joined(name, pending.get(name), Pending(coefficients, still_own))
        return self._total(biases, own).nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)

    def _end(self, biases: _Biases, node: Node, waiting: Pending) -> None:
        coefficients, before = self._dense(node, waiting.coefficients), self.network.before
        if before is None or node.name in self.frontier:
            self._account(biases, node, waiting, self.intervals[node.name].least(coefficients))
        else:
            # Whatever the ranks have of the rows, the stages before sum it up.
            total = before.lower_bounds(coefficients, waiting.own)
            (biases.own if waiting.own else biases.replicated).append(total)

    def _pull(self, node: Node, waiting: Pending) -> tuple[Pulled, bool]:
        """The step through one node, and whether rows are still known to this rank only."""
        rule, exchange = RULES[node.operator], self.network.exchange
        if isinstance(rule, LinearRule) and isinstance(waiting.coefficients, UnitRows):
            pulled = rule.pull_units(node, waiting.coefficients, exchange)
            if pulled is not None:
                return pulled, waiting.own
        coefficients = self._dense(node, waiting.coefficients)
        if isinstance(rule, EnteringRule) and waiting.own:
            return rule.pull_own(node, coefficients, exchange), False
        if isinstance(rule, LinearRule):
            return rule.pull(node, coefficients, exchange), waiting.own
        return Pulled(*self.relaxations[node.name].pull(coefficients)), waiting.own

    def _dense(self, node: Node, coefficients: Coefficients) -> Tensor:
        if isinstance(coefficients, Tensor):
            return coefficients
        return coefficients.dense(node.shape, self.intervals[self.network.graph.input.name].lower)

    def _joined(self, name: str, earlier: Pending | None, new: Pending) -> Pending:
        """Two consumers of one value: their coefficients add up."""
        if earlier is None:
            return new
        node = self.network.nodes[name]
        own = earlier.own and new.own
        terms = [self._in_rows(node, pending, own) for pending in (earlier, new)]
        return Pending(terms[0] + terms[1], own)

    def _in_rows(self, node: Node, pending: Pending, own: bool) -> Tensor:
        """The coefficients over this rank's rows, or over everybody's, of which other ranks' are zero here."""
        coefficients = self._dense(node, pending.coefficients)
        if pending.own == own:
            return coefficients
        batch, rows = coefficients.shape[:2]
        everyone = coefficients.new_zeros(batch, rows * self.network.exchange.axis.size, *node.shape)
        everyone[:, self.network.exchange.own_range(everyone.shape[1])] = coefficients
        return everyone

    def _account(self, biases: _Biases, node: Node, waiting: Pending, value: Tensor) -> None:
        if waiting.own:
            biases.own.append(value)
        elif self.network.is_own(node.name):
            biases.partial.append(value)
        else:
            biases.replicated.append(value)

    def _total(self, biases: _Biases, own: bool) -> Tensor:
        exchange = self.network.exchange
        common = list(biases.replicated)
        if biases.partial:
            common.append(exchange.sum(_added(biases.partial)))
        if not own:
            return _added(common)
        if common:
            # Not a plain slice: what this rank has of other ranks' rows counts in their gradients.
            common = [exchange.own(_added(common), 1)]
        return _added([*common, *biases.own])


def _added(values: list[Tensor]) -> Tensor:
    return sum(values[1:], start=values[0])
