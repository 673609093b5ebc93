"""GELU (Hendrycks and Gimpel, 2016): z·Φ(z), and the form that approximates Φ by a hyperbolic tangent."""

from __future__ import annotations

from collections.abc import Mapping
from math import pi, sqrt
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from service.bounds.graph import Node
from service.bounds.operators.conversion import Converter
from service.bounds.operators.curve import LEVEL_SLOPE
from service.bounds.operators.smooth import SmoothActivation, SmoothFunction
from service.bounds.rounding import TINY, UNIT

MINIMUM = -0.7517915246935645  # where Φ(z) + z·φ(z) = 0, the only zero of the derivative


def _cumulative(z: Tensor) -> Tensor:
    """Return Φ by erfc: 1 + erf cancels in the lower tail, where a bound must still be one."""
    tail: Tensor = torch.special.erfc(-z / sqrt(2))
    return tail / 2


def _gelu(z: Tensor) -> Tensor:
    return z * _cumulative(z)


def _derivative(z: Tensor) -> Tensor:
    return _cumulative(z) + z * torch.exp(-z.square() / 2) / sqrt(2 * pi)


def _error(z: Tensor, computed: Tensor) -> Tensor:
    """Bound the error of a computed value. Rounding Φ's argument alone moves it by a multiple of ``u z φ(z)``."""
    return 16 * UNIT * computed.abs() + 4 * UNIT * z.square() * torch.exp(-z.square() / 2) + TINY


# f″(z) = φ(z)·(2 − z²)
EXACT = SmoothFunction(
    _gelu,
    _derivative,
    _error,
    LEVEL_SLOPE,
    stationary=(MINIMUM,),
    inflections=(-sqrt(2), sqrt(2)),
    samples=(-4.0, -2.5, -1.5, MINIMUM, 0.0, 1.5, 2.5, 4.0),
)

MINIMUM_OF_TANH_FORM = -0.7524614220710162  # the only zero of its derivative
INFLECTION_OF_TANH_FORM = 1.4185040087908284  # a zero of its second derivative
INNER, CUBIC = 2 * sqrt(2 / pi), 0.044715


def _gate(z: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``(1 + tanh(u/2))/2 = σ(u)`` and ``σ(−u)``."""
    inner = INNER * (z + CUBIC * z**3)
    return torch.sigmoid(inner), torch.sigmoid(-inner)


def _tanh_form(z: Tensor) -> Tensor:
    return z * _gate(z)[0]


def _derivative_of_tanh_form(z: Tensor) -> Tensor:
    gate, rest = _gate(z)
    return gate + torch.where(gate * rest > 0, z * gate * rest * INNER * (1 + 3 * CUBIC * z.square()), 0.0)


def _error_of_tanh_form(z: Tensor, computed: Tensor) -> Tensor:
    """``z σ(u)``: the cubic u is rounded 8 times, which moves σ by ``8 u σ(u) σ(−u)`` units at most."""
    inner = (1.6 * (z + 0.045 * z**3)).abs()
    return UNIT * (16 * computed.abs() + 32 * z.abs() * inner * torch.exp(-inner)) + 1e-300


TANH_FORM = SmoothFunction(
    _tanh_form,
    _derivative_of_tanh_form,
    _error_of_tanh_form,
    LEVEL_SLOPE,
    stationary=(MINIMUM_OF_TANH_FORM,),
    inflections=(-INFLECTION_OF_TANH_FORM, INFLECTION_OF_TANH_FORM),
    samples=(-4.0, -2.5, -1.5, MINIMUM_OF_TANH_FORM, 0.0, 1.5, 2.5, 4.0),
)
FORMS = {"none": EXACT, "tanh": TANH_FORM}


class Gelu(SmoothActivation):
    """``aten.gelu(self, approximate)``."""

    overloads = ("aten.gelu.default",)
    onnx: ClassVar[Mapping[str, Converter]] = {
        "Gelu": lambda call, values, shape: functional.gelu(
            values[0].float, approximate=call.attributes.get("approximate", "none")
        )
    }

    def refusal(self, node: Node) -> str | None:
        form = node.arguments.get("approximate", "none")
        return super().refusal(node) if form in FORMS else f"its approximate={form!r}; {sorted(FORMS)} are supported"

    def smooth(self, node: Node) -> SmoothFunction:
        return FORMS[node.arguments.get("approximate", "none")]
