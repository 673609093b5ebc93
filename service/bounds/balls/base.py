"""Defines balls of inputs: sets around a point, within a box."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from service.bounds.flat import by_instance, by_row
from service.bounds.interval import Interval


@dataclass(frozen=True, eq=False)
class Ball(Interval, ABC):
    """The values of a box that are near to ``middle`` ``(batch, *shape)``, which is in the box, by some norm.

    Rules see the box. All tensors have this shape, so that one function rearranges them.
    """

    middle: Tensor
    exact_layers: ClassVar[int] = 0

    @classmethod
    @abstractmethod
    def within(cls, middle: Tensor, size: float, box: Interval, dtype: torch.dtype) -> Self:
        """Return balls around float64 points ``(batch, *shape)`` within a float64 box, in ``dtype``.

        They hold the exact ones: sizes are widened by the rounding of the points, and boxes are rounded outwards.
        """

    @staticmethod
    @abstractmethod
    def room(middle: Tensor, size: float) -> float:
        """Return a smaller size, so that float64 values from :meth:`nearest` are in the exact ball of ``size``."""

    @property
    @abstractmethod
    def size(self) -> Tensor:
        """Return the size of each instance's ball, ``(batch, 1)``."""

    @property
    @abstractmethod
    def euclidean_size(self) -> Tensor:
        """Return the largest Euclidean distance from the middle, ``(batch,)``, or more."""

    @abstractmethod
    def pulled(self, away: Tensor) -> Tensor:
        """Return differences from the middle ``(batch, entries)``, made small enough by the norm, none of them
        larger than before.
        """

    @abstractmethod
    def furthest(self, coefficients: Tensor, reach: Tensor) -> Tensor:
        """Return how far from the middle each entry is where ``coefficients · v`` is least, ``(batch, entries)``.

        ``reach`` ``(batch, entries)`` is the distance of the box's end in that direction.
        """

    @abstractmethod
    def gain(self, coefficients: Tensor) -> Tensor:
        """Return at least the difference of ``coefficients · middle`` from the least value over the set, ``(batch,
        rows)``, computed by sums and products of numbers that are not negative: its rounding is a share of it.

        ``coefficients`` is ``(batch or 1, rows, entries)``.
        """

    def arranged(self, function: Callable[[Tensor], Tensor]) -> Self:
        held = ((each.name, getattr(self, each.name)) for each in fields(self))
        return replace(self, **{name: function(value) for name, value in held if isinstance(value, Tensor)})

    def nearest(self, values: Tensor) -> Tensor:
        """Return values of the set: those that are outside of it are moved to its edge."""
        pulled = self.pulled(by_instance(values - self.middle))
        return super().nearest(self.middle + pulled.reshape(values.shape))

    def least(self, coefficients: Tensor) -> Tensor:
        """Return the least value over the ball, or the box's own bound if rounding makes that greater."""
        flat, middle, eps = by_row(coefficients), by_instance(self.middle), torch.finfo(self.middle.dtype).eps
        # As for a box, with the rounding error of a sum over the entries.
        at_middle = Interval.point(middle).least(flat)
        return torch.maximum(at_middle - self.gain(flat) * (1 + 4 * eps), super().least(coefficients))

    def minimiser(self, coefficients: Tensor) -> Tensor:
        slope, middle = by_instance(coefficients), by_instance(self.middle)
        below, above = middle - by_instance(self.lower), by_instance(self.upper) - middle
        reach = torch.where(slope > 0, below, above).clamp(min=0).expand_as(slope)
        moved = middle - slope.sign() * self.furthest(slope, reach)
        return super().nearest(moved.reshape(coefficients.shape))

    def reach(self, coefficients: Tensor) -> Tensor:
        """Return how far the box lets each entry go against its coefficient, ``(batch, rows, entries)``."""
        middle = by_instance(self.middle)
        below, above = middle - by_instance(self.lower), by_instance(self.upper) - middle
        return torch.where(coefficients > 0, below.unsqueeze(1), above.unsqueeze(1)).clamp(min=0)


@dataclass(frozen=True, eq=False)
class NormBall(Ball):
    """``‖value − middle‖ ≤ distance``; ``distance`` repeats one number per instance.

    ``is_cut`` says that the box is smaller than the ball: without it, the box is only that around the ball.
    """

    distance: Tensor
    is_cut: bool = False

    @staticmethod
    @abstractmethod
    def lengths(moved: Tensor) -> Tensor:
        """Return the norm of each row of sizes ``(batch, entries)``."""

    @classmethod
    def within(cls, middle: Tensor, size: float, box: Interval, dtype: torch.dtype) -> Self:
        ends, found, moved = rounded(middle, box, dtype)
        wider = cls.lengths(moved) + size
        above = Interval.enclosing(wider, wider, dtype).upper
        distance = above.reshape(-1, *[1] * (found.dim() - 1)).expand_as(found)
        is_cut = bool((box.lower > middle - size).any() or (box.upper < middle + size).any())
        return cls(ends.lower, ends.upper, found, distance, is_cut)

    @property
    def size(self) -> Tensor:
        return by_instance(self.distance)[:, :1]

    @property
    def euclidean_size(self) -> Tensor:
        return self.size[:, 0]


def rounded(middle: Tensor, box: Interval, dtype: torch.dtype) -> tuple[Interval, Tensor, Tensor]:
    """Return the box in ``dtype``, rounded outwards, the middle in it, and by how much that moved its entries,
    ``(batch, entries)``.
    """
    ends = Interval.enclosing(box.lower, box.upper, dtype)
    found = middle.to(dtype)
    return ends, found, by_instance(found.double() - middle).abs()
