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

from service.bounds.fused import Picked
from service.bounds.graph import Node
from service.bounds.interval import Interval
from service.bounds.network import Climbing, Network
from service.bounds.operators import LINEAR
from service.bounds.operators.base import Carried, Coefficients, Pulled, UnitRows
from service.bounds.relaxation import Picking, Relaxed, Windowed
from service.bounds.shares import asked, filled, own_share
from service.bounds.windows import Windows, image_of


@dataclass(frozen=True, eq=False)
class Pending:
    """Coefficients that wait at a node. ``own``: the rows are this rank's alone, and so are their values so far.

    ``fresh``: nothing else holds the tensor, so that more may be added to it in place.
    """

    coefficients: Carried
    own: bool
    fresh: bool = False


@dataclass(eq=False)
class _Biases:
    replicated: list[Tensor] = field(default_factory=list)
    partial: list[Tensor] = field(default_factory=list)
    own: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Pass:
    """One walk from a node back to ``frontier``, names of nodes whose intervals end it.

    The input always ends it, or hands it over to the stages before. ``intervals`` holds the frontier's,
    ``relaxations`` one for each non-linear node on the way. Where it is ``divided``, each rank has a share of the rows
    outside of tensor-parallel regions; gradients of what all ranks have are then those of a rank's own rows. ``before``
    answers instead of the network's own stages before. A pass that ``ascends`` is differentiated only to choose
    relaxations, so that gradients need not be exact; those of parameters that are trained must be.
    """

    network: Network
    intervals: Mapping[str, Interval]
    relaxations: Mapping[str, Relaxed]
    frontier: frozenset[str] = frozenset()
    divided: bool = False
    before: Climbing | None = None
    ascends: bool = False

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
        own = self.network.is_own(start) if own is None else own
        if own or not self._divides(start):
            return self._walked(start, rows, own)
        exchange = self.network.exchange
        found = exchange.gather(self._walked(start, filled(rows, exchange.axis.size), own=False), 1)
        return asked(found, rows)

    def _divides(self, name: str) -> bool:
        """Whether each rank has a share of the rows at this node."""
        return self.divided and self.network.exchange.axis.size > 1 and not self.network.is_own(name)

    def _walked(self, start: str, rows: Coefficients, own: bool) -> Tensor:
        """Of this rank's share of the rows where they are divided at ``start``."""
        biases = _Biases()
        pending = {start: Pending(rows, own)}
        for node in self.network.graph.nodes[self.network.position[start] :: -1]:
            waiting = pending.pop(node.name, None)
            if waiting is None:
                continue
            if node.name in self.frontier or node is self.network.graph.input:
                self._end(biases, node, waiting)
                continue
            if node.name == self.network.entrance and self._ends_in_windows(biases, node, waiting):
                continue
            self._step(biases, pending, node, waiting)
        total = self._total(biases, own or self._divides(start))
        # No sum of numbers is infinite: what overflows has lost terms that may have made it less.
        return total.nan_to_num(nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf)

    def _step(self, biases: _Biases, pending: dict[str, Pending], node: Node, waiting: Pending) -> None:
        """Through one node; what was only on the way is dropped before the next."""
        linear = LINEAR.get(node.operator)
        fresh = linear is not None and linear.accumulates
        onto = self._growing(pending.get(node.inputs[0]), waiting) if fresh else None
        if linear is not None and onto is not None and isinstance(waiting.coefficients, Tensor):
            bias = linear.pull_onto(node, waiting.coefficients, onto)
            if bias is not None:
                self._account(biases, node, waiting.own, bias)
            return
        pulled, rows_own, still_own = self._pull(node, waiting)
        if pulled.bias is not None:
            self._account(biases, node, rows_own, pulled.bias)
        for name, coefficients in zip(node.inputs, pulled.coefficients, strict=True):
            pending[name] = self._joined(name, pending.get(name), Pending(coefficients, still_own, fresh))

    @staticmethod
    def _growing(earlier: Pending | None, waiting: Pending) -> Tensor | None:
        """The coefficients before a node where those from it may be added to them in place."""
        if earlier is None or not earlier.fresh or earlier.own != waiting.own or torch.is_grad_enabled():
            return None
        into, given = earlier.coefficients, waiting.coefficients
        if not isinstance(into, Tensor) or not isinstance(given, Tensor) or into.shape[:2] != given.shape[:2]:
            return None
        return into if into.is_contiguous() else None

    def _end(self, biases: _Biases, node: Node, waiting: Pending) -> None:
        coefficients, own = self._settled(node, waiting)
        before = self.before or self.network.before
        if before is None or node.name in self.frontier:
            self._account(biases, node, own, self.intervals[node.name].least(coefficients))
        else:
            # Whatever the ranks have of the rows, the stages before sum it up.
            (biases.own if own else biases.replicated).append(before.lower_bounds(coefficients, own))

    def _ends_in_windows(self, biases: _Biases, node: Node, waiting: Pending) -> bool:
        """At the input's image: a box of inputs is the same box whatever its shape; a ball or a value of stages is not.

        The image's own interval tells nothing: of a ball it is the box around it.
        """
        interval, whole = self.intervals.get(node.name), self.intervals[self.network.graph.input.name]
        if interval is None or not isinstance(waiting.coefficients, Windows) or type(whole) is not Interval:
            return False
        box = interval.outward
        self._account(biases, node, waiting.own, waiting.coefficients.least(box.lower, box.upper))
        return True

    def _pull_units(self, node: Node, coefficients: Carried) -> Pulled | None:
        """The step for rows of the identity or of a constant matrix; ``None`` where they are not, or must be made."""
        if isinstance(coefficients, Picked):
            return self._pull_picked(node, coefficients)
        linear = LINEAR.get(node.operator)
        if linear is None or not isinstance(coefficients, UnitRows):
            return None
        return linear.pull_units(node, coefficients, self.network.exchange)

    def _pull_picked(self, node: Node, rows: Picked) -> Pulled | None:
        linear = LINEAR.get(node.operator)
        if linear is not None:
            return linear.pull_picked(node, rows)
        relaxed = self.relaxations[node.name]
        found = relaxed.pull_picked(rows) if isinstance(relaxed, Picking) else None
        return None if found is None else Pulled(*found)

    def _pull_windows(self, node: Node, coefficients: Carried) -> Pulled | None:
        """The step for rows in windows; ``None`` where they are not, or must be made whole."""
        if isinstance(coefficients, UnitRows) and image_of(node.shape) is not None:
            coefficients = coefficients.windows(node.shape, self.intervals[self.network.graph.input.name].lower)
        if not isinstance(coefficients, Windows) or not coefficients.is_smaller(node.shape):
            return None
        linear = LINEAR.get(node.operator)
        if linear is not None:
            return linear.pull_windows(node, coefficients)
        relaxed = self.relaxations[node.name]
        found = relaxed.pull_windows(coefficients) if isinstance(relaxed, Windowed) else None
        return None if found is None else Pulled((found[0],), found[1])

    def _pull(self, node: Node, waiting: Pending) -> tuple[Pulled, bool, bool]:
        """The step through one node, and whether rows are this rank's alone at the node and before it."""
        linear, exchange = LINEAR.get(node.operator), self.network.exchange
        pulled = self._pull_units(node, waiting.coefficients)
        if pulled is None and exchange.axis.size == 1:
            pulled = self._pull_windows(node, waiting.coefficients)
        if pulled is not None:
            return pulled, waiting.own, waiting.own
        coefficients, own = self._settled(node, waiting)
        if linear is not None and linear.crossing is not None:
            pulled, still_own = linear.pull_rows(node, coefficients, exchange, own, self.divided)
            return pulled, own, still_own
        return self._pull_dense(node, coefficients), own, own

    def _pull_dense(self, node: Node, coefficients: Tensor) -> Pulled:
        linear = LINEAR.get(node.operator)
        if linear is None:
            return Pulled(*self.relaxations[node.name].pull(coefficients))
        pull = linear.pull_in_ascent if self.ascends else linear.pull
        return pull(node, coefficients, self.network.exchange)

    def _settled(self, node: Node, waiting: Pending) -> tuple[Tensor, bool]:
        """Dense coefficients, of this rank's share of the rows where they are divided; whether they are its own."""
        if waiting.own or not self._divides(node.name) or isinstance(waiting.coefficients, Windows | Picked):
            return self._dense(node, waiting.coefficients), waiting.own
        like = self.intervals[self.network.graph.input.name].lower
        return own_share(waiting.coefficients, node.shape, like, self.network.exchange), True

    def _dense(self, node: Node, coefficients: Carried) -> Tensor:
        if isinstance(coefficients, Tensor):
            return coefficients
        return coefficients.dense(node.shape, self.intervals[self.network.graph.input.name].lower)

    def _joined(self, name: str, earlier: Pending | None, new: Pending) -> Pending:
        """Two consumers of one value: their coefficients add up."""
        if earlier is None:
            return new
        node = self.network.nodes[name]
        if self._divides(name):
            (first, _), (second, _) = (self._settled(node, each) for each in (earlier, new))
            return Pending(first + second, own=True, fresh=True)
        own = earlier.own and new.own
        if (both := self._joined_windows(node, earlier, new)) is not None:
            return Pending(both, own)
        terms = [self._in_rows(node, pending, own) for pending in (earlier, new)]
        return Pending(terms[0] + terms[1], own, fresh=True)

    def _joined_windows(self, node: Node, *terms: Pending) -> Windows | None:
        like = self.intervals[self.network.graph.input.name].lower
        image = image_of(node.shape) is not None
        first, second = (
            each.coefficients.windows(node.shape, like)
            if image and isinstance(each.coefficients, UnitRows)
            else each.coefficients
            for each in terms
        )
        return first.plus(second) if isinstance(first, Windows) and isinstance(second, Windows) else None

    def _in_rows(self, node: Node, pending: Pending, own: bool) -> Tensor:
        """The coefficients over this rank's rows, or over everybody's, of which other ranks' are zero here."""
        coefficients = self._dense(node, pending.coefficients)
        if pending.own == own:
            return coefficients
        batch, rows = coefficients.shape[:2]
        everyone = coefficients.new_zeros(batch, rows * self.network.exchange.axis.size, *node.shape)
        everyone[:, self.network.exchange.own_range(everyone.shape[1])] = coefficients
        return everyone

    def _account(self, biases: _Biases, node: Node, own: bool, value: Tensor) -> None:
        if own:
            biases.own.append(value)
        elif self.network.is_own(node.name):
            biases.partial.append(value)
        else:
            biases.replicated.append(value)

    def _total(self, biases: _Biases, own: bool) -> Tensor:
        exchange = self.network.exchange
        if not own:
            partial = [exchange.sum(_added(biases.partial))] if biases.partial else []
            everyone = [exchange.gather(_added(biases.own), 1)] if biases.own else []
            return _added([*biases.replicated, *partial, *everyone])
        # No plain slices: what this rank has of other ranks' rows counts in their gradients.
        shares = [exchange.own(_added(biases.replicated), 1)] if biases.replicated else []
        shares += [exchange.own_sum(_added(biases.partial), 1)] if biases.partial else []
        return _added([*shares, *biases.own])


def _added(values: list[Tensor]) -> Tensor:
    return sum(values[1:], start=values[0])
