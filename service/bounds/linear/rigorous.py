"""Propagates linear bounds backward that hold in real arithmetic. The coefficients are rounded in float64. Each
step's allowance, the sum of two consumers' coefficients, the sum over the box and the sum of the biases are all
charged to one error that is subtracted at the end: see :class:`_RoundedSums`.

Rows are sharded over tensor-parallel ranks as in the plain arithmetic. Where values are divided, every rank is
charged for its own coefficients. Where they are replicated, either each rank alone computes a share of the
rows, or all ranks have all rows and the first rank's count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from service.bounds.balls import Ball
from service.bounds.flat import by_instance, by_row
from service.bounds.fused.lines import weighted_rows
from service.bounds.graph import Node
from service.bounds.interval import Interval
from service.bounds.linear.plain import Pass
from service.bounds.linear.propagation import InitialRows, Propagated
from service.bounds.linear.row_traversal import RowArithmetic, RowTraversal
from service.bounds.linear.rows.identity import IdentityRows
from service.bounds.linear.rows.structured import StructuredRows
from service.bounds.linear.sharding import ByOwnership, Pending, RowSharding, dense
from service.bounds.network import Network
from service.bounds.rank_group import RankGroup
from service.bounds.relaxation import Relaxed, RigorousStep
from service.bounds.rounding import TINY, UNIT, down, gamma, magnitude


@dataclass(eq=False)
class RoundedTerms:
    """Terms of a sum and their errors, ``(batch, rows)`` each."""

    values: list[Tensor] = field(default_factory=list)
    errors: list[Tensor] = field(default_factory=list)

    def lower_bound(self) -> Tensor:
        """Return the values' sum less all errors; −inf if overflow has left NaN."""
        values = torch.stack(self.values or [torch.zeros_like(self.errors[0])])
        error = gamma(len(values)) * values.abs().sum(dim=0) + TINY
        if self.errors:
            error = error + torch.stack(self.errors).sum(dim=0)
        # The rounding of these sums themselves is far below a millionth.
        found = down(values.sum(dim=0) - error * (1 + 1e-6))
        return found.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)


class _RoundedSums(ByOwnership[RoundedTerms]):
    """The terms of a traversal; those of previous stages count as replicated or as a rank's own."""

    @classmethod
    def empty(cls) -> _RoundedSums:
        return cls(RoundedTerms(), RoundedTerms(), RoundedTerms())

    def of_common_rows(self, tp_group: RankGroup) -> Tensor:
        """Return lower bounds of rows that all ranks have, equal on all: replicated terms are the first rank's."""
        terms = _with_parts(self.replicated, self.partial, tp_group.sum, tp_group.axis.size)
        return tp_group.agree(terms.lower_bound())

    def of_own_rows(self, tp_group: RankGroup) -> Tensor:
        """Return lower bounds of this rank's share of the rows."""
        terms = _with_parts(self.own, self.partial, lambda ends: tp_group.own_sum(ends, 2), tp_group.axis.size)
        common = self.replicated
        before = [tp_group.own(common.lower_bound(), 1)] if common.values or common.errors else []
        return RoundedTerms([*terms.values, *before], terms.errors).lower_bound()


def _with_parts(
    terms: RoundedTerms, partial: RoundedTerms, add_up: Callable[[Tensor], Tensor], ranks: int
) -> RoundedTerms:
    """Add a lower bound of the sum of the ranks' parts: the sum of their bounds, in any order, less its rounding.

    Either all ranks have a part, or none.
    """
    if not partial.values and not partial.errors:
        return terms
    own = partial.lower_bound()
    total, sizes = add_up(torch.stack([own, own.abs()])).unbind()
    return RoundedTerms([*terms.values, total], [*terms.errors, gamma(ranks + 1) * sizes])


def _least_in(ball: Ball, coefficients: Tensor) -> Tensor:
    """Return ``A·m`` less the ball's gain, rounded down."""
    batch, terms = len(ball.lower), coefficients[0, 0].numel()
    gain = ball.gain(by_row(coefficients).expand(batch, -1, -1))
    at_middle, sizes = ball.middle.unsqueeze(1), coefficients.abs()
    # Squares below the normal numbers are lost, though their roots are far above these.
    lost = terms * 2.0**-500 * (1 + ball.size)
    error = gamma(2 * terms + 16) * (weighted_rows(sizes, at_middle.abs()) + gain) + lost
    return down(weighted_rows(coefficients, at_middle) - gain - error)


def _charge(rows: InitialRows, step: RigorousStep) -> Tensor:
    """Return ``|A|·error + lost``, ``(batch, rows)``, for a step of the rows A."""
    if isinstance(rows, IdentityRows) and step.error.shape[1] == 1:
        entries = by_instance(step.error)
        one = entries.gather(1, rows.index.expand(len(entries), -1))
        charged = torch.cat([one, one], dim=1) if rows.mirrored else one
    else:
        like = step.error
        dense = rows if isinstance(rows, Tensor) else rows.dense(tuple(like.shape[2:]), like)
        charged = weighted_rows(dense.abs(), step.error)
    return charged + step.lost.unsqueeze(1)


Answer = Callable[[Tensor, bool], Tensor]
"""``(rows, own)`` of a stage's input to lower bounds ``(batch, rows)``."""


@dataclass(frozen=True, eq=False)
class RigorousPass:
    """``intervals`` and ``steps`` hold rigorously, for every node before the one that a pass starts at.

    The input ends a pass, or passes it to the previous stages; nodes of ``frontier`` end it by their intervals. Where
    it is ``divided``, each rank has a share of the rows outside of tensor-parallel regions. ``before`` replaces the
    network's own previous stages. All ranks must call the same methods.
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
        """Return lower bounds ``(batch, rows)`` of ``rows · value of start`` over the reals; −inf if none is known.

        Rows are exact, ``(batch or 1, rows, *shape)`` or of the identity. If ``start`` is divided over the
        ranks, rows and result are over this rank's entries, equally many on each; if ``own`` is false, the rows
        are this rank's part of common rows. ``held`` δ ``(batch, rows, *shape)``, by nodes before the start, are
        multipliers of the nodes' own bounds: ``a·z = (a − δ)·z + δ·z``, where ``δ·z`` is at least its least value in
        the node's interval.
        """
        traversed = self._traversed(start, rows, held or {}, own)
        traversed.end_at_input()
        return traversed.gathered(traversed.total(), rows)

    def planes(self, start: str, rows: Tensor, own: bool | None = None) -> tuple[Tensor, Tensor]:
        """Return affine functions of the model's input below ``rows · value of start``: coefficients ``(batch, rows,
        features)``, which are exact, and constants ``(batch, rows)``. They are divided as lower bounds are.
        """
        traversed = self._traversed(start, rows, {}, own)
        count = -(-rows.shape[1] // self.sharding.ranks) if traversed.shared else rows.shape[1]
        arrived = traversed.arrived or Pending(self.like.new_zeros(1, count, 0), traversed.divided)
        slopes, constants = self._planes_before(arrived)
        (traversed.sums.own if arrived.own else traversed.sums.replicated).values.append(constants)
        if traversed.divided and not arrived.own:
            slopes = self.network.tp_group.own(slopes, 1)
        elif not traversed.divided:
            slopes = self.network.tp_group.agree(slopes)
        return traversed.gathered(slopes, rows), traversed.gathered(traversed.total(), rows)

    def _planes_before(self, arrived: Pending) -> tuple[Tensor, Tensor]:
        """Return planes from the coefficients of the input, if there are any."""
        first, before, batch = self.network.graph.input, self.network.before, len(self.like)
        coefficients = dense(first, arrived.rows, self.like)
        rows = coefficients.shape[1]
        if not coefficients.shape[2]:
            features = first.size if before is None else before.features
            return coefficients.new_zeros(batch, rows, features), coefficients.new_zeros(batch, rows)
        if before is not None:
            return before.planes(coefficients, arrived.own)
        return by_row(coefficients).expand(batch, -1, -1), coefficients.new_zeros(batch, rows)

    def _traversed(
        self, start: str, rows: InitialRows, held: Mapping[str, Tensor], own: bool | None
    ) -> _RigorousRowArithmetic:
        own = self.sharding.ranks == 1 or (self.network.is_own(start) if own is None else own)
        divided = self.divided or own
        arithmetic = _RigorousRowArithmetic(self, own, divided, shared=divided and not own)
        traversal = RowTraversal(arithmetic, self.network, self.sharding, self.like, divided)
        for name, multipliers in held.items():
            traversal.begin(name, arithmetic.held(name, multipliers))
        traversal.begin(start, arithmetic.placed(start, rows))
        traversal.run(start)
        return arithmetic

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
class _RigorousRowArithmetic(RowArithmetic):
    """The arithmetic of a rigorous pass, with its error account. ``own`` as for the pass's rows; ``divided``: results
    are those of a rank's own rows; ``shared``: these are a share of common rows.
    """

    backward: RigorousPass
    own: bool
    divided: bool
    shared: bool
    sums: _RoundedSums = field(default_factory=_RoundedSums.empty)
    arrived: Pending | None = None
    """The coefficients of the input, once it is reached."""

    def total(self) -> Tensor:
        """Return lower bounds of the rows, from all terms and their errors."""
        tp_group = self.backward.network.tp_group
        return self.sums.of_own_rows(tp_group) if self.divided else self.sums.of_common_rows(tp_group)

    def gathered(self, found: Tensor, rows: InitialRows) -> Tensor:
        """Return the bounds of all ranks, if the rows were shared among them."""
        return self.backward.sharding.gathered(found, rows) if self.shared else found

    def placed(self, name: str, rows: InitialRows) -> Pending:
        """Return the initial rows at a node: this rank's own, or its share of common ones, or all."""
        if not self.shared:
            return Pending(rows, self.own)
        whole, network = self.backward.sharding.filled(rows), self.backward.network
        if network.is_own(name):
            return Pending(whole, own=False)
        return Pending(self.backward.sharding.own_share(whole, network.nodes[name].shape, self.backward.like), own=True)

    def held(self, name: str, multipliers: Tensor) -> Pending:
        """Return the initial −δ at a node, and count the least value of ``δ·z``."""
        arrived = self.placed(name, multipliers)
        delta = self._dense(self.backward.network.nodes[name], arrived)
        bounds = self.backward.intervals[name].map(lambda end: end.unsqueeze(1))
        least = torch.where(delta > 0, bounds.lower, bounds.upper) * delta
        # Without a multiplier there is no term, even if there is no bound.
        least = by_row(torch.where(delta == 0, 0.0, least))
        terms = self._terms(name, arrived.own)
        terms.values.append(least.sum(dim=2))
        terms.errors.append(gamma(least.shape[2] + 1) * least.abs().sum(dim=2) + least.shape[2] * TINY)
        return Pending(-delta, arrived.own)

    def relaxation(self, node: Node) -> Relaxed:
        relaxed = self.backward.steps[node.name].relaxed
        assert relaxed is not None, f"{node} is not linear and has no relaxation"
        return relaxed

    def structured_step(self, node: Node, rows: StructuredRows) -> Propagated | None:
        network = self.backward.network
        linear = network.linear_operator_of(node)
        if linear is None or network.collective_of(node) is not None:
            return None
        step = linear.propagate_backward(node, rows, network.tp_group)
        # Gathered rows and patches would need their own allowances.
        is_exact = step is not None and all(isinstance(each, InitialRows) for each in step.coefficients)
        return step if is_exact else None

    def across_ranks(self, node: Node, coefficients: Tensor, own: bool) -> Tensor:
        if self.backward.network.gathers_parts(node) and not own:
            # Each rank continues with the coefficients of its part of one sum, so they must be equal to the last bit.
            agreed: Tensor = self.backward.network.tp_group.agree(coefficients)
            return agreed
        return coefficients

    def add_bias(self, node: Node, own: bool, bias: Tensor) -> None:
        self._terms(node.name, own).values.append(bias.expand(len(self.backward.like), bias.shape[1]))

    def charge_step(self, node: Node, arrived: Pending) -> None:
        assert isinstance(arrived.rows, InitialRows)
        self._terms(node.name, arrived.own).errors.append(_charge(arrived.rows, self.backward.steps[node.name]))

    def charge_sum(self, node: Node, own: bool, total: Tensor) -> None:
        size = magnitude(self.backward.intervals[node.name])
        self._terms(node.name, own).errors.append(weighted_rows(total.abs(), 2 * UNIT * size.unsqueeze(1)))

    def ends(self, node: Node, arrived: Pending) -> bool:
        if node is self.backward.network.graph.input:
            self.arrived = arrived
            return True
        if node.name in self.backward.frontier:
            self._concretise(node, arrived)
            return True
        return False

    def end_at_input(self) -> None:
        """Bound the coefficients at the input, by its interval or by the previous stages, which sum up the
        ranks' parts of common rows.
        """
        if self.arrived is None:
            return
        network = self.backward.network
        first, before = network.graph.input, self.backward.before
        if before is None and network.before is not None:
            before = network.before.lower_bounds
        if before is None:
            self._concretise(first, self.arrived)
        else:
            terms = self.sums.own if self.arrived.own else self.sums.replicated
            terms.values.append(before(self._dense(first, self.arrived), self.arrived.own))

    def _concretise(self, node: Node, arrived: Pending) -> None:
        """Count the ends that positive and negative coefficients are least at: next to a pole, one end is far larger
        than the other.
        """
        box, coefficients = self.backward.intervals[node.name], self._dense(node, arrived)
        terms, above, below = coefficients[0, 0].numel(), coefficients.clamp(min=0), coefficients.clamp(max=0)
        lower, upper = box.lower.unsqueeze(1), box.upper.unsqueeze(1)
        least = weighted_rows(above, lower) + weighted_rows(below, upper)
        sizes = weighted_rows(above, lower.abs()) - weighted_rows(below, upper.abs())
        found = down(least - gamma(terms + 8) * sizes - terms * 8 * TINY)
        if isinstance(box, Ball):
            found = torch.maximum(found, _least_in(box, coefficients))
        self._terms(node.name, arrived.own).values.append(found)

    def _dense(self, node: Node, pending: Pending) -> Tensor:
        return dense(node, pending.rows, self.backward.like)

    def _terms(self, name: str, own: bool) -> RoundedTerms:
        return self.backward.sharding.account(self.sums, name, own)
