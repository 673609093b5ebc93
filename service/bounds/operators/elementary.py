"""Elementary functions of one variable, which torch computes as one operator each."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, nextafter, pi, sqrt
from typing import ClassVar

import torch
from torch import Tensor

from service.bounds.operators.conversion import Converter, entrywise
from service.bounds.operators.curve import CLOSE, CLOSE_SLOPE, LEVEL_SLOPE, Function
from service.bounds.operators.smooth import SmoothActivation, SmoothFunction


def _s_curve(
    function: Function,
    derivative: Function,
    inverse: Function,
    samples: tuple[float, ...],
    range_: tuple[float, float] = (-inf, inf),
) -> SmoothFunction:
    """Return an increasing function that is convex below 0 and concave above, or the reverse; ``inverse`` is that of
    the derivative above 0.
    """
    return SmoothFunction(
        function,
        derivative,
        CLOSE,
        LEVEL_SLOPE,
        lambda slope, near: torch.copysign(inverse(slope), near),
        inflections=(0.0,),
        samples=samples,
        least=range_[0],
        greatest=range_[1],
    )


def _of_sigmoid(z: Tensor) -> Tensor:
    value = torch.sigmoid(z)
    return value * (1 - value)


class Sigmoid(SmoothActivation):
    overloads = ("aten.sigmoid.default",)
    onnx: ClassVar[Mapping[str, Converter]] = {"Sigmoid": entrywise(torch.sigmoid)}
    samples = (-8.0, -4.0, -2.0, -1.0, 1.0, 2.0, 4.0, 8.0)
    function = _s_curve(
        torch.sigmoid, _of_sigmoid, lambda slope: 2 * (1 - 4 * slope).sqrt().atanh(), samples, (0.0, 1.0)
    )


class Tanh(SmoothActivation):
    overloads = ("aten.tanh.default",)
    onnx: ClassVar[Mapping[str, Converter]] = {"Tanh": entrywise(torch.tanh)}
    samples = (-4.0, -2.0, -1.0, -0.5, 0.5, 1.0, 2.0, 4.0)
    function = _s_curve(
        torch.tanh, lambda z: 1 - torch.tanh(z).square(), lambda slope: (1 - slope).sqrt().atanh(), samples, (-1.0, 1.0)
    )


class ErrorFunction(SmoothActivation):
    overloads = ("aten.erf.default",)
    onnx: ClassVar[Mapping[str, Converter]] = {"Erf": entrywise(torch.erf)}
    samples = (-2.0, -1.0, -0.5, 0.5, 1.0, 2.0)
    function = _s_curve(
        torch.erf,
        lambda z: torch.exp(-z.square()) * (2 / sqrt(pi)),
        lambda slope: (-(slope * (sqrt(pi) / 2)).log()).sqrt(),
        samples,
        (-1.0, 1.0),
    )


RIGHT_ANGLE = nextafter(pi / 2, inf)
"""More than π/2, which is no floating-point number."""


class ArcTangent(SmoothActivation):
    overloads = ("aten.atan.default",)
    onnx: ClassVar[Mapping[str, Converter]] = {"Atan": entrywise(torch.atan)}
    samples = (-20.0, -5.0, -2.0, -0.7, 0.7, 2.0, 5.0, 20.0)
    function = _s_curve(
        torch.atan,
        lambda z: 1 / (1 + z.square()),
        lambda slope: (1 / slope - 1).sqrt(),
        samples,
        (-RIGHT_ANGLE, RIGHT_ANGLE),
    )


class InverseHyperbolicSine(SmoothActivation):
    overloads = ("aten.asinh.default",)
    onnx: ClassVar[Mapping[str, Converter]] = {"Asinh": entrywise(torch.asinh)}
    function = _s_curve(
        torch.asinh,
        lambda z: torch.hypot(torch.ones_like(z), z).reciprocal(),  # a square would overflow
        lambda slope: (1 / slope.square() - 1).sqrt(),
        (-4.0, -1.0, 1.0, 4.0),
    )


class Exponential(SmoothActivation):
    overloads = ("aten.exp.default",)
    onnx: ClassVar[Mapping[str, Converter]] = {"Exp": entrywise(torch.exp)}
    function = SmoothFunction(torch.exp, torch.exp, CLOSE, CLOSE_SLOPE, lambda slope, near: slope.log(), least=0.0)


class Logarithm(SmoothActivation):
    overloads = ("aten.log.default",)
    onnx: ClassVar[Mapping[str, Converter]] = {"Log": entrywise(torch.log)}
    function = SmoothFunction(
        torch.log,
        torch.reciprocal,
        CLOSE,
        CLOSE_SLOPE,
        lambda slope, near: slope.reciprocal(),
        defined=lambda bounds: bounds.lower > 0,
        inside=1.0,
    )
