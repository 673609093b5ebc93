"""The error function."""

from __future__ import annotations

from math import pi, sqrt

import torch
from torch import Tensor

from service.bounds.operators.smooth import Smooth


def _derivative(z: Tensor) -> Tensor:
    return torch.exp(-z.square()) * (2 / sqrt(pi))


ERROR_FUNCTION = Smooth(torch.erf, _derivative, turning=(0.0,), knots=(-2.0, -1.0, -0.5, 0.5, 1.0, 2.0))
