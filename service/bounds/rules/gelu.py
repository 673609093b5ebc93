"""GELU in its exact form, z·Φ(z) (Hendrycks and Gimpel, 2016)."""

from __future__ import annotations

from math import pi, sqrt

import torch
from torch import Tensor

from service.bounds.graph import Node
from service.bounds.rules.smooth import Smooth

MINIMUM = -0.7517915246935645  # where Φ(z) + z·φ(z) = 0, the only zero of the derivative


def _cumulative(z: Tensor) -> Tensor:
    """Φ by erfc: 1 + erf cancels in the lower tail, where a bound must still be one."""
    tail: Tensor = torch.special.erfc(-z / sqrt(2))
    return tail / 2


def _gelu(z: Tensor) -> Tensor:
    return z * _cumulative(z)


def _derivative(z: Tensor) -> Tensor:
    return _cumulative(z) + z * torch.exp(-z.square() / 2) / sqrt(2 * pi)


def _exact_form(node: Node) -> str | None:
    form = node.arguments.get("approximate", "none")
    return None if form == "none" else f"its approximate={form!r} form has no rule, only 'none' has"


# f″(z) = φ(z)·(2 − z²)
GELU = Smooth(
    _gelu,
    _derivative,
    stationary=(MINIMUM,),
    turning=(-sqrt(2), sqrt(2)),
    knots=(-4.0, -2.5, -1.5, MINIMUM, 0.0, 1.5, 2.5, 4.0),
    accepts=_exact_form,
)
