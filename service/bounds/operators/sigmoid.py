"""``sigmoid``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from service.bounds.operators.conversion import Converter, entrywise
from service.bounds.operators.curve import CLOSE, LEVEL_SLOPE
from service.bounds.operators.smooth import SmoothActivation, SmoothFunction


def _derivative(z: Tensor) -> Tensor:
    value = torch.sigmoid(z)
    return value * (1 - value)


class Sigmoid(SmoothActivation):
    """``aten.sigmoid``."""

    overloads = ("aten.sigmoid.default",)
    onnx: ClassVar[Mapping[str, Converter]] = {"Sigmoid": entrywise(torch.sigmoid)}

    function = SmoothFunction(
        torch.sigmoid,
        _derivative,
        CLOSE,
        LEVEL_SLOPE,
        inflections=(0.0,),
        samples=(-8.0, -4.0, -2.0, -1.0, 1.0, 2.0, 4.0, 8.0),
        least=0.0,
        greatest=1.0,
    )
