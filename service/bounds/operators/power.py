"""Powers with a constant exponent: squares, roots, reciprocals and the rest."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from service.bounds.graph import Node
from service.bounds.operators.smooth import Parametric, Smooth


@cache
def power(exponent: float) -> Smooth:
    """``z^exponent``. Away from 0 its derivative is monotone; at 0 it turns for odd exponents only.

    A fraction of a negative number is none, nor has a negative power a value at 0: such intervals have no bounds.
    """

    def function(z: Tensor) -> Tensor:
        return torch.pow(z, exponent)

    def derivative(z: Tensor) -> Tensor:
        return exponent * torch.pow(z, exponent - 1) if exponent else torch.zeros_like(z)

    whole = exponent == int(exponent)
    if whole and exponent >= 0:
        odd = int(exponent) % 2 == 1
        return Smooth(function, derivative, stationary=(0.0,), turning=(0.0,) if odd else ())
    if whole:
        return Smooth(function, derivative, defined=lambda bounds: (bounds.lower > 0) | (bounds.upper < 0), inside=1.0)
    if exponent > 1:
        return Smooth(function, derivative, defined=lambda bounds: bounds.lower >= 0, inside=1.0)
    if exponent < 0:
        return Smooth(function, derivative, defined=lambda bounds: bounds.lower > 0, inside=1.0)
    # A root is infinitely steep at 0; on the first 1e-30 it rises by less than rounding, so a finite slope will do.
    return Smooth(
        function, lambda z: derivative(z.clamp(min=1e-30)), defined=lambda bounds: bounds.lower >= 0, inside=1.0
    )


@dataclass(frozen=True)
class Power(Parametric):
    """``aten.pow(self, exponent)``, or the power of a node without the argument."""

    exponent: float | None = None

    def refusal(self, node: Node) -> str | None:
        if self.exponent is None and not isinstance(node.arguments["exponent"], int | float):
            return "its exponent is a tensor; a number is supported"
        return super().refusal(node)

    def exponent_of(self, node: Node) -> float:
        return float(node.arguments["exponent"] if self.exponent is None else self.exponent)

    def smooth(self, node: Node) -> Smooth:
        return power(self.exponent_of(node))
