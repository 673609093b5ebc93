"""The interface of operators: intervals go forward through them, and linear bounds backward.

An operator is either linear in the values that depend on the input, and then exact, or non-linear, and then has a
relaxation. Operators hold no state; collectives go through the :class:`RankGroup` they are given.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from enum import Enum
from math import inf, prod
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from service.bounds.graph import Graph, Node
from service.bounds.interval import Interval
from service.bounds.linear.propagation import BackwardRules, Coefficients, Propagated, backward_rule
from service.bounds.linear.rows.block import Block, BlockRows
from service.bounds.linear.rows.patches import Pair, image_of
from service.bounds.operators.allowance import Roundings, backward_error
from service.bounds.operators.broadcasting import dimension_of, unbroadcast
from service.bounds.operators.conversion import Converter
from service.bounds.operators.pieces import TwoPieces
from service.bounds.operators.sharding import Cut, Layer, Share, Whole
from service.bounds.operators.stretches import LARGE, stretch_of_matrix
from service.bounds.rank_group import RankGroup
from service.bounds.relaxation import Family, Relaxed, RigorousStep, Single


class Crossing(Enum):
    """The way in which an operator changes the distribution of a value over a tensor-parallel group."""

    ENTER = "enter"  # replicated in, each rank its own values out
    LEAVE = "leave"  # each rank its own values in, replicated out
    WITHIN = "within"  # each rank its own values in and out


class Operator(ABC):
    """One operator. ``crossing`` is set for collectives only.

    ``overloads`` are the full names of the ATen operators, or of our own, that it stands for. ``onnx`` has a
    converter for each ONNX operator that it implements. ``composite``: torch would decompose it
    when a model is traced, but it is bounded as a whole. ``keeps_order``: the output has the input's entries, in the
    same order. ``always_mixes``: :meth:`mixes` holds for every node. ``makes_nan``: :meth:`interval` may have ends that
    are NaN although the inputs have none.
    """

    overloads: ClassVar[tuple[str, ...]]
    onnx: ClassVar[Mapping[str, Converter]] = MappingProxyType({})
    composite: ClassVar[bool] = False
    crossing: Crossing | None = None
    keeps_order: ClassVar[bool] = False
    always_mixes: ClassVar[bool] = False
    makes_nan: ClassVar[bool] = True

    def refusal(self, node: Node) -> str | None:
        """Return why this node cannot be bounded although its operator has a rule; ``None`` if it can."""
        return None

    def mixes(self, node: Node) -> bool:
        """Return whether an entry of the output depends on more than one entry of the inputs."""
        return self.always_mixes

    def stretch(self, node: Node) -> float:
        """Return a Lipschitz constant: the distance of two outputs is at most this times that of their inputs, all of
        them as one vector, both Euclidean. Infinite where none is known.
        """
        return inf

    @abstractmethod
    def shard(self, node: Node, cuts: Mapping[str, Cut], ranks: int) -> Cut | Whole:
        """Return the cut of the output from those of the inputs, by name; :class:`Whole` if ranks would communicate."""

    def local_arguments(self, node: Node, cut: Cut, share: Share) -> dict[str, Any]:
        """Return one rank's arguments when the output is divided by ``cut``."""
        return dict(node.arguments)

    def layer(self, node: Node) -> Layer | None:
        """Return the node as a layer that may become column- or row-parallel; ``None`` for any other node."""
        return None

    def patch_before(self, node: Node, index: int, patch: Pair) -> Pair | None:
        """Return an input's height and width of a row in such a patch at the output; ``None`` for a whole row."""
        by_entry = not self.mixes(node) or len(node.inputs) > 1
        return patch if by_entry and image_of(node.input_shapes[index]) == image_of(node.shape) else None

    @abstractmethod
    def interval(self, node: Node, inputs: Sequence[Interval], tp_group: RankGroup) -> Interval:
        """Return bounds of the output; ``inputs`` in the order of ``node.inputs``."""

    @abstractmethod
    def rigorous_interval(self, node: Node, inputs: Sequence[Interval], tp_group: RankGroup) -> Interval:
        """Return bounds of the output in real arithmetic: the interval, with an allowance for float64's rounding."""


class LinearOperator(BackwardRules, Operator):
    """An operator that is affine in its variable inputs.

    ``is_fresh``: :meth:`backward` returns one tensor that nothing else holds, so that more may be added to it.
    """

    is_fresh: ClassVar[bool] = False

    def stretch(self, node: Node) -> float:
        """Return the largest singular value of the node's matrix, if that is small."""
        entries = node.size * sum(map(prod, node.input_shapes))
        return self._norm(node) if 0 < entries <= LARGE else inf

    @torch.no_grad()
    def _norm(self, node: Node) -> float:
        (exact,) = Graph((node,)).to(torch.device("cpu"), torch.float64).nodes
        rows = torch.eye(node.size, dtype=torch.float64).reshape(1, node.size, *node.shape)
        parts = [each for each in self.backward(exact, rows, RankGroup()).coefficients if isinstance(each, Tensor)]
        return stretch_of_matrix(torch.cat([each.reshape(node.size, -1) for each in parts], dim=1))

    @abstractmethod
    def backward(self, node: Node, coefficients: Tensor, tp_group: RankGroup) -> Propagated:
        """Return ``coefficients`` ``(batch or 1, rows, *node.shape)`` as coefficients on the inputs and a bias."""

    @abstractmethod
    def roundings(self, node: Node) -> Roundings:
        """Return how often :meth:`backward` rounds on the way to a coefficient and to the bias."""

    def widened(self, node: Node, inputs: Sequence[Interval], computed: Interval, tp_group: RankGroup) -> Interval:
        """Return the computed :meth:`interval` so that it holds in real arithmetic; unchanged if nothing is rounded."""
        return computed

    def rigorous_interval(self, node: Node, inputs: Sequence[Interval], tp_group: RankGroup) -> Interval:
        return self.widened(node, inputs, self.interval(node, inputs, tp_group), tp_group).without_nan()

    def error(self, node: Node, inputs: Sequence[Interval], tp_group: RankGroup) -> tuple[Tensor, Tensor]:
        """Return the rounding error of :meth:`backward`, see
        :func:`~service.bounds.operators.allowance.backward_error`.
        """
        roundings = self.roundings(node)
        coefficient = roundings.on_an_input(tp_group.axis.size)
        return backward_error(
            node, inputs, lambda sizes: self.interval(node, sizes, tp_group), coefficient, roundings.bias
        )

    def rigorous_step(self, node: Node, inputs: Sequence[Interval], tp_group: RankGroup) -> RigorousStep:
        """Return the allowance for :meth:`backward` on these bounds."""
        error, lost = self.error(node, inputs, tp_group)
        return RigorousStep(error.unsqueeze(1), lost)

    def propagate_backward(self, node: Node, rows: Coefficients, tp_group: RankGroup) -> Propagated | None:
        """Return the step of rows in any representation; ``None`` if they must be made dense first."""
        if isinstance(rows, Tensor):
            return self.backward(node, rows, tp_group)
        rule = self.backward_rules.get(type(rows))
        return None if rule is None else rule(self, node, rows, tp_group)

    def within(self, node: Node, block: Block) -> tuple[Node, tuple[Block, ...]] | None:
        """Return the part of a node that computes a block of its value, and the blocks of its inputs that the part
        reads; ``None`` if it is no node of this operator.
        """
        return None

    @backward_rule(BlockRows)
    def backward_block(self, node: Node, rows: BlockRows, tp_group: RankGroup) -> Propagated | None:
        part = self.within(node, rows.block)
        if part is None:
            return None
        step = self.backward(part[0], rows.values, tp_group)
        found = [
            BlockRows(values, block)
            for values, block in zip(step.coefficients, part[1], strict=True)
            if isinstance(values, Tensor)
        ]
        return Propagated(tuple(found), step.bias)

    def backward_in_ascent(self, node: Node, coefficients: Tensor, tp_group: RankGroup) -> Propagated:
        """Return :meth:`backward` with a gradient that may be rounded: it only decides where to look for better
        relaxations.
        """
        return self.backward(node, coefficients, tp_group)


class ExactOperator(LinearOperator):
    """An operator whose :meth:`backward` rounds nothing: it moves coefficients, or changes their signs."""

    def roundings(self, node: Node) -> Roundings:
        return Roundings()


class AccumulatingOperator(LinearOperator):
    """An operator that returns new coefficients, to which others may be added in place."""

    is_fresh = True

    @abstractmethod
    def backward_onto(self, node: Node, coefficients: Tensor, total: Tensor) -> Tensor | None:
        """Add the result of :meth:`backward` to ``total``, contiguous, in place; return the bias."""


class Collective(LinearOperator):
    """An operator over a tensor-parallel group. ``adds_up``: :meth:`backward` adds up the ranks' coefficients."""

    adds_up: ClassVar[bool]

    def refusal(self, node: Node) -> str | None:
        return "it divides the batch over the group" if "dim" in node.arguments and dimension_of(node) == 0 else None

    def roundings(self, node: Node) -> Roundings:
        return Roundings(over_ranks=self.adds_up)

    def shard(self, node: Node, cuts: Mapping[str, Cut], ranks: int) -> Whole:
        return Whole("it is itself where values are divided or put together")

    @abstractmethod
    def backward_own(self, node: Node, coefficients: Tensor, tp_group: RankGroup) -> Propagated:
        """Propagate like ``backward`` rows that each rank has of its own; all ranks get all rows, in rank order."""

    def backward_across_ranks(
        self, node: Node, coefficients: Tensor, tp_group: RankGroup, own: bool, divided: bool
    ) -> tuple[Propagated, bool]:
        """Return :meth:`backward` of rows that are this rank's ``own`` or common, and whether they are its own before
        the node.

        In a ``divided`` traversal each rank continues with a share of the common rows outside regions.
        """
        return (self.backward_own if own else self.backward)(node, coefficients, tp_group), False


class NonlinearOperator(Operator):
    """An operator that is not affine: it needs bounds on its inputs, in the order of ``node.inputs``.

    ``deciding`` are the positions of inputs whose bounds choose the relaxation, and on which it has no coefficients.
    """

    deciding: ClassVar[frozenset[int]] = frozenset()

    @abstractmethod
    def relax_on(self, node: Node, bounds: Sequence[Interval]) -> Relaxed:
        """Return linear bounds that hold on the product of ``bounds``; an interval of width 0 is a point."""

    def relax_on_small(self, node: Node, bounds: Sequence[Interval]) -> Relaxed:
        """Return linear bounds for one of many small boxes, in which terms of a sum nearly cancel each other."""
        return self.relax_on(node, bounds)

    def family(self, node: Node, bounds: Sequence[Interval]) -> Family:
        """Return the relaxations that an optimiser may choose from; by default only the one of :meth:`relax_on`."""
        return Single(self.relax_on(node, bounds))

    @abstractmethod
    def rigorous_step(self, node: Node, inputs: Sequence[Interval], chosen: Relaxed, rows: int = 1) -> RigorousStep:
        """Return a step through ``chosen``, a relaxation on ``inputs``, moved outwards as far as real arithmetic
        requires.

        ``rows`` is 1 for the same relaxation in every row.
        """

    @abstractmethod
    def pieces(self, node: Node) -> TwoPieces | None:
        """Return the function's two straight pieces, one of which remains after a split where they meet;
        ``None`` for any other function.
        """

    def breakpoint(self, node: Node, position: int) -> float | None:
        """Return the point at which a split of the input ``position`` leaves nothing to relax, if it exists."""
        pieces = self.pieces(node)
        return pieces.breakpoint if pieces is not None and position == 0 else None

    def piece(self, node: Node, inputs: Sequence[Tensor], above: Tensor) -> Tensor:
        """Return the function of ``inputs`` on one side of :meth:`breakpoint` of the first, ``above`` it or not; for an
        operator that has one.
        """
        pieces = self.pieces(node)
        assert pieces is not None
        return inputs[0] * torch.where(above, 1.0, pieces.slope).to(inputs[0])

    def centred(self, coefficients: Tensor, bounds: Sequence[Interval]) -> Tensor:
        """Return the coefficients ``(batch, rows, *shape)``, less a common term if that loses nothing."""
        return coefficients

    def patch_before(self, node: Node, index: int, patch: Pair) -> Pair | None:
        return patch if image_of(node.input_shapes[index]) == image_of(node.shape) else None

    def needed_of(self, node: Node, needed: Tensor) -> list[Tensor]:
        """Return the entries of each input, bool, that those ``needed`` ``(*node.shape)`` of the output depend on."""
        counted = needed.to(torch.float32)[None, None]
        return [unbroadcast(counted, shape)[0, 0] > 0 for shape in node.input_shapes]

    @abstractmethod
    def unstable_on(self, node: Node, bounds: Sequence[Interval]) -> tuple[Tensor, ...]:
        """Return each input's entries, bool ``(batch, *shape)``, whose tighter bounds would tighten the relaxation."""
