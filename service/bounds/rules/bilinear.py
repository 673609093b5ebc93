"""Products of two values that both depend on the input: entrywise, and of matrices.

Relaxed by McCormick's planes (1976): ``x·y ≥ ly·x + lx·y − lx·ly`` and ``x·y ≤ uy·x + lx·y − lx·uy``, since
``(x − lx)·(y − ly) ≥ 0`` and ``(x − lx)·(uy − y) ≥ 0``. A sum of products takes the sum of the planes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from service.bounds.exchange import Exchange
from service.bounds.fused import pull_matrices, pull_products, weighted
from service.bounds.graph import Node
from service.bounds.interval import Interval
from service.bounds.relaxation import Family
from service.bounds.rules.arithmetic import unbroadcast
from service.bounds.rules.base import RelaxedRule


class _Bilinear(RelaxedRule):
    """Each operand's bounds matter as long as the other one has any width."""

    def refusal(self, node: Node) -> str | None:
        return None if len(node.inputs) == 2 else "only one of its operands depends on the input"

    def mixes(self, node: Node) -> bool:
        return True

    def improvable_on(self, node: Node, bounds: Sequence[Interval]) -> tuple[Tensor, ...]:
        return tuple(each.upper > each.lower for each in bounds)


@dataclass(frozen=True, eq=False)
class _ProductPlanes:
    left: Interval
    right: Interval

    def pull(self, coefficients: Tensor) -> tuple[tuple[Tensor, ...], Tensor | None]:
        above, below = coefficients.clamp(min=0), coefficients.clamp(max=0)
        x, y = self.left, self.right
        onto_left = above * y.lower.unsqueeze(1) + below * y.upper.unsqueeze(1)
        onto_right = coefficients * x.lower.unsqueeze(1)
        bias = weighted(above, x.lower * y.lower) + weighted(below, x.lower * y.upper)
        return (onto_left, onto_right), -bias


class Product(_Bilinear):
    """``x·y`` entrywise, with broadcasting."""

    elementwise = True

    def interval(self, node: Node, inputs: Sequence[Interval], exchange: Exchange) -> Interval:
        x, y = inputs
        ends = torch.stack([x.lower * y.lower, x.lower * y.upper, x.upper * y.lower, x.upper * y.upper])
        return Interval(ends.amin(dim=0), ends.amax(dim=0))

    def relax_on(self, node: Node, bounds: Sequence[Interval]) -> _Broadcast:
        whole = [each.map(lambda end: _stretched(end, node.shape)) for each in bounds]
        return _Broadcast(_ProductPlanes(*whole), node.input_shapes)

    def family(self, node: Node, bounds: Sequence[Interval]) -> Family:
        left, right = (each.map(lambda end: _stretched(end, node.shape)) for each in bounds)
        start = torch.zeros_like(left.lower)
        return _BlendedProduct(left, right, node.input_shapes, (start,))


@dataclass(frozen=True, eq=False)
class _BlendedProduct:
    """Each side has two planes, and all between them are sound: 0 is the plane of :class:`_ProductPlanes`.

    One parameter does for an entry of a row, since a row's coefficient has one sign.
    """

    left: Interval
    right: Interval
    shapes: tuple[tuple[int, ...], ...]
    start: tuple[Tensor, ...]

    def member(self, parameters: tuple[Tensor, ...]) -> _BlendedPlanes:
        return _BlendedPlanes(self, parameters[0])


@dataclass(frozen=True, eq=False)
class _BlendedPlanes:
    family: _BlendedProduct
    places: Tensor

    def pull(self, coefficients: Tensor) -> tuple[tuple[Tensor, ...], Tensor | None]:
        ends = [(each.lower, each.upper) for each in (self.family.left, self.family.right)]
        *onto, bias = pull_products(coefficients, self.places, *ends)
        return tuple(unbroadcast(each, shape) for each, shape in zip(onto, self.family.shapes, strict=True)), bias


@dataclass(frozen=True, eq=False)
class _Broadcast:
    planes: _ProductPlanes
    shapes: tuple[tuple[int, ...], ...]

    def pull(self, coefficients: Tensor) -> tuple[tuple[Tensor, ...], Tensor | None]:
        pulled, bias = self.planes.pull(coefficients)
        return tuple(unbroadcast(each, shape) for each, shape in zip(pulled, self.shapes, strict=True)), bias


def _stretched(end: Tensor, shape: tuple[int, ...]) -> Tensor:
    batch, *own = end.shape
    return end.reshape(batch, *(1,) * (len(shape) - len(own)), *own).expand(batch, *shape)


@dataclass(frozen=True, eq=False)
class _MatrixPlanes:
    left: Interval
    right: Interval
    shapes: tuple[tuple[int, ...], ...]

    def pull(self, coefficients: Tensor) -> tuple[tuple[Tensor, ...], Tensor | None]:
        above, below = coefficients.clamp(min=0), coefficients.clamp(max=0)
        x, y = self.left, self.right
        onto_left = above @ y.lower.mT.unsqueeze(1) + below @ y.upper.mT.unsqueeze(1)
        onto_right = x.lower.mT.unsqueeze(1) @ coefficients
        bias = weighted(above, x.lower @ y.lower) + weighted(below, x.lower @ y.upper)
        first, second = self.shapes
        return (unbroadcast(onto_left, first), unbroadcast(onto_right, second)), -bias


class MatrixOfTwo(_Bilinear):
    """``X·Y`` over the last two dimensions of each; both have as many dimensions."""

    def refusal(self, node: Node) -> str | None:
        ranks = [len(shape) for shape in node.input_shapes]
        if len(set(ranks)) != 1 or ranks[0] < 2:
            return f"its operands have {ranks} dimensions for each instance; equally many, at least 2, are supported"
        return super().refusal(node)

    def interval(self, node: Node, inputs: Sequence[Interval], exchange: Exchange) -> Interval:
        """``|x·y − cx·cy| ≤ |cx|·ry + rx·|cy| + rx·ry``, summed."""
        x, y = inputs
        magnitude = y.centre.abs() + y.spread
        return Interval.around(x.centre @ y.centre, x.centre.abs() @ y.spread + x.spread @ magnitude)

    def relax_on(self, node: Node, bounds: Sequence[Interval]) -> _MatrixPlanes:
        return _MatrixPlanes(bounds[0], bounds[1], node.input_shapes)

    def family(self, node: Node, bounds: Sequence[Interval]) -> Family:
        """A blend for every product of an entry's sum where they are not too many, else one for the whole sum."""
        x, y = bounds
        products = node.size * node.input_shapes[0][-1]
        if products <= MOST_PRODUCTS:
            return _BlendedTerms.of(node, x, y)
        start = x.lower.new_zeros(len(x.lower), *node.shape)
        return _BlendedMatrices(x, y, node.input_shapes, (start, start))


MOST_PRODUCTS = 2**13
"""Of one instance: every row has parameters for each of them."""


@dataclass(frozen=True, eq=False)
class _BlendedTerms:
    """``X·Y`` as a sum of products ``(…, i, k, j)``, each with a blend of its own."""

    left: Interval
    right: Interval
    start: tuple[Tensor, ...]

    @classmethod
    def of(cls, node: Node, x: Interval, y: Interval) -> _BlendedTerms:
        inner = node.input_shapes[0][-1]
        return cls(x, y, (x.lower.new_zeros(len(x.lower), *node.shape[:-1], inner, node.shape[-1]),))

    def member(self, parameters: tuple[Tensor, ...]) -> _SummedTerms:
        return _SummedTerms(self, parameters[0])


@dataclass(frozen=True, eq=False)
class _SummedTerms:
    family: _BlendedTerms
    places: Tensor

    def pull(self, coefficients: Tensor) -> tuple[tuple[Tensor, ...], Tensor | None]:
        ends = [(each.lower, each.upper) for each in (self.family.left, self.family.right)]
        *onto, bias = pull_matrices(coefficients, self.places, *ends)
        return tuple(onto), bias


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
class _BlendedSums:
    family: _BlendedMatrices
    parameters: tuple[Tensor, ...]

    def pull(self, coefficients: Tensor) -> tuple[tuple[Tensor, ...], Tensor | None]:
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
