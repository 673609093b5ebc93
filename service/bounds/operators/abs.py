"""The absolute value: two straight pieces that meet at 0."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from service.bounds.exchange import Exchange
from service.bounds.graph import Node
from service.bounds.interval import Interval
from service.bounds.operators.relu import LeakyRelu


class Absolute(LeakyRelu):
    """``|z|``: the same two pieces with slope −1 below 0."""

    def refusal(self, node: Node) -> str | None:
        return None

    def negative_slope(self, node: Node) -> float:
        return -1.0

    def interval(self, node: Node, inputs: Sequence[Interval], exchange: Exchange) -> Interval:
        lower, upper = inputs[0].lower, inputs[0].upper
        least = torch.maximum(lower, -upper).clamp(min=0)
        return Interval(least, torch.maximum(lower.abs(), upper.abs()))
