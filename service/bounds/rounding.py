"""Bounds of the rounding error of float64 arithmetic (Higham, Accuracy and Stability of Numerical Algorithms, 2002,
chapter 3).

Sums, those over ranks too, and products are taken to be rounded to nearest, in any order and with or without fused
multiplications. Matrix products and convolutions must add up products directly: no Strassen, Winograd or Fourier form.
"""

from __future__ import annotations

import torch
from torch import Tensor

from service.bounds.interval import Interval

UNIT = 2.0**-53
TINY = 2.0**-1022
"""More than a product loses if it falls below the normal numbers, also if those are flushed to zero."""


def gamma(roundings: int) -> float:
    """Return ``n u / (1 − n u)``: the relative error after ``n`` roundings, doubled, which covers the error's own
    rounding.
    """
    if roundings >= 2**40:
        raise ValueError(f"{roundings} roundings in a row cannot be bounded; at most 2^40 can")
    return 2 * roundings * UNIT / (1 - roundings * UNIT)


def up(value: Tensor) -> Tensor:
    """Return at least what ``value`` would be without its last rounding."""
    return torch.nextafter(value, torch.full_like(value, torch.inf))


def down(value: Tensor) -> Tensor:
    return torch.nextafter(value, torch.full_like(value, -torch.inf))


def widened(interval: Interval, below: Tensor | float, above: Tensor | float) -> Interval:
    """Return the interval with its ends moved outwards by at least these amounts."""
    return Interval(down(interval.lower - below), up(interval.upper + above))


def magnitude(interval: Interval) -> Tensor:
    """Return the largest absolute value of the interval, exactly."""
    return torch.maximum(interval.lower.abs(), interval.upper.abs())
