"""Runs one traversal of rows, backward from a node to their ends, in a given arithmetic."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from service.bounds.graph import Node
from service.bounds.leaps import Leap
from service.bounds.linear.propagation import Propagated, traverse_backward
from service.bounds.linear.rows.structured import StructuredRows
from service.bounds.linear.sharding import Pending, RowSharding, dense
from service.bounds.network import Network
from service.bounds.relaxation import Relaxed


class RowArithmetic(ABC):
    """The arithmetic of one traversal, with the account of its bounds: plain, or with every rounding charged.

    ``accumulates`` says that sums cost nothing: they may keep the structure of their terms, and be computed within a
    step.
    """

    accumulates: ClassVar[bool] = False

    @abstractmethod
    def ends(self, node: Node, arrived: Pending) -> bool:
        """Return whether coefficients end at a node, and if so, account for their least value."""

    @abstractmethod
    def relaxation(self, node: Node) -> Relaxed:
        """Return the relaxation of a non-linear node."""

    @abstractmethod
    def structured_step(self, node: Node, rows: StructuredRows) -> Propagated | None:
        """Return the step of rows that keep a structure; ``None`` if they must be dense."""

    @abstractmethod
    def add_bias(self, node: Node, own: bool, bias: Tensor) -> None:
        """Account for a bias ``(batch or 1, rows)`` of a step through ``node``."""

    @abstractmethod
    def charge_step(self, node: Node, arrived: Pending) -> None:
        """Account for the rounding of a step through ``node``."""

    @abstractmethod
    def charge_sum(self, node: Node, own: bool, total: Tensor) -> None:
        """Account for the rounding of the sum of two consumers' coefficients."""

    def leap(self, node: Node) -> Leap | None:
        """Return the step over several nodes that begins at this one, if there is one."""
        return None

    def skipped_inputs(self, node: Node) -> frozenset[int]:
        """Return the positions of inputs that coefficients need not go to, since they are 0 there."""
        return frozenset()

    def across_ranks(self, node: Node, coefficients: Tensor, own: bool) -> Tensor:
        """Return coefficients after a node at which ranks communicate."""
        return coefficients


@dataclass(eq=False)
class RowTraversal:
    """The coefficients of one traversal, which wait at nodes in ``pending``.

    Where it is ``divided``, collectives leave each rank with a share of the rows outside of tensor-parallel regions.
    ``like`` has the batch, the dtype and the device of the bounds. With ``ascends``, gradients only choose relaxations,
    so that they may be rounded.
    """

    arithmetic: RowArithmetic
    network: Network
    sharding: RowSharding
    like: Tensor
    divided: bool
    ascends: bool = False
    pending: dict[str, Pending] = field(default_factory=dict)

    def begin(self, name: str, rows: Pending) -> None:
        """Add rows to those that wait at a node."""
        self.pending[name] = self.join(name, self.pending[name], rows) if name in self.pending else rows

    def run(self, start: str) -> None:
        """Take all rows from ``start``, and from nodes before it, to their ends."""
        nodes = self.network.graph.nodes[self.network.position[start] :: -1]
        traverse_backward(nodes, self.pending, self.propagate, self.join)

    def propagate(self, node: Node, arrived: Pending) -> Iterable[tuple[str, Pending]]:
        """Take the waiting rows of a node one step back."""
        if self.arithmetic.ends(node, arrived):
            return ()
        if (leap := self.arithmetic.leap(node)) is not None:
            through, bias = leap.backward(dense(node, arrived.rows, self.like))
            self.arithmetic.add_bias(node, arrived.own, bias)
            return [(leap.source.name, Pending(through, arrived.own, fresh=True))]
        if self._is_accumulated(node, arrived):
            return ()
        self.arithmetic.charge_step(node, arrived)
        step, rows_own, still_own = self._step(node, arrived)
        if step.bias is not None:
            self.arithmetic.add_bias(node, rows_own, step.bias)
        linear, skipped = self.network.linear_operator_of(node), self.arithmetic.skipped_inputs(node)
        fresh = linear is not None and linear.is_fresh
        return [
            (name, Pending(rows, still_own, fresh))
            for index, (name, rows) in enumerate(zip(node.inputs, step.coefficients, strict=True))
            if index not in skipped
        ]

    def _is_accumulated(self, node: Node, arrived: Pending) -> bool:
        """Return whether the step is done, added in place to the coefficients that wait at the node's input."""
        earlier, rows = self.pending.get(node.inputs[0]), arrived.rows
        if earlier is None or not earlier.fresh or earlier.own != arrived.own or torch.is_grad_enabled():
            return False
        operator, total = self.network.accumulating_operator_of(node), earlier.rows
        if operator is None or not self.arithmetic.accumulates or not isinstance(rows, Tensor):
            return False
        if not isinstance(total, Tensor) or total.shape[:2] != rows.shape[:2] or not total.is_contiguous():
            return False
        bias = operator.backward_onto(node, rows, total)
        if bias is not None:
            self.arithmetic.add_bias(node, arrived.own, bias)
        return True

    def _step(self, node: Node, arrived: Pending) -> tuple[Propagated, bool, bool]:
        """Return the step through one node, and whether rows belong only to this rank at the node and before it."""
        if not isinstance(arrived.rows, Tensor):
            structured = self.arithmetic.structured_step(node, arrived.rows)
            if structured is not None:
                return structured, arrived.own, arrived.own
        coefficients, own = self.sharding.coefficients(node, arrived, self.like)
        linear, tp_group = self.network.linear_operator_of(node), self.network.tp_group
        if linear is None:
            return Propagated(*self.arithmetic.relaxation(node).backward(coefficients)), own, own
        if (collective := self.network.collective_of(node)) is not None:
            coefficients = self.arithmetic.across_ranks(node, coefficients, own)
            step, still_own = collective.backward_across_ranks(node, coefficients, tp_group, own, self.divided)
            return step, own, still_own
        backward = linear.backward_in_ascent if self.ascends else linear.backward
        return backward(node, coefficients, tp_group), own, own

    def join(self, name: str, earlier: Pending, new: Pending) -> Pending:
        """Add the coefficients of two consumers of one value."""
        arithmetic, sharding, node = self.arithmetic, self.sharding, self.network.nodes[name]
        if arithmetic.accumulates and not sharding.divides(name):
            total = self._structured_sum(node, earlier, new)
            if total is not None:
                return Pending(total, earlier.own and new.own)
        terms = [sharding.coefficients(node, each, self.like) for each in (earlier, new)]
        own = all(held_alone for _, held_alone in terms)
        first, second = (sharding.over_rows(node, each, held_alone=alone, own=own) for each, alone in terms)
        # Nothing else holds this unchanged tensor, so it may take the sum.
        held = [first] if earlier.fresh and first is earlier.rows else []
        held += [second] if new.fresh and second is new.rows else []
        if held and not torch.is_grad_enabled() and first.shape == second.shape:
            added = held[0].add_(second if held[0] is first else first)
        else:
            added = first + second
        arithmetic.charge_sum(node, own, added)
        return Pending(added, own, fresh=True)

    def _structured_sum(self, node: Node, *terms: Pending) -> StructuredRows | None:
        if any(isinstance(term.rows, Tensor) for term in terms):
            return None
        first, second = (
            term.rows.wider(node.shape, self.like) or term.rows for term in terms if not isinstance(term.rows, Tensor)
        )
        return first.plus(second)
