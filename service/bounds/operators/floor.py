"""The greatest whole number not above z."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from service.bounds.graph import FLOOR_OF_SIGNED, Node
from service.bounds.interval import Interval
from service.bounds.operators.activation import Activation
from service.bounds.operators.conversion import Converter, entrywise
from service.bounds.operators.pieces import either
from service.bounds.operators.stepped import Stepped, passed_on
from service.bounds.rank_group import RankGroup
from service.bounds.relaxation import Relaxation


class Floor(Stepped, Activation):
    """The greatest whole number not above z: constant lines if at most one step is within, else ``z − 1 … z``.

    The last bit of an end decides about a whole step, so ends are moved outwards by their rounding error. An end near
    0 may be the rest of cancelled terms as large as the other end, or of an ordinary size, unless the graph excludes
    it.
    """

    overloads = ("aten.floor.default", FLOOR_OF_SIGNED)
    onnx: ClassVar[Mapping[str, Converter]] = {"Floor": entrywise(torch.floor)}
    decided_by = "self"

    def side(self, value: Tensor) -> Tensor:
        return value.floor()

    def ramp(self, arguments: Mapping[str, Tensor]) -> Tensor:
        x = arguments["self"]
        return x.detach().floor() + passed_on(x)

    @staticmethod
    def _steps(node: Node, bounds: Interval) -> tuple[Tensor, Tensor]:
        size, is_signed = torch.maximum(bounds.lower.abs(), bounds.upper.abs()), node.operator == FLOOR_OF_SIGNED
        slack = 64 * torch.finfo(size.dtype).eps * (size if is_signed else size + 1).nan_to_num(posinf=0.0)
        below = torch.where(bounds.lower == 0, 0.0, slack) if is_signed else slack
        return (bounds.lower - below).floor(), (bounds.upper + slack).floor()

    def interval(self, node: Node, inputs: Sequence[Interval], tp_group: RankGroup) -> Interval:
        return Interval(*self._steps(node, inputs[0]))

    def pieces(self, node: Node) -> None:
        """Return None: there is a step at every whole number."""

    def unstable(self, node: Node, bounds: Interval) -> Tensor:
        low, high = self._steps(node, bounds)
        return low < high

    def relax(self, node: Node, bounds: Interval) -> Relaxation:
        low, high = self._steps(node, bounds)
        flat = high - low <= 1
        slope = either(flat, 0.0, 1.0, low)
        return Relaxation(
            lower_slope=slope,
            upper_slope=slope,
            lower_intercept=torch.where(flat, low, -torch.ones_like(low)),
            upper_intercept=torch.where(flat, high, torch.zeros_like(high)),
        )

    def rigorous_interval(self, node: Node, inputs: Sequence[Interval], tp_group: RankGroup) -> Interval:
        return self.interval(node, inputs, tp_group).without_nan()

    def rigorous_lines(self, node: Node, bounds: Interval, lower_slope: Tensor, upper_slope: Tensor) -> Relaxation:
        return self.relax(node, bounds)
