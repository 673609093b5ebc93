"""Sets of values that differ from a point in a few entries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from service.bounds.balls.base import Ball, rounded
from service.bounds.interval import Interval


@dataclass(frozen=True, eq=False)
class SparseBall(Ball):
    """Values that differ from ``middle`` by more than ``slack``, its rounding, in at most ``most`` entries."""

    slack: Tensor
    most: int = 1

    @classmethod
    def within(cls, middle: Tensor, size: float, box: Interval, dtype: torch.dtype) -> Self:
        ends, found, moved = rounded(middle, box, dtype)
        slack = Interval.enclosing(moved, moved, dtype).upper.reshape(found.shape)
        return cls(ends.lower, ends.upper, found, slack, int(size))

    @staticmethod
    def room(middle: Tensor, size: float) -> float:
        return size

    @property
    def size(self) -> Tensor:
        return torch.ones_like(self.slack.flatten(1)[:, :1])

    @property
    def euclidean_size(self) -> Tensor:
        reach = torch.maximum(self.middle - self.lower, self.upper - self.middle).flatten(1)
        squares = (reach**2).topk(self._count(reach), dim=1).values.sum(dim=1)
        found: Tensor = squares.sqrt() + self.slack.flatten(1).norm(dim=1)
        return found

    def nearest(self, values: Tensor) -> Tensor:
        # What the box leaves of a change decides whether the entry is among those that change.
        return super().nearest(torch.minimum(torch.maximum(values, self.lower), self.upper))

    def descended(self, values: Tensor, gradient: Tensor, share: Tensor | float) -> Tensor:
        """Return values after such a step; only the entries change that gain most.

        The largest changes so far would never make room for others.
        """
        step = self.minimiser(gradient) - self.middle
        moved = torch.minimum(torch.maximum(values + 2 * share * step, self.lower), self.upper)
        return torch.where(step == 0, self.middle, moved)

    def pulled(self, away: Tensor) -> Tensor:
        kept = away.abs().topk(self._count(away), dim=1).indices
        return torch.zeros_like(away).scatter(1, kept, away.gather(1, kept))

    def gain(self, coefficients: Tensor) -> Tensor:
        """Return the sum of what the entries gain that gain most, and of what rounding gives the others."""
        sizes, slack = coefficients.abs(), self.slack.flatten(1).unsqueeze(1)
        gains = self.reach(coefficients) * sizes
        return gains.topk(self._count(gains), dim=2).values.sum(dim=2) + (sizes * slack).sum(dim=2)

    def furthest(self, coefficients: Tensor, reach: Tensor) -> Tensor:
        return self.pulled(coefficients.abs() * reach).sign() * reach

    def _count(self, entries: Tensor) -> int:
        return min(self.most, entries.shape[-1])
