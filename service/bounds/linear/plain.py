"""Linear bounds, propagated backward (CROWN, Zhang et al., 2018; general graphs: auto_LiRPA, Xu et al., 2020).

A pass bounds rows ``C·v`` of one node's value v from below; upper bounds are those of the negated rows. On a mesh
there are up to three biases: replicated ones count once, partial ones are summed over the ranks at the end, and
those of rows that only one rank knows yet are its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from service.bounds.graph import Node
from service.bounds.interval import Interval
from service.bounds.linear.leaps import Leap
from service.bounds.linear.propagation import InitialRows, Propagated
from service.bounds.linear.rows.patches import Patches
from service.bounds.linear.rows.structured import StructuredRows
from service.bounds.linear.sharding import ByOwnership, Pending, RowSharding
from service.bounds.linear.traversal import traverse_backward
from service.bounds.network import Network, OptimisedBefore
from service.bounds.operators import ACCUMULATING, COLLECTIVES, LINEAR, NONLINEAR
from service.bounds.operators.base import LinearOperator
from service.bounds.relaxation import Relaxed

Biases = ByOwnership[list[Tensor]]


@dataclass(frozen=True, eq=False)
class Pass:
    """Backward traversals that end at the input and at ``frontier``, names of nodes whose intervals end them.

    The input ends them, or hands them over to the stages before. ``intervals`` holds the frontier's,
    ``relaxations`` one for each non-linear node on the way. Where it is ``divided``, each rank has a share of the rows
    outside of tensor-parallel regions; gradients of what all ranks have are then those of a rank's own rows. ``before``
    answers instead of the network's own stages before. ``settled`` has entries, bool ``(batch or 1, n)``, of values by
    name, that no row of theirs could bound better. ``leaps`` has steps over several nodes at once, by the last of them.
    A pass that ``ascends`` is differentiated only to choose relaxations, so that gradients need not be exact; those of
    parameters that are trained must be.
    """

    network: Network
    intervals: Mapping[str, Interval]
    relaxations: Mapping[str, Relaxed]
    frontier: frozenset[str] = frozenset()
    divided: bool = False
    before: OptimisedBefore | None = None
    ascends: bool = False
    settled: Mapping[str, Tensor] = field(default_factory=dict)
    leaps: Mapping[str, Leap] = field(default_factory=dict)

    @property
    def batch(self) -> int:
        return len(self.like)

    @property
    def device(self) -> torch.device:
        return self.like.device

    @cached_property
    def like(self) -> Tensor:
        """Return a tensor with the batch, the dtype and the device of the bounds."""
        return self.intervals[self.network.graph.input.name].lower

    @cached_property
    def sharding(self) -> RowSharding:
        return RowSharding(self.network, self.divided)

    def lower_bounds(self, start: str, rows: InitialRows, own: bool | None = None) -> Tensor:
        """Return lower bounds ``(batch, rows)`` of ``rows`` times the value of ``start``; −inf where there is none.

        Rows are ``(batch or 1, rows, *shape)`` or :class:`IdentityRows`. Where ``start`` is divided over the ranks, the
        rows are over this rank's entries, equally many on each, and so is the result; unless ``own`` is false: then
        they are this rank's part of common rows. All ranks must call it.
        """
        own = self.network.is_own(start) if own is None else own
        if own or not self.sharding.divides(start):
            return self._traversed(start, rows, own)
        return self.sharding.gathered(self._traversed(start, self.sharding.filled(rows), own=False), rows)

    def _traversed(self, start: str, rows: InitialRows, own: bool) -> Tensor:
        """Return bounds of this rank's share of the rows where they are divided at ``start``."""
        traversal = _Traversal(self, {start: Pending(rows, own)}, Biases([], [], []))
        nodes = self.network.graph.nodes[self.network.position[start] :: -1]
        traverse_backward(nodes, traversal.pending, traversal.propagate, traversal.join)
        total = self._total(traversal.biases, own or self.sharding.divides(start))
        # No sum of numbers is infinite: what overflows has lost terms that may have made it less.
        return total.nan_to_num(nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf)

    def _total(self, biases: Biases, own: bool) -> Tensor:
        tp_group = self.network.tp_group
        if not own:
            partial = [tp_group.sum(_added(biases.partial))] if biases.partial else []
            everyone = [tp_group.gather(_added(biases.own), 1)] if biases.own else []
            return _added([*biases.replicated, *partial, *everyone])
        # No plain slices: what this rank has of other ranks' rows counts in their gradients.
        shares = [tp_group.own(_added(biases.replicated), 1)] if biases.replicated else []
        shares += [tp_group.own_sum(_added(biases.partial), 1)] if biases.partial else []
        return _added([*shares, *biases.own])


@dataclass(eq=False)
class _Traversal:
    """The plain arithmetic of one traversal: coefficients and biases are what their dtype makes of them."""

    backward: Pass
    pending: dict[str, Pending]
    biases: Biases

    def propagate(self, node: Node, arrived: Pending) -> Iterable[tuple[str, Pending]]:
        network = self.backward.network
        if node.name in self.backward.frontier or node is network.graph.input:
            if node.name in self.backward.frontier and self._ends_in_patches(node, arrived):
                return ()
            self._end(node, arrived)
            return ()
        if node.name == network.entrance and self._ends_in_patches(node, arrived):
            return ()
        leap = self.backward.leaps.get(node.name)
        if leap is not None and leap.is_of(self.backward.relaxations):
            through, bias = leap.backward(self._dense(node, arrived))
            self._account(node, arrived.own, bias)
            return [(leap.source.name, Pending(through, arrived.own, fresh=True))]
        linear = LINEAR.get(node.operator)
        accumulating = ACCUMULATING.get(node.operator)
        if accumulating is not None and isinstance(arrived.rows, Tensor):
            total = self._accumulable(node.inputs[0], arrived.rows, arrived.own)
            if total is not None:
                self._account(node, arrived.own, accumulating.backward_onto(node, arrived.rows, total))
                return ()
        step, rows_own, still_own = self._step(node, linear, arrived)
        self._account(node, rows_own, step.bias)
        fresh = linear is not None and linear.is_fresh
        deciding = frozenset[int]() if linear is not None else NONLINEAR[node.operator].deciding
        return [
            (name, Pending(rows, still_own, fresh))
            for index, (name, rows) in enumerate(zip(node.inputs, step.coefficients, strict=True))
            if index not in deciding
        ]

    def _accumulable(self, name: str, rows: Tensor, own: bool) -> Tensor | None:
        """Return the coefficients that wait at a node where those that arrive after it may be added in place."""
        earlier = self.pending.get(name)
        if earlier is None or not earlier.fresh or earlier.own != own or torch.is_grad_enabled():
            return None
        total = earlier.rows
        if not isinstance(total, Tensor) or total.shape[:2] != rows.shape[:2]:
            return None
        return total if total.is_contiguous() else None

    def _step(self, node: Node, linear: LinearOperator | None, arrived: Pending) -> tuple[Propagated, bool, bool]:
        """Return the step through one node, and whether rows are this rank's alone at the node and before it."""
        step = self._structured_step(node, linear, arrived.rows)
        if step is not None:
            return step, arrived.own, arrived.own
        coefficients, own = self._coefficients(node, arrived)
        if linear is None:
            return Propagated(*self.backward.relaxations[node.name].backward(coefficients)), own, own
        tp_group = self.backward.network.tp_group
        if (collective := COLLECTIVES.get(node.operator)) is not None:
            step, still_own = collective.backward_across_ranks(node, coefficients, tp_group, own, self.backward.divided)
            return step, own, still_own
        if self.backward.ascends:
            return linear.backward_in_ascent(node, coefficients, tp_group), own, own
        return linear.backward(node, coefficients, tp_group), own, own

    def _structured_step(
        self, node: Node, linear: LinearOperator | None, rows: Tensor | StructuredRows
    ) -> Propagated | None:
        """Return the step of rows in the first representation that goes through; ``None`` where they must be dense."""
        if isinstance(rows, Tensor):
            return None
        wider: StructuredRows | None = rows
        while wider is not None:
            step = None
            if wider.is_worthwhile(node.shape):
                if linear is None:
                    step = self.backward.relaxations[node.name].propagate_backward(wider)
                else:
                    step = linear.propagate_backward(node, wider, self.backward.network.tp_group)
            if step is not None or self.backward.sharding.ranks > 1:
                return step
            wider = wider.wider(node.shape, self.backward.like)
        return None

    def join(self, name: str, earlier: Pending, new: Pending) -> Pending:
        """Add the coefficients of two consumers of one value."""
        node, sharding = self.backward.network.nodes[name], self.backward.sharding
        if sharding.divides(name):
            (first, _), (second, _) = (self._coefficients(node, pending) for pending in (earlier, new))
            return Pending(first + second, own=True, fresh=True)
        own = earlier.own and new.own
        if (total := self._structured_sum(node, earlier, new)) is not None:
            return Pending(total, own)
        first, second = (
            sharding.over_rows(node, self._dense(node, pending), held_alone=pending.own, own=own)
            for pending in (earlier, new)
        )
        # A tensor that nothing else holds, and as it was: it may take the sum.
        held = [first] if earlier.fresh and first is earlier.rows else []
        held += [second] if new.fresh and second is new.rows else []
        if held and not torch.is_grad_enabled() and first.shape == second.shape:
            return Pending(held[0].add_(second if held[0] is first else first), own, fresh=True)
        return Pending(first + second, own, fresh=True)

    def _structured_sum(self, node: Node, *terms: Pending) -> StructuredRows | None:
        if any(isinstance(term.rows, Tensor) for term in terms):
            return None
        first, second = (
            term.rows.wider(node.shape, self.backward.like) or term.rows
            for term in terms
            if not isinstance(term.rows, Tensor)
        )
        return first.plus(second)

    def _end(self, node: Node, arrived: Pending) -> None:
        coefficients, own = self._coefficients(node, arrived)
        before = self.backward.before or self.backward.network.before
        if before is None or node.name in self.backward.frontier:
            self._account(node, own, self.backward.intervals[node.name].least(coefficients))
        else:
            # Whatever the ranks have of the rows, the stages before sum it up.
            (self.biases.own if own else self.biases.replicated).append(before.lower_bounds(coefficients, own))

    def _ends_in_patches(self, node: Node, arrived: Pending) -> bool:
        """Return whether patches can end at the input's image: a box is the same box whatever its shape; a ball, or a
        value of stages, is not.

            The image's own interval tells nothing: of a ball it is the box around it.
        """
        intervals = self.backward.intervals
        interval, whole = intervals.get(node.name), intervals[self.backward.network.graph.input.name]
        if interval is None or not isinstance(arrived.rows, Patches) or type(whole) is not Interval:
            return False
        box = interval.outward
        self._account(node, arrived.own, arrived.rows.least(box.lower, box.upper))
        return True

    def _coefficients(self, node: Node, arrived: Pending) -> tuple[Tensor, bool]:
        """Return dense coefficients, of this rank's share where rows are divided, and whether they are its own."""
        if arrived.own or not self.backward.sharding.divides(node.name) or not isinstance(arrived.rows, InitialRows):
            return self._dense(node, arrived), arrived.own
        return self.backward.sharding.own_share(arrived.rows, node.shape, self.backward.like), True

    def _dense(self, node: Node, pending: Pending) -> Tensor:
        rows = pending.rows
        return rows if isinstance(rows, Tensor) else rows.dense(node.shape, self.backward.like)

    def _account(self, node: Node, own: bool, bias: Tensor | None) -> None:
        if bias is not None:
            self.backward.sharding.account(self.biases, node.name, own).append(bias)


def _added(values: list[Tensor]) -> Tensor:
    return sum(values[1:], start=values[0])
