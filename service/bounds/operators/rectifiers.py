"""Smooth relatives of ReLU. GELU is that of Hendrycks and Gimpel (2016): z·Φ(z), or with a hyperbolic tangent for Φ."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from math import pi, sqrt
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from service.bounds.graph import Node
from service.bounds.operators.conversion import Converter, entrywise
from service.bounds.operators.curve import CLOSE, CLOSE_SLOPE, LEVEL_SLOPE, POWER_SLOPE, relative
from service.bounds.operators.smooth import SmoothActivation, SmoothFunction
from service.bounds.rounding import TINY, UNIT


def gate_error(z: Tensor, computed: Tensor) -> Tensor:
    """``z σ(z)``, and functions like it, which fall below the normal numbers for z below −700."""
    return 16 * UNIT * computed.abs() + 1e-300


class Silu(SmoothActivation):
    """SiLU, z·σ(z)."""

    overloads = ("aten.silu.default",)
    composite = True
    minimum = -1.2784645427610738  # where 1 + z·(1 − σ(z)) = 0, the only zero of the derivative
    inflection = 2.3993572805154668  # where z·tanh(z/2) = 2, a zero of the second derivative

    function = SmoothFunction(
        lambda z: z * torch.sigmoid(z),
        lambda z: torch.sigmoid(z) * (1 + z * torch.sigmoid(-z)),
        gate_error,
        LEVEL_SLOPE,
        stationary=(minimum,),
        inflections=(-inflection, inflection),
        samples=(-8.0, -4.0, minimum, 0.0, 1.5, 4.0, 8.0),
    )


def _tanh_of_softplus(z: Tensor) -> Tensor:
    """``n/(n + 2)`` for ``n = e^z (e^z + 2)``, by whichever exponential is small."""
    small = torch.exp(-z.abs())
    above = (1 + 2 * small) / (1 + 2 * small + 2 * small.square())
    below = small * (small + 2) / (small * (small + 2) + 2)
    return torch.where(z > 0, above, below)


def _derivative_of_mish(z: Tensor) -> Tensor:
    inner = _tanh_of_softplus(z)
    # 1 − inner², by 2/(n + 2) and 2(n + 1)/(n + 2), which do not cancel.
    small = torch.exp(-z.abs())
    rest = torch.where(z > 0, 2 * small.square() / (1 + 2 * small + 2 * small.square()), 2 / (small * (small + 2) + 2))
    return inner + z * rest * (1 + inner) * torch.sigmoid(z)


class Mish(SmoothActivation):
    """Mish, z·tanh(softplus(z)) (Misra, 2019)."""

    overloads = ("aten.mish.default",)
    onnx: ClassVar[Mapping[str, Converter]] = {"Mish": entrywise(functional.mish)}
    composite = True
    minimum = -1.1924312145154952  # the only zero of the derivative

    function = SmoothFunction(
        lambda z: z * _tanh_of_softplus(z),
        _derivative_of_mish,
        gate_error,
        LEVEL_SLOPE,
        stationary=(minimum,),
        inflections=(-2.256376396360793, 1.4905711794854285),  # the zeros of the second derivative
        samples=(-8.0, -4.0, -2.2, minimum, 0.0, 1.5, 4.0),
    )


BENDS = (-3.0, 3.0)
"""The points beyond which hard swish is straight: 0 below, the identity above."""


def _hardswish(z: Tensor) -> Tensor:
    inner = z.clamp(*BENDS)
    return torch.where(z > BENDS[1], z, inner * (inner + 3) / 6)


def _derivative_of_hardswish(z: Tensor) -> Tensor:
    """Return the derivative; at both bends the parabola's: where the function is straight, its ends suffice."""
    inner = (2 * z.clamp(*BENDS) + 3) / 6
    return torch.where(z < BENDS[0], torch.zeros_like(z), torch.where(z > BENDS[1], torch.ones_like(z), inner))


class HardSwish(SmoothActivation):
    """Hard swish, ``z·min(max(z + 3, 0), 6)/6`` (Howard et al., 2019)."""

    overloads = ("aten.hardswish.default",)
    onnx: ClassVar[Mapping[str, Converter]] = {"HardSwish": entrywise(functional.hardswish)}
    composite = True

    function = SmoothFunction(
        _hardswish,
        _derivative_of_hardswish,
        CLOSE,
        CLOSE_SLOPE,
        stationary=(-1.5,),
        inflections=BENDS,
        samples=(-3.0, -1.5, 0.0, 1.5, 3.0),
    )


SHORTCUT = 20.0
"""torch gives z itself as its softplus if ``β z`` is more; the difference is under ``exp(−20)``."""


@cache
def _softplus(beta: float) -> SmoothFunction:
    def function(z: Tensor) -> Tensor:
        return torch.logaddexp(z * beta, torch.zeros_like(z)) / beta

    def derivative(z: Tensor) -> Tensor:
        return torch.sigmoid(z * beta)

    def error(z: Tensor, computed: Tensor) -> Tensor:
        return 32 * UNIT * computed.abs() * (1 + (beta * z).abs()) + 1e-300

    samples = tuple(point / beta for point in (-8.0, -4.0, -2.0, 0.0, 2.0, 4.0, 8.0))
    return SmoothFunction(
        function, derivative, error, LEVEL_SLOPE, lambda slope, near: slope.logit() / beta, samples=samples, least=0.0
    )


class Softplus(SmoothActivation):
    """``aten.softplus(self, beta, threshold)`` as a function of the reals, without its numerical shortcut."""

    overloads = ("aten.softplus.default",)
    onnx: ClassVar[Mapping[str, Converter]] = {"Softplus": entrywise(lambda x: functional.softplus(x, threshold=80.0))}
    composite = True

    def refusal(self, node: Node) -> str | None:
        beta, threshold = float(node.arguments["beta"]), float(node.arguments["threshold"])
        if beta <= 0 or threshold < SHORTCUT:
            return f"its beta {beta} and threshold {threshold} are not positive and at least {SHORTCUT}"
        return super().refusal(node)

    def smooth(self, node: Node) -> SmoothFunction:
        return _softplus(float(node.arguments["beta"]))


@cache
def _elu(alpha: float, scale: float, input_scale: float) -> SmoothFunction:
    """Return ``scale·z`` above 0, below ``scale·alpha·(exp(input_scale·z) − 1)``.

    At 0 the derivative is the one from below: above 0 the function is straight, so its ends suffice.
    """

    def function(z: Tensor) -> Tensor:
        return scale * torch.where(z > 0, z, alpha * torch.expm1(z.clamp(max=0) * input_scale))

    def derivative(z: Tensor) -> Tensor:
        below = alpha * input_scale * torch.exp(z.clamp(max=0) * input_scale)
        return scale * torch.where(z > 0, torch.ones_like(z), below)

    return SmoothFunction(
        function, derivative, relative(16), POWER_SLOPE, inflections=(0.0,), samples=(-8.0, -4.0, -2.0, -1.0, 0.0)
    )


class Elu(SmoothActivation):
    """ELU and its relatives CELU and SELU."""

    overloads = ("aten.elu.default",)
    onnx: ClassVar[Mapping[str, Converter]] = {"Elu": entrywise(functional.elu, alpha=1.0)}
    composite = True

    @staticmethod
    def _shape(node: Node) -> tuple[float, float, float]:
        alpha, scale, input_scale = (float(node.arguments[name]) for name in ("alpha", "scale", "input_scale"))
        return alpha, scale, input_scale

    def refusal(self, node: Node) -> str | None:
        alpha, scale, input_scale = self._shape(node)
        if alpha < 0 or scale <= 0 or input_scale <= 0:
            return f"its alpha {alpha} is negative, or its scales {scale} and {input_scale} are not positive"
        return super().refusal(node)

    def smooth(self, node: Node) -> SmoothFunction:
        return _elu(*self._shape(node))


MINIMUM_OF_GELU = -0.7517915246935645  # where Φ(z) + z·φ(z) = 0, the only zero of the derivative


def _cumulative(z: Tensor) -> Tensor:
    """Return Φ by erfc: 1 + erf cancels in the lower tail, where a bound must still be one."""
    tail: Tensor = torch.special.erfc(-z / sqrt(2))
    return tail / 2


def _derivative_of_gelu(z: Tensor) -> Tensor:
    return _cumulative(z) + z * torch.exp(-z.square() / 2) / sqrt(2 * pi)


def _error_of_gelu(z: Tensor, computed: Tensor) -> Tensor:
    """Bound the error of a computed value. Rounding Φ's argument alone moves it by a multiple of ``u z φ(z)``."""
    return 16 * UNIT * computed.abs() + 4 * UNIT * z.square() * torch.exp(-z.square() / 2) + TINY


# f″(z) = φ(z)·(2 − z²)
EXACT = SmoothFunction(
    lambda z: z * _cumulative(z),
    _derivative_of_gelu,
    _error_of_gelu,
    LEVEL_SLOPE,
    stationary=(MINIMUM_OF_GELU,),
    inflections=(-sqrt(2), sqrt(2)),
    samples=(-4.0, -2.5, -1.5, MINIMUM_OF_GELU, 0.0, 1.5, 2.5, 4.0),
)

MINIMUM_OF_TANH_FORM = -0.7524614220710162  # the only zero of its derivative
INFLECTION_OF_TANH_FORM = 1.4185040087908284  # a zero of its second derivative
INNER, CUBIC = 2 * sqrt(2 / pi), 0.044715


def _gate(z: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``(1 + tanh(u/2))/2 = σ(u)`` and ``σ(−u)``."""
    inner = INNER * (z + CUBIC * z**3)
    return torch.sigmoid(inner), torch.sigmoid(-inner)


def _derivative_of_tanh_form(z: Tensor) -> Tensor:
    gate, rest = _gate(z)
    return gate + torch.where(gate * rest > 0, z * gate * rest * INNER * (1 + 3 * CUBIC * z.square()), 0.0)


def _error_of_tanh_form(z: Tensor, computed: Tensor) -> Tensor:
    """``z σ(u)``: the cubic u is rounded 8 times, which moves σ by ``8 u σ(u) σ(−u)`` units at most."""
    inner = (1.6 * (z + 0.045 * z**3)).abs().clamp(max=1e3)  # at least u, and less than u / 0.98
    return UNIT * (16 * computed.abs() + 32 * z.abs() * inner * torch.exp(-0.98 * inner)) + 1e-300


TANH_FORM = SmoothFunction(
    lambda z: z * _gate(z)[0],
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
