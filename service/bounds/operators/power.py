"""Powers with a constant exponent: squares, roots, reciprocals and the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from math import inf, prod
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from service.bounds.graph import Node
from service.bounds.operators.conversion import Array, Call, Converter, Shape, Value, Values, aligned, entrywise, single
from service.bounds.operators.curve import CLOSE, POWER_SLOPE
from service.bounds.operators.smooth import SmoothActivation, SmoothFunction


@cache
def _power(exponent: float) -> SmoothFunction:
    """``z^exponent``. Away from 0 its derivative is monotone; at 0 it turns for odd exponents only.

    Neither a fractional power of a negative number nor a negative power of 0 exists: such intervals have no bounds.
    """

    def function(z: Tensor) -> Tensor:
        return torch.pow(z, exponent)

    def derivative(z: Tensor) -> Tensor:
        return exponent * torch.pow(z, exponent - 1) if exponent else torch.zeros_like(z)

    def inverse(slope: Tensor, near: Tensor) -> Tensor:
        share = slope / exponent
        has_sign = exponent > 0 and exponent % 2 == 0  # below 0 the slope may be a zero of either sign, far from 0
        return torch.copysign(share.abs() ** (1 / (exponent - 1)), share if has_sign else near)

    even_or_broken = exponent % 2 != 1
    smooth = SmoothFunction(function, derivative, CLOSE, POWER_SLOPE, least=0.0 if even_or_broken else -inf, inside=1.0)
    smooth = smooth if exponent in {0, 1} else replace(smooth, inverse=inverse)
    if exponent == int(exponent):
        if exponent >= 0:
            inflections = () if even_or_broken else (0.0,)
            return replace(smooth, stationary=(0.0,), inflections=inflections, inside=0.0)
        return replace(smooth, defined=lambda bounds: (bounds.lower > 0) | (bounds.upper < 0))
    if exponent < 0:
        return replace(smooth, defined=lambda bounds: bounds.lower > 0)
    smooth = replace(smooth, defined=lambda bounds: bounds.lower >= 0)
    if exponent > 1:
        return smooth
    # A root is infinitely steep at 0; on the first 1e-30 it rises by less than rounding, so a finite slope will do.
    return replace(smooth, derivative=lambda z: derivative(z.clamp(min=STEEPEST)), first_tangent=STEEPEST)


STEEPEST = 1e-30
"""The point at which a root is taken to be steepest."""
MOST_EXPONENTS = 64
"""The most different exponents of one node."""


def _converted(call: Call, values: Values, shape: Shape) -> Tensor:
    base, exponent = values
    if not exponent.constant:
        x, powers = aligned(values)
        if base.array is not None and not bool((base.array > 0).all()):
            raise call.refuse("its exponent depends on the input, and its base is not above 0")
        return torch.exp(powers * torch.log(x))
    assert exponent.array is not None
    if len(np.unique(exponent.array)) > 1:
        return _powers(call, base, exponent.array, shape)
    return torch.pow(base.float, single(call, exponent, "exponent"))


def _powers(call: Call, base: Value, exponents: Array, shape: Shape) -> Tensor:
    """Return powers with an exponent for each entry: of the entries with one exponent together, put in order again."""
    every = np.broadcast_to(exponents, shape).reshape(-1)
    order = np.argsort(every, kind="stable")
    different, counts = np.unique(every, return_counts=True)
    if len(different) > MOST_EXPONENTS:
        raise call.refuse(f"it has {len(different)} different exponents; at most {MOST_EXPONENTS} are supported")
    aligned = base.float.reshape(-1, *(1,) * (len(shape) - len(base.shape)), *base.shape)
    x = aligned.expand(-1, *shape).reshape(-1, prod(shape))
    places = np.split(order, np.cumsum(counts)[:-1])
    found = [
        torch.pow(x.index_select(1, torch.from_numpy(place).to(x.device)), float(each))
        for place, each in zip(places, different, strict=True)
    ]
    back = torch.from_numpy(np.argsort(order, kind="stable")).to(x.device)
    return torch.cat(found, dim=1).index_select(1, back).reshape(-1, *shape)


class Power(SmoothActivation):
    """``aten.pow(self, exponent)``, or the power of a node without the argument."""

    overloads = ("aten.pow.Tensor_Scalar",)
    onnx: ClassVar[Mapping[str, Converter]] = {"Pow": _converted}

    exponent: ClassVar[float | None] = None

    def refusal(self, node: Node) -> str | None:
        if self.exponent is None and not isinstance(node.arguments["exponent"], int | float):
            return "its exponent is a tensor; a number is supported"
        return super().refusal(node)

    def smooth(self, node: Node) -> SmoothFunction:
        return _power(float(node.arguments["exponent"] if self.exponent is None else self.exponent))


class SquareRoot(Power):
    """``aten.sqrt``."""

    overloads = ("aten.sqrt.default",)
    onnx: ClassVar[Mapping[str, Converter]] = {"Sqrt": entrywise(torch.sqrt)}

    exponent = 0.5


class ReciprocalSquareRoot(Power):
    """``aten.rsqrt``."""

    overloads = ("aten.rsqrt.default",)
    onnx: ClassVar[Mapping[str, Converter]] = {}  # Power's own would be taken over

    exponent = -0.5


class Reciprocal(Power):
    """``aten.reciprocal``."""

    overloads = ("aten.reciprocal.default",)
    onnx: ClassVar[Mapping[str, Converter]] = {"Reciprocal": entrywise(torch.reciprocal)}

    exponent = -1.0
