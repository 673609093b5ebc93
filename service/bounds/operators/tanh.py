"""``tanh``; :mod:`.smooth` has the formulas of its lines, from its derivative and its inflection point."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from service.bounds.operators.conversion import Converter, entrywise
from service.bounds.operators.curve import CLOSE, LEVEL_SLOPE
from service.bounds.operators.smooth import SmoothActivation, SmoothFunction


def _derivative(z: Tensor) -> Tensor:
    return 1 - torch.tanh(z).square()


class Tanh(SmoothActivation):
    """``aten.tanh``."""

    overloads = ("aten.tanh.default",)
    onnx: ClassVar[Mapping[str, Converter]] = {"Tanh": entrywise(torch.tanh)}

    function = SmoothFunction(
        torch.tanh,
        _derivative,
        CLOSE,
        LEVEL_SLOPE,
        inflections=(0.0,),
        samples=(-4.0, -2.0, -1.0, -0.5, 0.5, 1.0, 2.0, 4.0),
        least=-1.0,
        greatest=1.0,
    )
