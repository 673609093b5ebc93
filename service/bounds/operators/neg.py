"""Negation."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from service.bounds.exchange import Exchange
from service.bounds.graph import Node
from service.bounds.interval import Interval
from service.bounds.operators.add import scaled_by
from service.bounds.operators.allowance import Roundings
from service.bounds.operators.base import LinearOperator, Pulled
from service.bounds.operators.elementwise import Elementwise


class Negation(Elementwise, LinearOperator):
    """``−x``."""

    def interval(self, node: Node, inputs: Sequence[Interval], exchange: Exchange) -> Interval:
        return scaled_by(inputs[0], -1.0)

    def pull(self, node: Node, coefficients: Tensor, exchange: Exchange) -> Pulled:
        return Pulled((-coefficients,))

    def roundings(self, node: Node) -> Roundings:
        return Roundings()
