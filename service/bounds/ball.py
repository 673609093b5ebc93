"""Defines Euclidean balls of inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from service.bounds import fused
from service.bounds.flat import by_instance, by_row
from service.bounds.interval import Interval


@dataclass(frozen=True, eq=False)
class Ball(Interval):
    """``‖value − middle‖₂ ≤ distance``, within the box that encloses it.

    Rules see the box. ``middle`` is ``(batch, *shape)``, and so is ``distance``, which repeats one number per instance
    so that one function rearranges all tensors.
    """

    middle: Tensor
    distance: Tensor
    exact_layers: ClassVar[int] = 0

    @staticmethod
    def within(middle: Tensor, distance: float, dtype: torch.dtype) -> Ball:
        """Return balls around float64 points ``(batch, *shape)``, in ``dtype``, widened by the rounding of the
        points.
        """
        box = Interval.about(middle, distance, dtype)
        rounded = middle.to(dtype)
        moved = by_instance(rounded.double() - middle).norm(dim=1)
        wider = Interval.enclosing(moved + distance, moved + distance, dtype).upper
        return Ball(box.lower, box.upper, rounded, wider.reshape(-1, *[1] * (middle.dim() - 1)).expand_as(rounded))

    def arranged(self, function: Callable[[Tensor], Tensor]) -> Ball:
        return Ball(*(function(each) for each in (self.lower, self.upper, self.middle, self.distance)))

    def nearest(self, values: Tensor) -> Tensor:
        away = values - self.middle
        length = by_instance(away).norm(dim=1).clamp(min=torch.finfo(values.dtype).tiny)
        share = (self._distance / length).clamp(max=1)
        return super().nearest(self.middle + away * share.reshape(-1, *[1] * (values.dim() - 1)))

    def least(self, coefficients: Tensor) -> Tensor:
        """Return ``a·middle − distance·‖a‖₂`` (Cauchy and Schwarz), or the box's own bound if rounding makes
        that greater.
        """
        flat, middle, eps = by_row(coefficients), by_instance(self.middle), torch.finfo(self.middle.dtype).eps
        # As for a box, with the rounding error of a sum over the entries.
        at_middle = fused.least(flat, middle, Interval.point(middle).spread)
        inside = at_middle - self._distance[:, None] * (1 + 4 * eps) * flat.norm(dim=2)
        return torch.maximum(inside, super().least(coefficients))

    @property
    def _distance(self) -> Tensor:
        return by_instance(self.distance)[:, 0]
