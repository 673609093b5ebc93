"""ReLU and leaky ReLU; the slopes of their relaxations are chosen in :mod:`service.bounds.operators.pieces`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from service.bounds.graph import Node
from service.bounds.interval import Interval
from service.bounds.operators.conversion import Call, Converter, Shape, Values, entrywise
from service.bounds.operators.elementwise import Activation
from service.bounds.operators.pieces import TwoPieces
from service.bounds.rank_group import RankGroup
from service.bounds.relaxation import Family, Relaxation


class PiecewiseActivation(Activation):
    """An activation of two straight pieces that meet at 0."""

    makes_nan = False

    @abstractmethod
    def pieces(self, node: Node) -> TwoPieces:
        """Return the function of a node."""

    def stretch(self, node: Node) -> float:
        return max(1.0, abs(self.pieces(node).slope))

    def interval(self, node: Node, inputs: Sequence[Interval], tp_group: RankGroup) -> Interval:
        slope = self.pieces(node).slope
        return inputs[0].map(lambda end: end.clamp(min=0) + slope * end.clamp(max=0) if slope else end.clamp(min=0))

    def rigorous_interval(self, node: Node, inputs: Sequence[Interval], tp_group: RankGroup) -> Interval:
        return self.pieces(node).curve.range(inputs[0])

    def rigorous_lines(self, node: Node, bounds: Interval, lower_slope: Tensor, upper_slope: Tensor) -> Relaxation:
        return self.pieces(node).curve.lines(bounds, lower_slope, upper_slope)

    def unstable(self, node: Node, bounds: Interval) -> Tensor:
        return TwoPieces.unstable(bounds)

    def relax(self, node: Node, bounds: Interval) -> Relaxation:
        return self.pieces(node).relax(bounds)

    def family(self, node: Node, bounds: Sequence[Interval]) -> Family:
        return self.pieces(node).family(bounds[0], self.relax(node, bounds[0]))


class Relu(PiecewiseActivation):
    """``max(z, 0)``."""

    overloads = ("aten.relu.default",)
    onnx: ClassVar[Mapping[str, Converter]] = {"Relu": entrywise(torch.relu)}

    _pieces = TwoPieces(0.0)

    def pieces(self, node: Node) -> TwoPieces:
        return self._pieces


def _leaky(call: Call, values: Values, shape: Shape) -> Tensor:
    slope, x = float(call.attributes.get("alpha", 0.01)), values[0].float
    return functional.leaky_relu(x, slope) if 0 <= slope <= 1 else slope * x + (1 - slope) * torch.relu(x)


class LeakyRelu(PiecewiseActivation):
    """``max(z, 0) + negative_slope·min(z, 0)`` with a slope between 0 and 1."""

    makes_nan = True  # of an infinite end, by a slope that is 0 in the bounds' type
    overloads = ("aten.leaky_relu.default",)
    onnx: ClassVar[Mapping[str, Converter]] = {"LeakyRelu": _leaky}

    def refusal(self, node: Node) -> str | None:
        slope = float(node.arguments["negative_slope"])
        return None if 0 <= slope <= 1 else f"its negative_slope {slope} is not between 0 and 1"

    def pieces(self, node: Node) -> TwoPieces:
        return TwoPieces(float(node.arguments["negative_slope"]))


class Absolute(PiecewiseActivation):
    """``|z|``: two pieces, with slope −1 below 0."""

    overloads = ("aten.abs.default",)
    onnx: ClassVar[Mapping[str, Converter]] = {"Abs": entrywise(torch.abs)}

    _pieces = TwoPieces(-1.0)

    def pieces(self, node: Node) -> TwoPieces:
        return self._pieces

    def interval(self, node: Node, inputs: Sequence[Interval], tp_group: RankGroup) -> Interval:
        lower, upper = inputs[0].lower, inputs[0].upper
        least = torch.maximum(lower, -upper).clamp(min=0)
        return Interval(least, torch.maximum(lower.abs(), upper.abs()))
