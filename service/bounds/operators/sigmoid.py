"""``sigmoid``."""

from __future__ import annotations

import torch
from torch import Tensor

from service.bounds.operators.smooth import Smooth


def _derivative(z: Tensor) -> Tensor:
    value = torch.sigmoid(z)
    return value * (1 - value)


SIGMOID = Smooth(torch.sigmoid, _derivative, turning=(0.0,), knots=(-8.0, -4.0, -2.0, -1.0, 1.0, 2.0, 4.0, 8.0))
