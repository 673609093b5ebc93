"""Matrix products: with a constant on either side, and of two values that both depend on the input.

The product of two values is relaxed as a sum of products, which takes the sum of McCormick's planes of
:mod:`service.bounds.operators.mul`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from service.bounds.fused import propagate_matrices, weighted
from service.bounds.graph import Node
from service.bounds.interval import Interval
from service.bounds.linear.propagation import Propagated
from service.bounds.linear.rows.block import Block, Span, before_broadcast, in_block, lengths
from service.bounds.operators.allowance import Roundings, largest, planes_step, repeats, widened_by_magnitude
from service.bounds.operators.base import LinearOperator
from service.bounds.operators.broadcasting import unbroadcast
from service.bounds.operators.linear import Affine, AffineOperator, constant_only
from service.bounds.operators.mul import Bilinear, BlendedProducts
from service.bounds.operators.sharding import Cut, Whole
from service.bounds.rank_group import RankGroup
from service.bounds.relaxation import Family, Relaxed, RigorousStep
from service.bounds.rounding import TINY, gamma, magnitude, widened


class MatrixProduct(AffineOperator):
    """``x·M`` with a constant matrix M, or one for each of the leading dimensions, in argument ``matrix``."""

    overloads = ("aten.matmul.default",)
    composite = True

    matrix: ClassVar[str] = "other"

    def refusal(self, node: Node) -> str | None:
        reason = constant_only(node, self.matrix)
        if reason is None and node.constant(self.matrix).ndim < 2:
            return f"its {self.matrix} has {node.constant(self.matrix).ndim} dimensions; 2 or more are supported"
        return reason

    def read(self, node: Node) -> Affine:
        return Affine(node.constant(self.matrix).mT, None)


class TwoDimensionalProduct(MatrixProduct):
    """``aten.mm(self, mat2)``."""

    overloads = ("aten.mm.default",)

    composite = False
    matrix = "mat2"


class MatrixFromLeft(LinearOperator):
    """``M·X`` with a constant matrix M, or one for each of the leading dimensions."""

    overloads = ("trivet.matrix_from_left",)
    always_mixes = True
    makes_nan = False

    def refusal(self, node: Node) -> str | None:
        if node.constant("self").ndim < 2 or len(node.input_shapes[0]) < 2:
            return "a product with a vector; two matrices are supported"
        return None

    def interval(self, node: Node, inputs: Sequence[Interval], tp_group: RankGroup) -> Interval:
        matrix, (centre, spread) = node.constant("self"), inputs[0].centred
        return Interval.around(matrix @ centre, matrix.abs() @ spread)

    def backward(self, node: Node, coefficients: Tensor, tp_group: RankGroup) -> Propagated:
        return Propagated((unbroadcast(node.constant("self").mT @ coefficients, node.input_shapes[0]),))

    def roundings(self, node: Node) -> Roundings:
        return Roundings(max(node.constant("self").shape[-2:]) + repeats(node) + 8)

    def widened(self, node: Node, inputs: Sequence[Interval], computed: Interval, tp_group: RankGroup) -> Interval:
        return widened_by_magnitude(node, computed, *self.error(node, inputs, tp_group))

    def shard(self, node: Node, cuts: Mapping[str, Cut], ranks: int) -> Whole:
        return Whole("it adds up over rows, and columns would have to be divided")


@dataclass(frozen=True, eq=False)
class _MatrixPlanes(Relaxed):
    left: Interval
    right: Interval
    shapes: tuple[tuple[int, ...], ...]

    def backward(self, coefficients: Tensor) -> tuple[tuple[Tensor, ...], Tensor | None]:
        above, below = coefficients.clamp(min=0), coefficients.clamp(max=0)
        x, y = self.left, self.right
        onto_left = _by_matrix(above, y.lower.mT) + _by_matrix(below, y.upper.mT)
        onto_right = _by_matrix(coefficients.mT, x.lower).mT
        bias = weighted(above, x.lower @ y.lower) + weighted(below, x.lower @ y.upper)
        first, second = self.shapes
        return (unbroadcast(onto_left, first), unbroadcast(onto_right, second)), -bias

    def within(self, block: Block) -> tuple[Relaxed, tuple[Block, ...]]:
        *leading, rows, columns = block
        spans = self._spans[slice(*rows)]
        inner = min(span[0] for span in spans), max(span[1] for span in spans)
        blocks = (*leading, rows, inner), (*leading, inner, columns)
        before = tuple(before_broadcast(each, shape) for each, shape in zip(blocks, self.shapes, strict=True))
        left, right = (
            Interval(in_block(interval.lower, each), in_block(interval.upper, each))
            for interval, each in zip((self.left, self.right), blocks, strict=True)
        )
        return _MatrixPlanes(left, right, tuple(lengths(each) for each in before)), before

    @cached_property
    def _spans(self) -> list[Span]:
        """Return, for each row of the left matrix, the entries that are not 0 for certain: the product depends on no
        others, such as the shares that a mask takes out of a softmax.
        """
        length = self.left.lower.shape[-1]
        may_be = ((self.left.lower != 0) | (self.left.upper != 0)).flatten(0, -3).any(dim=0)
        numbers = torch.arange(length, device=may_be.device)
        first = torch.where(may_be, numbers, length - 1).amin(dim=1)
        last = torch.where(may_be, numbers, 0).amax(dim=1)
        found = torch.stack([first, torch.maximum(first, last) + 1], dim=1).tolist()
        return [(start, stop) for start, stop in found]


def _by_matrix(coefficients: Tensor, matrix: Tensor) -> Tensor:
    """Return the products of coefficients ``(b, rows, …, i, j)`` and matrices ``(batch, …, j, k)``.

    All rows are in one product: for each by itself, torch makes small products, and copies of the matrix.
    """
    rows, height = coefficients.shape[1], coefficients.shape[-2]
    found = coefficients.movedim(1, -3).flatten(-3, -2) @ matrix
    return found.reshape(*found.shape[:-2], rows, height, found.shape[-1]).movedim(-3, 1)


class MatrixOfTwo(Bilinear):
    """``X·Y`` over the last two dimensions of each; both have as many dimensions."""

    overloads = ("trivet.matrix_product",)

    def refusal(self, node: Node) -> str | None:
        ranks = [len(shape) for shape in node.input_shapes]
        if len(set(ranks)) != 1 or ranks[0] < 2:
            return f"its operands have {ranks} dimensions for each instance; equally many, at least 2, are supported"
        return super().refusal(node)

    def interval(self, node: Node, inputs: Sequence[Interval], tp_group: RankGroup) -> Interval:
        """``|x·y − cx·cy| ≤ |cx|·ry + rx·|cy| + rx·ry``, summed."""
        x, y = inputs
        magnitude = y.centre.abs() + y.spread
        return Interval.around(x.centre @ y.centre, x.centre.abs() @ y.spread + x.spread @ magnitude)

    def relax_on(self, node: Node, bounds: Sequence[Interval]) -> _MatrixPlanes:
        return _MatrixPlanes(bounds[0], bounds[1], node.input_shapes)

    def family(self, node: Node, bounds: Sequence[Interval]) -> Family:
        """Return a blend for every product of an entry's sum if they are not too many, else one for the whole sum."""
        x, y = bounds
        products = node.size * node.input_shapes[0][-1]
        if products <= MOST_PRODUCTS:
            terms = (*node.shape[:-1], node.input_shapes[0][-1], node.shape[-1])
            start = x.lower.new_zeros(len(x.lower), *terms)
            return BlendedProducts(propagate_matrices, x, y, node.input_shapes, (start,))
        start = x.lower.new_zeros(len(x.lower), *node.shape)
        return _BlendedMatrices(x, y, node.input_shapes, (start, start))

    def rigorous_interval(self, node: Node, inputs: Sequence[Interval], tp_group: RankGroup) -> Interval:
        sizes = largest(lambda ends: self.interval(node, ends, tp_group), [magnitude(each) for each in inputs])
        error = gamma(node.input_shapes[0][-1] + 12) * sizes + node.size * 4 * TINY
        return widened(self.interval(node, inputs, tp_group), error, error).without_nan()

    def rigorous_step(self, node: Node, inputs: Sequence[Interval], chosen: Relaxed, rows: int = 1) -> RigorousStep:
        longest = sum(node.shape[-2:]) + node.input_shapes[0][-1]
        return planes_step(node, inputs, lambda ends: self.interval(node, ends, RankGroup()), chosen, longest)

    def needed_of(self, node: Node, needed: Tensor) -> list[Tensor]:
        counted, ones = (
            needed.to(torch.float32),
            [needed.new_ones(shape, dtype=torch.float32) for shape in node.input_shapes],
        )
        onto = counted @ ones[1].mT, ones[0].mT @ counted
        return [
            unbroadcast(each[None, None], shape)[0, 0] > 0 for each, shape in zip(onto, node.input_shapes, strict=True)
        ]

    def shard(self, node: Node, cuts: Mapping[str, Cut], ranks: int) -> Whole:
        return Whole("it adds up over what is divided")


MOST_PRODUCTS = 2**13
"""Products of one instance: every row has parameters for each of them."""


@dataclass(frozen=True, eq=False)
class _BlendedMatrices:
    """A blend of the two planes of every product in an entry's sum, the same for the whole sum."""

    left: Interval
    right: Interval
    shapes: tuple[tuple[int, ...], ...]
    start: tuple[Tensor, ...]

    def member(self, parameters: tuple[Tensor, ...]) -> _BlendedSums:
        return _BlendedSums(self, parameters)


@dataclass(frozen=True, eq=False)
class _BlendedSums(Relaxed):
    family: _BlendedMatrices
    parameters: tuple[Tensor, ...]

    def backward(self, coefficients: Tensor) -> tuple[tuple[Tensor, ...], Tensor | None]:
        x, y = self.family.left, self.family.right
        above, below = coefficients.clamp(min=0), coefficients.clamp(max=0)
        upward, downward = above * self.parameters[0], below * self.parameters[1]
        # Plane 0 on the left operand is y's lower end for the lower side, its upper end for the upper side.
        lows, highs = above - upward + downward, below - downward + upward
        onto_left = lows @ y.lower.mT.unsqueeze(1) + highs @ y.upper.mT.unsqueeze(1)
        moved = upward + downward
        onto_right = x.lower.mT.unsqueeze(1) @ (coefficients - moved) + x.upper.mT.unsqueeze(1) @ moved
        bias = (
            weighted(above - upward, x.lower @ y.lower)
            + weighted(upward, x.upper @ y.upper)
            + weighted(below - downward, x.lower @ y.upper)
            + weighted(downward, x.upper @ y.lower)
        )
        first, second = self.family.shapes
        return (unbroadcast(onto_left, first), unbroadcast(onto_right, second)), -bias
