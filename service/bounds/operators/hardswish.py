"""Hard swish, ``z·min(max(z + 3, 0), 6)/6`` (Howard et al., 2019)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from service.bounds.operators.conversion import Converter, entrywise
from service.bounds.operators.curve import CLOSE, CLOSE_SLOPE
from service.bounds.operators.smooth import SmoothActivation, SmoothFunction

BENDS = (-3.0, 3.0)
"""The points beyond which it is straight: 0 below, the identity above."""
MINIMUM = -1.5


def _hardswish(z: Tensor) -> Tensor:
    inner = z.clamp(*BENDS)
    return torch.where(z > BENDS[1], z, inner * (inner + 3) / 6)


def _derivative(z: Tensor) -> Tensor:
    """Return the derivative; at both bends the parabola's: where the function is straight, its ends suffice."""
    inner = (2 * z.clamp(*BENDS) + 3) / 6
    return torch.where(z < BENDS[0], torch.zeros_like(z), torch.where(z > BENDS[1], torch.ones_like(z), inner))


class HardSwish(SmoothActivation):
    """``aten.hardswish``."""

    overloads = ("aten.hardswish.default",)
    onnx: ClassVar[Mapping[str, Converter]] = {"HardSwish": entrywise(functional.hardswish)}
    composite = True

    function = SmoothFunction(
        _hardswish,
        _derivative,
        CLOSE,
        CLOSE_SLOPE,
        stationary=(MINIMUM,),
        inflections=BENDS,
        samples=(-3.0, MINIMUM, 0.0, 1.5, 3.0),
    )
