"""The core's collectives as linear operators of a network that is divided over tensor-parallel ranks.

Inside a region the bound is ``Σ_r A_r·v_r``: every rank holds the coefficients of its own values, and a bias that
is partial. Outside, values and coefficients are replicated. So the collectives of the two directions are each
other's adjoints: forward one all-reduce at the end of a region, backward one at its beginning.

With sequence parallelism nothing is replicated between layers: each rank has some of the tokens, and an all-reduce is
a reduce-scatter and an all-gather. Those two never leave a region, and backward they change places.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from service.bounds.graph import Node
from service.bounds.interval import Interval
from service.bounds.linear.propagation import Propagated, backward_rule
from service.bounds.linear.rows.identity import IdentityRows
from service.bounds.operators.allowance import signs_kept
from service.bounds.operators.base import Collective, Crossing
from service.bounds.operators.broadcasting import dimension_of
from service.bounds.rank_group import RankGroup
from service.bounds.rounding import TINY, gamma, widened


class Begin(Collective):
    """A collective at the beginning of a region. A pass may leave it with the rows divided over the ranks."""

    crossing = Crossing.ENTER

    @abstractmethod
    def backward_divided(self, node: Node, coefficients: Tensor, tp_group: RankGroup) -> Propagated:
        """Propagate like ``backward``, but give each rank its own rows only; their number divides by the ranks."""

    @abstractmethod
    def backward_kept(self, node: Node, coefficients: Tensor, tp_group: RankGroup) -> Propagated:
        """Propagate like ``backward_own``, but let each rank keep its own rows."""

    def backward_across_ranks(
        self, node: Node, coefficients: Tensor, tp_group: RankGroup, own: bool, divided: bool
    ) -> tuple[Propagated, bool]:
        if divided:
            return (self.backward_kept if own else self.backward_divided)(node, coefficients, tp_group), True
        return super().backward_across_ranks(node, coefficients, tp_group, own, divided)


class CopyToGroup(Begin):
    """A replicated value enters a region unchanged; backward the ranks' coefficients add up."""

    overloads = ("trivet.copy_to_group.default",)
    adds_up = True

    def interval(self, node: Node, inputs: Sequence[Interval], tp_group: RankGroup) -> Interval:
        if not inputs[0].lower.requires_grad:
            return inputs[0]
        lower, upper = tp_group.enter(torch.stack([inputs[0].lower, inputs[0].upper])).unbind()
        return Interval(lower, upper)

    def backward(self, node: Node, coefficients: Tensor, tp_group: RankGroup) -> Propagated:
        return Propagated((tp_group.sum(coefficients),))

    def backward_own(self, node: Node, coefficients: Tensor, tp_group: RankGroup) -> Propagated:
        return Propagated((tp_group.gather(coefficients, 1),))

    def backward_divided(self, node: Node, coefficients: Tensor, tp_group: RankGroup) -> Propagated:
        return Propagated((tp_group.own_sum(coefficients, 1),))

    def backward_kept(self, node: Node, coefficients: Tensor, tp_group: RankGroup) -> Propagated:
        return Propagated((coefficients,))


class _SumOverRanks(Collective):
    """The sum of the ranks' partial values."""

    always_mixes = True
    adds_up = False

    def widened(self, node: Node, inputs: Sequence[Interval], computed: Interval, tp_group: RankGroup) -> Interval:
        """Widen sums of the ranks' own ends: each may be off by as much as their sizes suggest."""

        def propagate(ends: Sequence[Interval]) -> Interval:
            return self.interval(node, ends, tp_group)

        sizes = propagate([Interval(inputs[0].lower.abs(), inputs[0].upper.abs())])
        factor, lost = gamma(tp_group.axis.size), TINY * tp_group.axis.size
        below, above = sizes.lower * factor + lost, sizes.upper * factor + lost
        return signs_kept(inputs, widened(computed, below, above), propagate)


class ReduceFromGroup(_SumOverRanks):
    """A region ends with the sum of the ranks' partial values, and the sum of their intervals is exact."""

    overloads = ("trivet.reduce_from_group.default",)
    crossing = Crossing.LEAVE

    def interval(self, node: Node, inputs: Sequence[Interval], tp_group: RankGroup) -> Interval:
        lower, upper = tp_group.sum(torch.stack([inputs[0].lower, inputs[0].upper])).unbind()
        return Interval.summed(lower, upper)

    def backward(self, node: Node, coefficients: Tensor, tp_group: RankGroup) -> Propagated:
        return Propagated((tp_group.enter(coefficients),))

    def backward_own(self, node: Node, coefficients: Tensor, tp_group: RankGroup) -> Propagated:
        return Propagated((tp_group.join(coefficients, 1),))

    @backward_rule(IdentityRows)
    def backward_identity(self, node: Node, units: IdentityRows, tp_group: RankGroup) -> Propagated | None:
        return Propagated((units,))


class _SideBySide(Collective):
    """The ranks' values, put side by side by ``join``; backward ``part`` takes this rank's coefficients."""

    join: ClassVar[Callable[[RankGroup, Tensor, int], Tensor]]
    part: ClassVar[Callable[[RankGroup, Tensor, int], Tensor]]

    def interval(self, node: Node, inputs: Sequence[Interval], tp_group: RankGroup) -> Interval:
        ends = torch.stack([inputs[0].lower, inputs[0].upper])
        lower, upper = type(self).join(tp_group, ends, dimension_of(node) + 1).unbind()
        return Interval(lower, upper)

    def backward(self, node: Node, coefficients: Tensor, tp_group: RankGroup) -> Propagated:
        return Propagated((type(self).part(tp_group, coefficients, dimension_of(node) + 1),))

    def backward_own(self, node: Node, coefficients: Tensor, tp_group: RankGroup) -> Propagated:
        """Join all ranks' rows, and keep this rank's slice of them: of its own tensor, so that gradients stay here."""
        whole, dim = tp_group.join(coefficients, 1), dimension_of(node) + 1
        mine = tp_group.own_range(whole.shape[dim])
        return Propagated((whole.narrow(dim, mine.start, mine.stop - mine.start),))


class GatherFromGroup(_SideBySide):
    """A region ends with the ranks' values side by side; each rank keeps the coefficients of its own."""

    overloads = ("trivet.gather_from_group.default",)
    crossing = Crossing.LEAVE
    adds_up = False
    join, part = RankGroup.gather, RankGroup.own


class ScatterToGroup(Begin):
    """Each rank takes its slice of a replicated value into a region."""

    overloads = ("trivet.scatter_to_group.default",)
    adds_up = False

    def interval(self, node: Node, inputs: Sequence[Interval], tp_group: RankGroup) -> Interval:
        return inputs[0].map(lambda end: tp_group.own(end, dimension_of(node)))

    def backward(self, node: Node, coefficients: Tensor, tp_group: RankGroup) -> Propagated:
        return Propagated((tp_group.gather(coefficients, dimension_of(node) + 1),))

    def backward_own(self, node: Node, coefficients: Tensor, tp_group: RankGroup) -> Propagated:
        return Propagated((tp_group.gather(_in_place(node, coefficients, tp_group), 1),))

    def backward_divided(self, node: Node, coefficients: Tensor, tp_group: RankGroup) -> Propagated:
        return Propagated((tp_group.own_sum(_in_place(node, coefficients, tp_group), 1),))

    def backward_kept(self, node: Node, coefficients: Tensor, tp_group: RankGroup) -> Propagated:
        return Propagated((_in_place(node, coefficients, tp_group),))


class GatherWithReduce(_SideBySide):
    """The ranks' values side by side, for work that differs by rank: backward the coefficients' sum, divided again."""

    overloads = ("trivet.gather_with_reduce_from_group.default",)
    crossing = Crossing.WITHIN
    adds_up = True
    join, part = RankGroup.join, RankGroup.own_sum


class ReduceScatter(_SumOverRanks):
    """Each rank's slice of the sum of all ranks' partial values; backward the slices' coefficients side by side."""

    overloads = ("trivet.reduce_scatter_to_group.default",)
    crossing = Crossing.WITHIN

    def interval(self, node: Node, inputs: Sequence[Interval], tp_group: RankGroup) -> Interval:
        ends = torch.stack([inputs[0].lower, inputs[0].upper])
        lower, upper = tp_group.own_sum(ends, dimension_of(node) + 1).unbind()
        return Interval.summed(lower, upper)

    def backward(self, node: Node, coefficients: Tensor, tp_group: RankGroup) -> Propagated:
        return Propagated((tp_group.join(coefficients, dimension_of(node) + 1),))

    def backward_own(self, node: Node, coefficients: Tensor, tp_group: RankGroup) -> Propagated:
        return Propagated((tp_group.join(_in_place(node, coefficients, tp_group), 1),))


def _in_place(node: Node, coefficients: Tensor, tp_group: RankGroup) -> Tensor:
    """Return coefficients of this rank's slice as those of the whole value; the rest are zero."""
    along = dimension_of(node) + 1
    whole = coefficients.new_zeros(*coefficients.shape[:2], *node.input_shapes[0])
    mine = tp_group.own_range(whole.shape[along])
    whole[(slice(None),) * along + (mine,)] = coefficients
    return whole
