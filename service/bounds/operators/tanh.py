"""``tanh``."""

from __future__ import annotations

import torch
from torch import Tensor

from service.bounds.operators.smooth import Smooth


def _derivative(z: Tensor) -> Tensor:
    return 1 - torch.tanh(z).square()


TANH = Smooth(torch.tanh, _derivative, turning=(0.0,), knots=(-4.0, -2.0, -1.0, -0.5, 0.5, 1.0, 2.0, 4.0))
