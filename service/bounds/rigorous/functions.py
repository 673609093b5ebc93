"""The supported functions of one variable, with what torch's float64 implementations of them may be off by.

Additions, multiplications, divisions and square roots round correctly; ``exp``, ``log``, ``sin``, ``cos``, ``tanh``,
``erf``, ``erfc`` and ``pow`` stay within a few units of the last place on CPUs and on CUDA (SLEEF 1.5, the CUDA
libraries 5, by their documentation); 8 are allowed for here, and 16 for a derivative.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf

import torch
from torch import Tensor

from service.bounds.graph import Node
from service.bounds.operators import OPERATORS
from service.bounds.operators.power import Power
from service.bounds.operators.relu import LeakyRelu
from service.bounds.operators.sin import Periodic
from service.bounds.operators.smooth import Parametric, Smooth
from service.bounds.rigorous.curves import Curve, absolute, exact, relative
from service.bounds.rigorous.rounding import TINY, UNIT

ValueError_ = Callable[[Tensor, Tensor], Tensor]
CLOSE, CLOSE_SLOPE = relative(8), relative(16)
LEVEL_SLOPE = absolute(32)
POWER_SLOPE = relative(1024)
"""The exponent less 1 is rounded: ``z^δ`` is off by up to ``|ln z| < 745`` units."""


def _straight(least: float) -> Callable[[Node], Curve]:
    def curve(node: Node) -> Curve:
        operator = OPERATORS[node.operator]
        assert isinstance(operator, LeakyRelu)
        below = operator.negative_slope(node)
        error = exact if below in (-1.0, 0.0, 1.0) else relative(1)

        def function(z: Tensor) -> Tensor:
            return torch.where(z >= 0, z, below * z)

        return Curve(function, error, turning=(0.0,), stationary=(0.0,), least=least if below <= 0 else -inf)

    return curve


def _smooth(
    value_error: ValueError_, slope_error: ValueError_, least: float = -inf, greatest: float = inf
) -> Callable[[Node], Curve]:
    def curve(node: Node) -> Curve:
        operator = OPERATORS[node.operator]
        operator = operator.smooth(node) if isinstance(operator, Parametric) else operator
        assert isinstance(operator, Smooth)
        return of_smooth(operator, value_error, slope_error, least, greatest)

    return curve


def of_smooth(
    operator: Smooth, value_error: ValueError_, slope_error: ValueError_, least: float = -inf, greatest: float = inf
) -> Curve:
    return Curve(
        operator.function,
        value_error,
        operator.derivative,
        slope_error,
        operator.turning,
        operator.stationary,
        least,
        greatest,
        operator.defined,
        operator.inside,
    )


def _power(node: Node) -> Curve:
    operator = OPERATORS[node.operator]
    assert isinstance(operator, Power)
    exponent = operator.exponent_of(node)
    even_or_broken = exponent % 2 != 1
    root = 1e-30 if 0 < exponent < 1 else -inf
    smooth = operator.smooth(node)
    return Curve(
        smooth.function,
        CLOSE,
        smooth.derivative,
        POWER_SLOPE,
        smooth.turning,
        smooth.stationary,
        0.0 if even_or_broken else -inf,
        inf,
        smooth.defined,
        smooth.inside,
        root,
    )


def _normal(z: Tensor, computed: Tensor) -> Tensor:
    """``z Φ(z)``: besides, Φ's argument is rounded, which moves it by ``u z φ(z)`` times a small number."""
    return 16 * UNIT * computed.abs() + 4 * UNIT * z.square() * torch.exp(-z.square() / 2) + TINY


def _gelu(node: Node) -> Curve:
    form = node.arguments.get("approximate", "none")
    return _smooth(_normal if form == "none" else _tanh_gate, LEVEL_SLOPE)(node)


def _tanh_gate(z: Tensor, computed: Tensor) -> Tensor:
    """``z σ(u)``: the cubic u is rounded 8 times, which moves σ by ``8 u σ(u) σ(−u)`` units at most."""
    inner = (1.6 * (z + 0.045 * z**3)).abs()
    return UNIT * (16 * computed.abs() + 32 * z.abs() * inner * torch.exp(-inner)) + 1e-300


def _softplus(node: Node) -> Curve:
    beta = float(node.arguments["beta"])

    def error(z: Tensor, computed: Tensor) -> Tensor:
        return 32 * UNIT * computed.abs() * (1 + (beta * z).abs()) + 1e-300

    return _smooth(error, LEVEL_SLOPE, 0.0)(node)


def _gate(z: Tensor, computed: Tensor) -> Tensor:
    """``z σ(z)``, which falls below the normal numbers for z below −700."""
    return 16 * UNIT * computed.abs() + 1e-300


def around_zero(operator: Periodic) -> Curve:
    """Turning points are multiples of π, rounded: between them and the true ones f bends by nothing that counts."""

    def error(z: Tensor, computed: Tensor) -> Tensor:
        return 16 * UNIT * computed.abs() + 1e-40

    return of_smooth(operator.around_zero, error, LEVEL_SLOPE, -1.0, 1.0)


CURVES: Mapping[str, Callable[[Node], Curve]] = {
    "aten.relu.default": _straight(0.0),
    "aten.leaky_relu.default": _straight(0.0),
    "aten.abs.default": _straight(0.0),
    "aten.tanh.default": _smooth(CLOSE, LEVEL_SLOPE, -1.0, 1.0),
    "aten.sigmoid.default": _smooth(CLOSE, LEVEL_SLOPE, 0.0, 1.0),
    "aten.erf.default": _smooth(CLOSE, LEVEL_SLOPE, -1.0, 1.0),
    "aten.gelu.default": _gelu,
    "aten.atan.default": _smooth(CLOSE, LEVEL_SLOPE, -1.5707963267948968, 1.5707963267948968),
    "aten.elu.default": _smooth(relative(16), POWER_SLOPE),
    "aten.mish.default": _smooth(_gate, LEVEL_SLOPE),
    "aten.softplus.default": _softplus,
    "aten.silu.default": _smooth(_gate, LEVEL_SLOPE),
    "aten.exp.default": _smooth(CLOSE, CLOSE_SLOPE, 0.0),
    "aten.log.default": _smooth(CLOSE, CLOSE_SLOPE),
    "aten.pow.Tensor_Scalar": _power,
    "aten.sqrt.default": _power,
    "aten.rsqrt.default": _power,
    "aten.reciprocal.default": _power,
}
