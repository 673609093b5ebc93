"""SiLU, z·σ(z)."""

from __future__ import annotations

import torch
from torch import Tensor

from service.bounds.operators.smooth import Smooth

MINIMUM = -1.2784645427610738  # where 1 + z·(1 − σ(z)) = 0, the only zero of the derivative
TURNING = 2.3993572805154668  # where z·tanh(z/2) = 2, a zero of the second derivative


def _silu(z: Tensor) -> Tensor:
    return z * torch.sigmoid(z)


def _derivative(z: Tensor) -> Tensor:
    value = torch.sigmoid(z)
    return value * (1 + z * torch.sigmoid(-z))


SILU = Smooth(
    _silu,
    _derivative,
    stationary=(MINIMUM,),
    turning=(-TURNING, TURNING),
    knots=(-8.0, -4.0, MINIMUM, 0.0, 1.5, 4.0, 8.0),
)
