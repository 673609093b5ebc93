"""The absolute value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch

from service.bounds.graph import Node
from service.bounds.interval import Interval
from service.bounds.operators.conversion import Converter, entrywise
from service.bounds.operators.pieces import TwoPieces
from service.bounds.operators.relu import PiecewiseActivation
from service.bounds.rank_group import RankGroup


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
