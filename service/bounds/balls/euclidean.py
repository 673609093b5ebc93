"""Defines balls of the Euclidean norm, the root of the sum of the squares of all changes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from service.bounds.balls.base import NormBall

STEPS = 12
"""Steps towards the point of a ball in a box where a linear function is least; the bound holds after any of them."""


@dataclass(frozen=True, eq=False)
class EuclideanBall(NormBall):
    """``‖value − middle‖₂ ≤ distance``."""

    @staticmethod
    def lengths(moved: Tensor) -> Tensor:
        found: Tensor = moved.norm(dim=1)
        return found

    @staticmethod
    def room(middle: Tensor, size: float) -> float:
        rounding = torch.finfo(middle.dtype).eps * (float(middle.norm()) + size)
        return max(0.0, size * (1 - 1e-12) - rounding)

    def pulled(self, away: Tensor) -> Tensor:
        length: Tensor = away.norm(dim=1, keepdim=True).clamp(min=torch.finfo(away.dtype).tiny)
        return away * (self.size / length).clamp(max=1)

    def gain(self, coefficients: Tensor) -> Tensor:
        """Return ``distance·‖a‖₂`` (Cauchy and Schwarz), or less where the box cuts the ball.

        There it is the value of the dual problem ``min over t > 0 of Σ p·(|a| − p/2t) + distance²/2t`` with ``p =
        min(|a|·t, reach)``, which no point of both sets exceeds, whatever t is; at the best one it is attained.
        """
        whole: Tensor = self.size * coefficients.norm(dim=2)
        if not self.is_cut:
            return whole
        sizes = coefficients.abs()
        reach = self.reach(coefficients)
        stretch = self._stretch(sizes, reach).unsqueeze(2)
        near = torch.minimum(sizes * stretch, reach)
        cut = (near * (sizes - near / (2 * stretch))).sum(dim=2) + self.size**2 / (2 * stretch.squeeze(2))
        return torch.where(cut.isfinite(), torch.minimum(cut, whole), whole)

    def furthest(self, coefficients: Tensor, reach: Tensor) -> Tensor:
        sizes = coefficients.abs()
        stretch = self._stretch(sizes.unsqueeze(1), reach.unsqueeze(1))
        return torch.minimum(sizes * stretch, reach)

    @torch.no_grad()
    def _stretch(self, sizes: Tensor, reach: Tensor) -> Tensor:
        """Return t ``(batch, rows)`` at which ``min(sizes·t, reach)`` is as long as the ball is wide, or longer steps
        change nothing. It rises to that from the t without any reach: each step lets out entries that have arrived.
        """
        tiny = torch.finfo(sizes.dtype).tiny
        squares, limits = sizes**2, reach**2
        stretch = self.size / squares.sum(dim=2).sqrt().clamp(min=tiny)
        for _ in range(STEPS if self.is_cut else 0):
            is_free = sizes * stretch.unsqueeze(2) < reach
            left = (self.size**2 - torch.where(is_free, 0.0, limits).sum(dim=2)).clamp(min=0)
            free = torch.where(is_free, squares, 0.0).sum(dim=2)
            stretch = torch.where(free > 0, torch.maximum(stretch, (left / free.clamp(min=tiny)).sqrt()), stretch)
        return stretch
