"""``softplus``: ``log(1 + exp(β z)) / β``."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from service.bounds.graph import Node
from service.bounds.operators.smooth import Parametric, Smooth

SHORTCUT = 20.0
"""torch gives z itself where ``β z`` is more; the difference is under ``exp(−20)``."""


@cache
def softplus(beta: float) -> Smooth:
    def function(z: Tensor) -> Tensor:
        return torch.logaddexp(z * beta, torch.zeros_like(z)) / beta

    def derivative(z: Tensor) -> Tensor:
        return torch.sigmoid(z * beta)

    return Smooth(function, derivative, knots=tuple(knot / beta for knot in (-8.0, -4.0, -2.0, 0.0, 2.0, 4.0, 8.0)))


class Softplus(Parametric):
    """``aten.softplus(self, beta, threshold)`` as a function of the reals, without its numerical shortcut."""

    def refusal(self, node: Node) -> str | None:
        beta, threshold = float(node.arguments["beta"]), float(node.arguments["threshold"])
        if beta <= 0 or threshold < SHORTCUT:
            return f"its beta {beta} and threshold {threshold} are not positive and at least {SHORTCUT}"
        return super().refusal(node)

    def smooth(self, node: Node) -> Smooth:
        return softplus(float(node.arguments["beta"]))
