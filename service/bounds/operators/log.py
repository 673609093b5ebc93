"""The natural logarithm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from service.bounds.operators.conversion import Converter, entrywise
from service.bounds.operators.curve import CLOSE, CLOSE_SLOPE
from service.bounds.operators.smooth import SmoothActivation, SmoothFunction


class Logarithm(SmoothActivation):
    """``aten.log``."""

    overloads = ("aten.log.default",)
    onnx: ClassVar[Mapping[str, Converter]] = {"Log": entrywise(torch.log)}

    function = SmoothFunction(
        torch.log, torch.reciprocal, CLOSE, CLOSE_SLOPE, defined=lambda bounds: bounds.lower > 0, inside=1.0
    )
