"""``atan``."""

from __future__ import annotations

from collections.abc import Mapping
from math import pi
from typing import ClassVar

import torch

from service.bounds.operators.conversion import Converter, entrywise
from service.bounds.operators.curve import CLOSE, LEVEL_SLOPE
from service.bounds.operators.smooth import SmoothActivation, SmoothFunction


class ArcTangent(SmoothActivation):
    """``aten.atan``."""

    overloads = ("aten.atan.default",)
    onnx: ClassVar[Mapping[str, Converter]] = {"Atan": entrywise(torch.atan)}

    function = SmoothFunction(
        torch.atan,
        lambda z: 1 / (1 + z.square()),
        CLOSE,
        LEVEL_SLOPE,
        inflections=(0.0,),
        samples=(-20.0, -5.0, -2.0, -0.7, 0.7, 2.0, 5.0, 20.0),
        least=-pi / 2,
        greatest=pi / 2,
    )
