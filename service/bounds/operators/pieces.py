"""Functions of two straight pieces that meet at 0: ReLU and its relatives."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import ClassVar

import torch
from torch import Tensor

from service.bounds import fused
from service.bounds.flat import by_instance
from service.bounds.fused import FreeSlopes
from service.bounds.interval import Interval
from service.bounds.linear.propagation import Propagated, backward_rule
from service.bounds.linear.rows.patches import Patches
from service.bounds.linear.rows.structured import GatheredRows
from service.bounds.operators.curve import Curve, relative
from service.bounds.relaxation import Family, Lines, Relaxation, Relaxed, Single


def _exact(z: Tensor, computed: Tensor) -> Tensor:
    return torch.zeros_like(z)


@dataclass(frozen=True)
class TwoPieces:
    """``max(z, 0) + slope·min(z, 0)`` with a slope of at most 1: 0 for ReLU, −1 for the absolute value.

    For l < 0 < u the upper line is the chord; the lower line goes through the origin with slope 1 if u > −l, else
    ``slope`` (the adaptive choice of CROWN, Zhang et al., 2018). Otherwise both lines are the function. A split at
    ``breakpoint`` leaves nothing to relax.
    """

    slope: float
    breakpoint: ClassVar[float] = 0.0

    @cached_property
    def curve(self) -> Curve:
        """Return the function as the rigorous bounds evaluate it."""
        error = _exact if self.slope in (-1.0, 0.0, 1.0) else relative(1)

        def function(z: Tensor) -> Tensor:
            return torch.where(z >= 0, z, self.slope * z)

        return Curve(function, error, inflections=(0.0,), stationary=(0.0,), least=0.0 if self.slope <= 0 else -inf)

    @staticmethod
    def unstable(bounds: Interval) -> Tensor:
        """Return the entries that may lie on either side of the breakpoint, bool like the bounds."""
        return (bounds.lower < 0) & (bounds.upper > 0)

    def relax(self, bounds: Interval) -> Relaxation:
        # Ends that are cut off at 0 leave the chord of one piece alone, which is that piece.
        low, high, slope = bounds.lower.clamp(max=0), bounds.upper.clamp(min=0), self.slope
        chord, downward = _chord_slope(low, high, slope), -low
        # With an infinite lower end, the chord has the slope of the piece on that side.
        intercept = torch.where(downward < torch.inf, (chord - slope) * downward, (1 - slope) * high)
        return Relaxation(either(high > downward, 1.0, slope, low), chord, upper_intercept=intercept)

    def family(self, bounds: Interval, relaxation: Relaxation) -> Family:
        """Return the relaxation with any lower slope between those of the pieces (α-CROWN, Xu et al., 2021)."""
        open_ = self.unstable(bounds)
        if self.slope == 1 or not bool(open_.any()):
            return Single(relaxation)
        assert relaxation.upper_intercept is not None
        lines = relaxation.lower_slope, relaxation.upper_slope, relaxation.upper_intercept
        free = FreeSlopes.at(open_, self.slope, *lines)
        start = (_places(by_instance(relaxation.lower_slope).gather(1, free.index), self.slope),)
        return _FreeLowerSlopes(free, start, relaxation, open_)


@dataclass(frozen=True, eq=False)
class _FreeLowerSlopes:
    """Two pieces that meet at 0, with a free lower slope at open entries of an instance: ``start`` is ``(batch,
    places)``.

    ``whole`` are the lines that CROWN takes, ``open_`` is ``(batch, *shape)``.
    """

    free: FreeSlopes
    start: tuple[Tensor, ...]
    whole: Relaxation
    open_: Tensor

    def shown(self, patches: Patches) -> Family:
        """Free the slope of every place in the patches: with so few entries no choice is needed."""
        assert self.whole.upper_intercept is not None
        whole = self.whole.lower_slope, self.whole.upper_slope, self.whole.upper_intercept
        open_in, closed, chord, intercept = patches.of_each(self.open_.to(whole[0].dtype), *whole)
        start, slope = (_places(closed, self.free.flattest),), self.free.flattest
        return _FreeSlopesInPatches(slope, open_in > 0, closed, chord, intercept, start)

    def member(self, parameters: tuple[Tensor, ...]) -> _ChosenSlopes:
        return _ChosenSlopes(self.free, parameters[0])


@dataclass(frozen=True, eq=False)
class _ChosenSlopes(Relaxed):
    free: FreeSlopes
    parameters: Tensor

    def backward(self, coefficients: Tensor | GatheredRows) -> tuple[tuple[Tensor, ...], Tensor | None]:
        through, bias = fused.propagate_free_slopes(coefficients, self.free, self.parameters)
        return (through,), bias

    @backward_rule(GatheredRows)
    def backward_gathered(self, rows: GatheredRows) -> Propagated:
        return Propagated(*self.backward(rows))


@dataclass(frozen=True, eq=False)
class _FreeSlopesInPatches:
    """Free lower slopes of the entries in patches: all tensors are ``(batch, rows, *shape of a patch)``."""

    slope: float
    open_: Tensor
    closed: Tensor
    chord: Tensor
    intercept: Tensor
    start: tuple[Tensor, ...]

    def member(self, parameters: tuple[Tensor, ...]) -> Lines:
        free = parameters[0] * (1 - self.slope) + self.slope if self.slope else parameters[0]
        return Lines(torch.where(self.open_, free, self.closed), self.chord, upper_intercept=self.intercept)


def _places(slopes: Tensor, flattest: float) -> Tensor:
    """Return parameters of slopes from ``flattest`` to 1."""
    return ((slopes - flattest) / (1 - flattest)).clamp(0, 1)


def _chord_slope(low: Tensor, high: Tensor, slope: float) -> Tensor:
    """Return the slope of the line through the values at ``low ≤ 0`` and ``high ≥ 0``.

    With an infinite end only one slope can bound the function: that of the piece on that side.
    """
    low, high = low / 2, high / 2  # the difference of large ends may overflow
    width, rise = high - low, high - slope * low if slope else high
    # A point has no chord; a division by its width would spoil the gradient even if the result is not used.
    chord = (rise / torch.where(width > 0, width, torch.ones_like(width))).nan_to_num(nan=1.0)
    if not slope:
        return chord
    # Rounding leaves the slope of the piece below 0 inexact, an infinite end leaves none.
    return torch.where((low > -torch.inf) & (high > 0), chord, low.new_full((), slope))


def either(condition: Tensor, yes: float, no: float, like: Tensor) -> Tensor:
    """Return ``torch.where`` on two numbers, which alone would round them to the default dtype.

    They are filled in on the device: a copy from the host would wait for all pending work of the device.
    """
    if (yes, no) == (1.0, 0.0):
        return condition.to(like.dtype)
    return torch.where(condition, like.new_full((), yes), like.new_full((), no))
