"""Balls of the sum of all changes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from service.bounds.balls.base import NormBall


@dataclass(frozen=True, eq=False)
class TaxicabBall(NormBall):
    """``‖value − middle‖₁ ≤ distance``."""

    @staticmethod
    def lengths(moved: Tensor) -> Tensor:
        return moved.sum(dim=1)

    @staticmethod
    def room(middle: Tensor, size: float) -> float:
        # Each entry is rounded once, and the sums that make the changes small enough by less than the rest.
        rounding = torch.finfo(middle.dtype).eps * (float(middle.abs().sum()) + (middle.numel() + 8) * size)
        return max(0.0, size - rounding)

    def pulled(self, away: Tensor) -> Tensor:
        """Return the nearest point of the ball: all changes are smaller by one number (Duchi et al., 2008)."""
        sizes = away.abs()
        largest = sizes.sort(dim=1, descending=True).values
        # The number is that of the entries which stay above it, the largest among those of all beginnings.
        count = torch.arange(1, sizes.shape[1] + 1, dtype=sizes.dtype, device=sizes.device)
        less = ((largest.cumsum(dim=1) - self.size) / count).amax(dim=1, keepdim=True).clamp(min=0)
        shorter = away.sign() * (sizes - less).clamp(min=0)
        return torch.where(sizes.sum(dim=1, keepdim=True) <= self.size, away, shorter)

    def gain(self, coefficients: Tensor) -> Tensor:
        """Return ``distance·max |a|``, or less where the box cuts the ball.

        There it is the value of the dual problem ``min over s ≥ 0 of distance·s + Σ reach·max(|a| − s, 0)``, which no
        point of both sets exceeds, whatever s is; it is attained at the coefficient of the last entry that moves when
        the largest go first.
        """
        sizes = coefficients.abs()
        if not self.is_cut:
            return self.size * sizes.amax(dim=2)
        reach = self.reach(coefficients)
        sizes = sizes.expand_as(reach)
        largest, order = sizes.sort(dim=2, descending=True)
        used = reach.gather(2, order).cumsum(dim=2)
        # The first entry at which the distance is used up; none if the whole box is in the ball.
        place = (used < self.size.unsqueeze(2)).sum(dim=2, keepdim=True)
        last = largest.gather(2, place.clamp(max=sizes.shape[2] - 1))
        last = torch.where(place < sizes.shape[2], last, 0.0)
        return self.size * last.squeeze(2) + (reach * (sizes - last).clamp(min=0)).sum(dim=2)

    def furthest(self, coefficients: Tensor, reach: Tensor) -> Tensor:
        order = coefficients.abs().argsort(dim=1, descending=True, stable=True)
        room = reach.gather(1, order)
        before = room.cumsum(dim=1) - room
        taken = torch.minimum((self.size - before).clamp(min=0), room)
        return torch.zeros_like(reach).scatter(1, order, taken)
