"""The inverse hyperbolic sine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from service.bounds.operators.conversion import Converter, entrywise
from service.bounds.operators.curve import CLOSE, LEVEL_SLOPE
from service.bounds.operators.smooth import SmoothActivation, SmoothFunction


def _derivative(z: Tensor) -> Tensor:
    return torch.rsqrt(1 + z.square())


class InverseHyperbolicSine(SmoothActivation):
    """``aten.asinh``."""

    overloads = ("aten.asinh.default",)
    onnx: ClassVar[Mapping[str, Converter]] = {"Asinh": entrywise(torch.asinh)}

    function = SmoothFunction(
        torch.asinh, _derivative, CLOSE, LEVEL_SLOPE, inflections=(0.0,), samples=(-4.0, -1.0, 1.0, 4.0)
    )
