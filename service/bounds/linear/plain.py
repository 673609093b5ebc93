"""Propagates linear bounds backward (CROWN, Zhang et al., 2018; general graphs: auto_LiRPA, Xu et al., 2020).

A pass bounds rows ``C·v`` of one node's value v from below; upper bounds are those of the negated rows. On a mesh
there are up to three biases: replicated ones count once, partial ones are summed over the ranks at the end, and
those of rows that only one rank has yet are its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from service.bounds.graph import Node
from service.bounds.interval import Interval
from service.bounds.leaps import Leap
from service.bounds.linear.propagation import InitialRows, Propagated
from service.bounds.linear.row_traversal import RowArithmetic, RowTraversal
from service.bounds.linear.rows.patches import Patches
from service.bounds.linear.rows.structured import StructuredRows
from service.bounds.linear.sharding import ByOwnership, Pending, RowSharding
from service.bounds.network import Network, OptimisedBefore
from service.bounds.relaxation import Relaxed

Biases = ByOwnership[list[Tensor]]


@dataclass(frozen=True, eq=False)
class Pass:
    """Backward traversals that end at the input and at ``frontier``, names of nodes whose intervals end them.

    The input ends them, or passes them to the previous stages. ``intervals`` holds the frontier's, ``relaxations``
    one for each non-linear node on the way. If it is ``divided``, each rank has a share of the rows outside of
    tensor-parallel regions; gradients of common tensors are then those of a rank's own rows. ``before``
    replaces the network's own previous stages. ``settled`` marks entries, bool ``(batch or 1, n)``, of values
    by name, that no row could bound better. ``leaps`` has steps over several nodes at once, by the last of
    them. A pass that ``ascends`` is differentiated only to choose relaxations, so its gradients need not be
    exact; gradients of trained parameters must be.
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
        return self.like.shape[0]

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
        """Return lower bounds ``(batch, rows)`` of ``rows`` times the value of ``start``; −inf if none is known.

        Rows are ``(batch or 1, rows, *shape)`` or :class:`IdentityRows`. If ``start`` is divided over the
        ranks, rows and result are over this rank's entries, equally many on each; if ``own`` is false, the rows
        are this rank's part of common rows. All ranks must call it.
        """
        own = self.network.is_own(start) if own is None else own
        if own or not self.sharding.divides(start):
            return self._traversed(start, rows, own)
        return self.sharding.gathered(self._traversed(start, self.sharding.filled(rows), own=False), rows)

    def _traversed(self, start: str, rows: InitialRows, own: bool) -> Tensor:
        """Return bounds of this rank's share of the rows, which are divided at ``start``."""
        arithmetic = PlainRowArithmetic(self)
        traversal = RowTraversal(arithmetic, self.network, self.sharding, self.like, self.divided, self.ascends)
        traversal.begin(start, Pending(rows, own))
        traversal.run(start)
        total = arithmetic.total(own or self.sharding.divides(start))
        # No sum of finite numbers is infinite: an overflow has lost terms that may have made it smaller.
        return total.nan_to_num(nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf)


@dataclass(eq=False)
class PlainRowArithmetic(RowArithmetic):
    """The arithmetic of a plain pass: coefficients and biases are rounded by their dtype."""

    accumulates = True

    backward: Pass
    biases: Biases = field(default_factory=lambda: Biases([], [], []))

    def relaxation(self, node: Node) -> Relaxed:
        return self.backward.relaxations[node.name]

    def leap(self, node: Node) -> Leap | None:
        leap = self.backward.leaps.get(node.name)
        return leap if leap is not None and leap.is_of(self.backward.relaxations) else None

    def skipped_inputs(self, node: Node) -> frozenset[int]:
        network = self.backward.network
        if node.name not in network.relaxed or self.relaxation(node).reaches_deciding:
            return frozenset()
        return network.operator_of(node).deciding

    def structured_step(self, node: Node, rows: StructuredRows) -> Propagated | None:
        """Return the step of rows in the first representation that the node supports."""
        network = self.backward.network
        linear = network.linear_operator_of(node)
        rules = self.relaxation(node).backward_rules if linear is None else linear.backward_rules
        wider: StructuredRows | None = rows
        while wider is not None:
            step = None
            if wider.is_worthwhile(node.shape):
                if linear is None:
                    step = self.backward.relaxations[node.name].propagate_backward(wider)
                else:
                    step = linear.propagate_backward(node, wider, network.tp_group)
            if step is not None or self.backward.sharding.ranks > 1 or wider.wider_kind(node.shape) not in rules:
                return step
            wider = wider.wider(node.shape, self.backward.like)
        return None

    def add_bias(self, node: Node, own: bool, bias: Tensor) -> None:
        self.backward.sharding.account(self.biases, node.name, own).append(bias)

    def charge_step(self, node: Node, arrived: Pending) -> None:
        """Charge nothing: rounding is not accounted for."""

    def charge_sum(self, node: Node, own: bool, total: Tensor) -> None:
        """Charge nothing: rounding is not accounted for."""

    def ends(self, node: Node, arrived: Pending) -> bool:
        backward, network = self.backward, self.backward.network
        in_frontier = node.name in backward.frontier
        if (in_frontier or node.name == network.entrance) and self._ends_in_patches(node, arrived):
            return True
        if not in_frontier and node is not network.graph.input:
            return False
        coefficients, own = self.backward.sharding.coefficients(node, arrived, self.backward.like)
        before = backward.before or network.before
        if before is None or in_frontier:
            self.add_bias(node, own, backward.intervals[node.name].least(coefficients))
        else:
            # The previous stages sum up the ranks' parts of the rows.
            (self.biases.own if own else self.biases.replicated).append(before.lower_bounds(coefficients, own))
        return True

    def _ends_in_patches(self, node: Node, arrived: Pending) -> bool:
        """Return whether patches can end at the input's image: a box is the same box whatever its shape; a ball, or a
        value of stages, is not.

            The image's own interval does not tell: for a ball, it is the box around it.
        """
        intervals = self.backward.intervals
        interval, whole = intervals.get(node.name), intervals[self.backward.network.graph.input.name]
        if interval is None or not isinstance(arrived.rows, Patches) or type(whole) is not Interval:
            return False
        box = interval.outward
        self.add_bias(node, arrived.own, arrived.rows.least(box.lower, box.upper))
        return True

    def total(self, own: bool) -> Tensor:
        """Return the sum of all biases; ``own`` says that each rank has rows of its own at the end."""
        tp_group, biases = self.backward.network.tp_group, self.biases
        if not own:
            partial = [tp_group.sum(_added(biases.partial))] if biases.partial else []
            everyone = [tp_group.gather(_added(biases.own), 1)] if biases.own else []
            return _added([*biases.replicated, *partial, *everyone])
        # Not plain slices, since this rank's part of other ranks' rows counts in their gradients.
        shares = [tp_group.own(_added(biases.replicated), 1)] if biases.replicated else []
        shares += [tp_group.own_sum(_added(biases.partial), 1)] if biases.partial else []
        return _added([*shares, *biases.own])


def _added(values: list[Tensor]) -> Tensor:
    return sum(values[1:], start=values[0])
