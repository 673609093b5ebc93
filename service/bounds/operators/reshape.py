"""Views, copies and everything else that keeps an instance's entries in their order."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from service.bounds.exchange import Exchange
from service.bounds.fused import Picked
from service.bounds.graph import Node
from service.bounds.interval import Interval
from service.bounds.operators.allowance import Roundings
from service.bounds.operators.base import LinearOperator, Pulled, UnitRows
from service.bounds.windows import Windows, image_of


class Reshape(LinearOperator):
    """Another shape for the same entries in the same order: views, copies, added or dropped dimensions of length 1."""

    keeps_order = True

    def interval(self, node: Node, inputs: Sequence[Interval], exchange: Exchange) -> Interval:
        return inputs[0].map(lambda end: end.reshape(end.shape[0], *node.shape))

    def pull(self, node: Node, coefficients: Tensor, exchange: Exchange) -> Pulled:
        return Pulled((coefficients.reshape(*coefficients.shape[:2], *node.input_shapes[0]),))

    def pull_units(self, node: Node, units: UnitRows, exchange: Exchange) -> Pulled | None:
        return Pulled((units,))

    def pull_picked(self, node: Node, rows: Picked) -> Pulled | None:
        return Pulled((rows,))

    def pull_windows(self, node: Node, windows: Windows) -> Pulled | None:
        alike = image_of(node.input_shapes[0]) == image_of(node.shape) is not None
        return Pulled((windows,)) if alike else None

    def roundings(self, node: Node) -> Roundings:
        return Roundings()
