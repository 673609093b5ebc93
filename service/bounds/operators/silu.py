"""SiLU, z·σ(z)."""

from __future__ import annotations

import torch
from torch import Tensor

from service.bounds.operators.curve import LEVEL_SLOPE
from service.bounds.operators.smooth import SmoothActivation, SmoothFunction
from service.bounds.rounding import UNIT

MINIMUM = -1.2784645427610738  # where 1 + z·(1 − σ(z)) = 0, the only zero of the derivative
INFLECTION = 2.3993572805154668  # where z·tanh(z/2) = 2, a zero of the second derivative


def _silu(z: Tensor) -> Tensor:
    return z * torch.sigmoid(z)


def _derivative(z: Tensor) -> Tensor:
    value = torch.sigmoid(z)
    return value * (1 + z * torch.sigmoid(-z))


def gate_error(z: Tensor, computed: Tensor) -> Tensor:
    """``z σ(z)``, and functions like it, which fall below the normal numbers for z below −700."""
    return 16 * UNIT * computed.abs() + 1e-300


class Silu(SmoothActivation):
    """``aten.silu``."""

    overloads = ("aten.silu.default",)
    composite = True

    function = SmoothFunction(
        _silu,
        _derivative,
        gate_error,
        LEVEL_SLOPE,
        stationary=(MINIMUM,),
        inflections=(-INFLECTION, INFLECTION),
        samples=(-8.0, -4.0, MINIMUM, 0.0, 1.5, 4.0, 8.0),
    )
