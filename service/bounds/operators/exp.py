"""``exp``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from service.bounds.operators.conversion import Converter, entrywise
from service.bounds.operators.curve import CLOSE, CLOSE_SLOPE
from service.bounds.operators.smooth import SmoothActivation, SmoothFunction


class Exponential(SmoothActivation):
    """``aten.exp``."""

    overloads = ("aten.exp.default",)
    onnx: ClassVar[Mapping[str, Converter]] = {"Exp": entrywise(torch.exp)}

    function = SmoothFunction(torch.exp, torch.exp, CLOSE, CLOSE_SLOPE, least=0.0)
