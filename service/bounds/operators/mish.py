"""Mish, z·tanh(softplus(z)) (Misra, 2019)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from service.bounds.operators.conversion import Converter, entrywise
from service.bounds.operators.curve import LEVEL_SLOPE
from service.bounds.operators.silu import gate_error
from service.bounds.operators.smooth import SmoothActivation, SmoothFunction

MINIMUM = -1.1924312145154952  # the only zero of the derivative
INFLECTION = (-2.256376396360793, 1.4905711794854285)  # the zeros of the second derivative


def _tanh_of_softplus(z: Tensor) -> Tensor:
    """``n/(n + 2)`` for ``n = e^z (e^z + 2)``, by whichever exponential is small."""
    small = torch.exp(-z.abs())
    above = (1 + 2 * small) / (1 + 2 * small + 2 * small.square())
    below = small * (small + 2) / (small * (small + 2) + 2)
    return torch.where(z > 0, above, below)


def _mish(z: Tensor) -> Tensor:
    return z * _tanh_of_softplus(z)


def _derivative(z: Tensor) -> Tensor:
    inner = _tanh_of_softplus(z)
    # 1 − inner², by 2/(n + 2) and 2(n + 1)/(n + 2), which do not cancel.
    small = torch.exp(-z.abs())
    rest = torch.where(z > 0, 2 * small.square() / (1 + 2 * small + 2 * small.square()), 2 / (small * (small + 2) + 2))
    return inner + z * rest * (1 + inner) * torch.sigmoid(z)


class Mish(SmoothActivation):
    """``aten.mish``."""

    overloads = ("aten.mish.default",)
    onnx: ClassVar[Mapping[str, Converter]] = {"Mish": entrywise(functional.mish)}
    composite = True

    function = SmoothFunction(
        _mish,
        _derivative,
        gate_error,
        LEVEL_SLOPE,
        stationary=(MINIMUM,),
        inflections=INFLECTION,
        samples=(-8.0, -4.0, -2.2, MINIMUM, 0.0, 1.5, 4.0),
    )
