"""``softplus``: ``log(1 + exp(β z)) / β``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from service.bounds.graph import Node
from service.bounds.operators.conversion import Converter, entrywise
from service.bounds.operators.curve import LEVEL_SLOPE
from service.bounds.operators.smooth import SmoothActivation, SmoothFunction
from service.bounds.rounding import UNIT

SHORTCUT = 20.0
"""torch gives z itself if ``β z`` is more; the difference is under ``exp(−20)``."""


@cache
def _softplus(beta: float) -> SmoothFunction:
    def function(z: Tensor) -> Tensor:
        return torch.logaddexp(z * beta, torch.zeros_like(z)) / beta

    def derivative(z: Tensor) -> Tensor:
        return torch.sigmoid(z * beta)

    def error(z: Tensor, computed: Tensor) -> Tensor:
        return 32 * UNIT * computed.abs() * (1 + (beta * z).abs()) + 1e-300

    samples = tuple(point / beta for point in (-8.0, -4.0, -2.0, 0.0, 2.0, 4.0, 8.0))
    return SmoothFunction(function, derivative, error, LEVEL_SLOPE, samples=samples, least=0.0)


class Softplus(SmoothActivation):
    """``aten.softplus(self, beta, threshold)`` as a function of the reals, without its numerical shortcut."""

    overloads = ("aten.softplus.default",)
    onnx: ClassVar[Mapping[str, Converter]] = {"Softplus": entrywise(lambda x: functional.softplus(x, threshold=80.0))}
    composite = True

    def refusal(self, node: Node) -> str | None:
        beta, threshold = float(node.arguments["beta"]), float(node.arguments["threshold"])
        if beta <= 0 or threshold < SHORTCUT:
            return f"its beta {beta} and threshold {threshold} are not positive and at least {SHORTCUT}"
        return super().refusal(node)

    def smooth(self, node: Node) -> SmoothFunction:
        return _softplus(float(node.arguments["beta"]))
