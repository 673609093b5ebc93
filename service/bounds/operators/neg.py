"""Negation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from service.bounds.graph import Node
from service.bounds.interval import Interval
from service.bounds.linear.propagation import Propagated
from service.bounds.operators.add import scaled_by
from service.bounds.operators.base import ExactOperator
from service.bounds.operators.conversion import Converter, entrywise
from service.bounds.operators.elementwise import Elementwise
from service.bounds.rank_group import RankGroup


class Negation(Elementwise, ExactOperator):
    """``−x``."""

    overloads = ("aten.neg.default",)
    onnx: ClassVar[Mapping[str, Converter]] = {"Neg": entrywise(torch.neg)}

    def interval(self, node: Node, inputs: Sequence[Interval], tp_group: RankGroup) -> Interval:
        return scaled_by(inputs[0], -1.0)

    def backward(self, node: Node, coefficients: Tensor, tp_group: RankGroup) -> Propagated:
        return Propagated((-coefficients,))
