"""``elu`` and its relatives CELU and SELU."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from service.bounds.graph import Node
from service.bounds.operators.conversion import Converter
from service.bounds.operators.curve import POWER_SLOPE, relative
from service.bounds.operators.smooth import SmoothActivation, SmoothFunction


@cache
def _elu(alpha: float, scale: float, input_scale: float) -> SmoothFunction:
    """Return ``scale·z`` above 0, below ``scale·alpha·(exp(input_scale·z) − 1)``.

    At 0 the derivative is the one from below: above 0 the function is straight, so its ends suffice.
    """

    def function(z: Tensor) -> Tensor:
        return scale * torch.where(z > 0, z, alpha * torch.expm1(z.clamp(max=0) * input_scale))

    def derivative(z: Tensor) -> Tensor:
        below = alpha * input_scale * torch.exp(z.clamp(max=0) * input_scale)
        return scale * torch.where(z > 0, torch.ones_like(z), below)

    return SmoothFunction(
        function, derivative, relative(16), POWER_SLOPE, inflections=(0.0,), samples=(-8.0, -4.0, -2.0, -1.0, 0.0)
    )


class Elu(SmoothActivation):
    """``aten.elu(self, alpha, scale, input_scale)``."""

    overloads = ("aten.elu.default",)
    onnx: ClassVar[Mapping[str, Converter]] = {
        "Elu": lambda call, values, shape: functional.elu(values[0].float, float(call.attributes.get("alpha", 1.0)))
    }
    composite = True

    @staticmethod
    def _shape(node: Node) -> tuple[float, float, float]:
        alpha, scale, input_scale = (float(node.arguments[name]) for name in ("alpha", "scale", "input_scale"))
        return alpha, scale, input_scale

    def refusal(self, node: Node) -> str | None:
        alpha, scale, input_scale = self._shape(node)
        if alpha < 0 or scale <= 0 or input_scale <= 0:
            return f"its alpha {alpha} is negative, or its scales {scale} and {input_scale} are not positive"
        return super().refusal(node)

    def smooth(self, node: Node) -> SmoothFunction:
        return _elu(*self._shape(node))
