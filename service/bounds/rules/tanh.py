"""``tanh`` and ``atan``."""

from __future__ import annotations

import torch
from torch import Tensor

from service.bounds.rules.smooth import Smooth


def _derivative(z: Tensor) -> Tensor:
    return 1 - torch.tanh(z).square()


TANH = Smooth(torch.tanh, _derivative, turning=(0.0,), knots=(-4.0, -2.0, -1.0, -0.5, 0.5, 1.0, 2.0, 4.0))
ARC_TANGENT = Smooth(
    torch.atan,
    lambda z: 1 / (1 + z.square()),
    turning=(0.0,),
    knots=(-20.0, -5.0, -2.0, -0.7, 0.7, 2.0, 5.0, 20.0),
)
