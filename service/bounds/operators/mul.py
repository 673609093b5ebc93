"""``mul`` and ``div`` by a constant, and the product of two values that both depend on the input.

Products are relaxed by McCormick's planes (1976): ``x·y ≥ ly·x + lx·y − lx·ly`` and
``x·y ≤ uy·x + lx·y − lx·uy``, since ``(x − lx)·(y − ly) ≥ 0`` and ``(x − lx)·(uy − y) ≥ 0``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from service.bounds.fused import Ends, OntoBoth, propagate_products, weighted
from service.bounds.graph import Node
from service.bounds.interval import Interval
from service.bounds.linear.propagation import Propagated
from service.bounds.linear.rows.block import Block, before_broadcast, in_block, lengths
from service.bounds.operators.allowance import Roundings, planes_step, repeats, signs_kept, widened_by_term
from service.bounds.operators.base import LinearOperator, NonlinearOperator
from service.bounds.operators.broadcasting import operand, unbroadcast
from service.bounds.operators.conversion import Converter, of_two
from service.bounds.operators.elementwise import Elementwise
from service.bounds.rank_group import RankGroup
from service.bounds.relaxation import Family, Relaxed, RigorousStep
from service.bounds.rounding import TINY, widened


class Multiple(Elementwise, LinearOperator):
    """``x·c`` for a constant number or tensor c."""

    overloads = ("aten.mul.Tensor",)
    onnx: ClassVar[Mapping[str, Converter]] = {"Mul": of_two(torch.mul)}

    inverse: ClassVar[bool] = False

    def refusal(self, node: Node) -> str | None:
        if len(node.inputs) > 1:
            return "both of its operands depend on the input"
        if not self.inverse:
            return None
        if node.is_variable("other"):
            return "its divisor depends on the input"
        zero = bool((operand(node, "other", torch.empty(0, dtype=torch.float64)) == 0).any())
        return "its divisor contains zero" if zero else None

    def _factor(self, node: Node, like: Tensor) -> Tensor:
        argument = "other" if node.is_variable("self") else "self"
        constant = operand(node, argument, like)
        return 1 / constant if self.inverse else constant

    def stretch(self, node: Node) -> float:
        if node.input_shapes != (node.shape,):
            return super().stretch(node)
        return float(self._factor(node, torch.empty(0, dtype=torch.float64)).abs().amax())

    def interval(self, node: Node, inputs: Sequence[Interval], tp_group: RankGroup) -> Interval:
        factor = self._factor(node, inputs[0].lower)
        ends = inputs[0].lower * factor, inputs[0].upper * factor
        return Interval(torch.minimum(*ends), torch.maximum(*ends))

    def backward(self, node: Node, coefficients: Tensor, tp_group: RankGroup) -> Propagated:
        scaled = coefficients * self._factor(node, coefficients)
        return Propagated((unbroadcast(scaled, node.input_shapes[0]),))

    def roundings(self, node: Node) -> Roundings:
        return Roundings(repeats(node) + 4)

    def widened(self, node: Node, inputs: Sequence[Interval], computed: Interval, tp_group: RankGroup) -> Interval:
        # A negative factor exchanges the ends.
        sizes = computed.lower.abs(), computed.upper.abs()
        return widened_by_term(node, inputs, computed, lambda ends: self.interval(node, ends, tp_group), sizes)


class Quotient(Multiple):
    """``x/c`` for a constant number or tensor c without zeros."""

    overloads = ("aten.div.Tensor",)
    onnx: ClassVar[Mapping[str, Converter]] = {"Div": of_two(torch.div)}

    inverse = True
    padding = 1.0


class Bilinear(NonlinearOperator):
    """Each operand's bounds matter as long as the other one has any width."""

    always_mixes = True

    def refusal(self, node: Node) -> str | None:
        return None if len(node.inputs) == 2 else "only one of its operands depends on the input"

    def pieces(self, node: Node) -> None:
        """Return None: no split of one operand makes a product straight in both."""

    def unstable_on(self, node: Node, bounds: Sequence[Interval]) -> tuple[Tensor, ...]:
        return tuple(each.upper > each.lower for each in bounds)


@dataclass(frozen=True, eq=False)
class _ProductPlanes(Relaxed):
    left: Interval
    right: Interval

    def backward(self, coefficients: Tensor) -> tuple[tuple[Tensor, ...], Tensor | None]:
        above, below = coefficients.clamp(min=0), coefficients.clamp(max=0)
        x, y = self.left, self.right
        onto_left = above * y.lower.unsqueeze(1) + below * y.upper.unsqueeze(1)
        onto_right = coefficients * x.lower.unsqueeze(1)
        bias = weighted(above, x.lower * y.lower) + weighted(below, x.lower * y.upper)
        return (onto_left, onto_right), -bias


@dataclass(frozen=True, eq=False)
class _MiddlePlanes(_ProductPlanes):
    """The means of both planes of each side, with the slopes that the product has in the middle, where ends are
    finite: what other terms cancel costs nothing then.
    """

    def backward(self, coefficients: Tensor) -> tuple[tuple[Tensor, ...], Tensor | None]:
        above, below = coefficients.clamp(min=0), coefficients.clamp(max=0)
        x, y = self.left, self.right
        finite = x.width.isfinite() & y.width.isfinite()
        middle = torch.where(finite, y.centre, y.lower), torch.where(finite, y.centre, y.upper)
        onto_left = above * middle[0].unsqueeze(1) + below * middle[1].unsqueeze(1)
        onto_right = coefficients * torch.where(finite, x.centre, x.lower).unsqueeze(1)
        corners = x.lower * y.lower, x.lower * y.upper
        others = x.upper * y.upper, x.upper * y.lower
        means = [torch.where(finite, (one + other) / 2, one) for one, other in zip(corners, others, strict=True)]
        return (onto_left, onto_right), -(weighted(above, means[0]) + weighted(below, means[1]))


class Product(Elementwise, Bilinear):
    """``x·y`` entrywise, with broadcasting."""

    overloads: ClassVar[tuple[str, ...]] = ("trivet.product",)

    def interval(self, node: Node, inputs: Sequence[Interval], tp_group: RankGroup) -> Interval:
        x, y = inputs
        ends = torch.stack([x.lower * y.lower, x.lower * y.upper, x.upper * y.lower, x.upper * y.upper])
        return Interval(ends.amin(dim=0), ends.amax(dim=0))

    def relax_on(self, node: Node, bounds: Sequence[Interval]) -> Relaxed:
        return _Broadcast(_ProductPlanes(*_stretched(node, bounds)), node.input_shapes)

    def relax_on_small(self, node: Node, bounds: Sequence[Interval]) -> Relaxed:
        return _Broadcast(_MiddlePlanes(*_stretched(node, bounds)), node.input_shapes)

    def family(self, node: Node, bounds: Sequence[Interval]) -> Family:
        left, right = _stretched(node, bounds)
        start = torch.zeros_like(left.lower)
        return BlendedProducts(propagate_products, left, right, node.input_shapes, (start,))

    def rigorous_interval(self, node: Node, inputs: Sequence[Interval], tp_group: RankGroup) -> Interval:
        found = widened(self.interval(node, inputs, tp_group), 4 * TINY, 4 * TINY)
        return signs_kept(inputs, found, lambda ends: self.interval(node, ends, tp_group)).without_nan()

    def rigorous_step(self, node: Node, inputs: Sequence[Interval], chosen: Relaxed, rows: int = 1) -> RigorousStep:
        return planes_step(node, inputs, lambda ends: self.interval(node, ends, RankGroup()), chosen, 1)


@dataclass(frozen=True, eq=False)
class BlendedProducts:
    """Each side of a product has two planes, and all planes between them are sound: 0 is the plane of
    :class:`_ProductPlanes`. One parameter suffices for an entry of a row, since a row's coefficient has one sign.

    ``propagate`` leads coefficients to the factors, given a place between the planes for each product.
    """

    propagate: Callable[[Tensor, Tensor, Ends, Ends], OntoBoth]
    left: Interval
    right: Interval
    shapes: tuple[tuple[int, ...], ...]
    start: tuple[Tensor, ...]

    def member(self, parameters: tuple[Tensor, ...]) -> _BlendedPlanes:
        return _BlendedPlanes(self, parameters[0])


@dataclass(frozen=True, eq=False)
class _BlendedPlanes(Relaxed):
    family: BlendedProducts
    places: Tensor

    def backward(self, coefficients: Tensor) -> tuple[tuple[Tensor, ...], Tensor | None]:
        left, right = ((each.lower, each.upper) for each in (self.family.left, self.family.right))
        *onto, bias = self.family.propagate(coefficients, self.places, left, right)
        return tuple(unbroadcast(each, shape) for each, shape in zip(onto, self.family.shapes, strict=True)), bias


@dataclass(frozen=True, eq=False)
class _Broadcast(Relaxed):
    planes: _ProductPlanes
    shapes: tuple[tuple[int, ...], ...]

    def backward(self, coefficients: Tensor) -> tuple[tuple[Tensor, ...], Tensor | None]:
        propagated, bias = self.planes.backward(coefficients)
        return tuple(unbroadcast(each, shape) for each, shape in zip(propagated, self.shapes, strict=True)), bias

    def within(self, block: Block) -> tuple[Relaxed, tuple[Block, ...]]:
        left, right = (each.map(lambda end: in_block(end, block)) for each in (self.planes.left, self.planes.right))
        before = tuple(before_broadcast(block, shape) for shape in self.shapes)
        return _Broadcast(type(self.planes)(left, right), tuple(lengths(each) for each in before)), before


def _stretched(node: Node, bounds: Sequence[Interval]) -> list[Interval]:
    return [each.map(lambda end: _stretch(end, node.shape)) for each in bounds]


def _stretch(end: Tensor, shape: tuple[int, ...]) -> Tensor:
    batch, *own = end.shape
    return end.reshape(batch, *(1,) * (len(shape) - len(own)), *own).expand(batch, *shape)
