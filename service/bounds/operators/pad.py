"""``constant_pad_nd``: a constant around an instance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from service.bounds.graph import Node
from service.bounds.interval import Interval
from service.bounds.linear.propagation import Propagated
from service.bounds.operators.allowance import Roundings
from service.bounds.operators.base import LinearOperator
from service.bounds.operators.sharding import Cut, Whole
from service.bounds.rank_group import RankGroup


class Pad(LinearOperator):
    """``aten.constant_pad_nd(self, pad, value)``; negative padding takes entries away."""

    overloads = ("aten.constant_pad_nd.default",)

    def stretch(self, node: Node) -> float:
        return 1.0

    def refusal(self, node: Node) -> str | None:
        beyond = len(node.arguments["pad"]) // 2 > len(node.shape)
        return "it pads the batch" if beyond else None

    def interval(self, node: Node, inputs: Sequence[Interval], tp_group: RankGroup) -> Interval:
        pad, value = list(node.arguments["pad"]), float(node.arguments["value"])
        return inputs[0].map(lambda end: torch.nn.functional.pad(end, pad, value=value))

    def backward(self, node: Node, coefficients: Tensor, tp_group: RankGroup) -> Propagated:
        pad, value = list(node.arguments["pad"]), float(node.arguments["value"])
        through = torch.nn.functional.pad(coefficients, [-length for length in pad])
        if value == 0:
            return Propagated((through,))
        around = torch.nn.functional.pad(coefficients.new_zeros(node.input_shapes[0]), pad, value=value)
        return Propagated((through,), coefficients.flatten(2) @ around.flatten())

    def roundings(self, node: Node) -> Roundings:
        return Roundings(bias=node.size if node.arguments["value"] else 0)

    def shard(self, node: Node, cuts: Mapping[str, Cut], ranks: int) -> Cut | Whole:
        cut = cuts[node.inputs[0]]
        beyond = len(node.arguments["pad"]) // 2 >= len(node.shape) - cut.dim
        return Whole("it pads the divided dimension") if beyond else cut
