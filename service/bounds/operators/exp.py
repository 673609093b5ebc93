"""``exp``."""

from __future__ import annotations

import torch

from service.bounds.operators.curve import CLOSE, CLOSE_SLOPE
from service.bounds.operators.smooth import SmoothActivation, SmoothFunction


class Exponential(SmoothActivation):
    """``aten.exp``."""

    function = SmoothFunction(torch.exp, torch.exp, CLOSE, CLOSE_SLOPE, least=0.0)
