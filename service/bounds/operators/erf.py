"""The error function."""

from __future__ import annotations

from collections.abc import Mapping
from math import pi, sqrt
from typing import ClassVar

import torch
from torch import Tensor

from service.bounds.operators.conversion import Converter, entrywise
from service.bounds.operators.curve import CLOSE, LEVEL_SLOPE
from service.bounds.operators.smooth import SmoothActivation, SmoothFunction


def _derivative(z: Tensor) -> Tensor:
    return torch.exp(-z.square()) * (2 / sqrt(pi))


class ErrorFunction(SmoothActivation):
    """``aten.erf``."""

    overloads = ("aten.erf.default",)
    onnx: ClassVar[Mapping[str, Converter]] = {"Erf": entrywise(torch.erf)}

    function = SmoothFunction(
        torch.erf,
        _derivative,
        CLOSE,
        LEVEL_SLOPE,
        inflections=(0.0,),
        samples=(-2.0, -1.0, -0.5, 0.5, 1.0, 2.0),
        least=-1.0,
        greatest=1.0,
    )
