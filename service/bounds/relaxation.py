"""Linear bounds of one non-linear operator, and how a backward pass goes through them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Relaxed(Protocol):
    """What a backward pass needs of an operator that was relaxed on its inputs' bounds."""

    def pull(self, coefficients: Tensor) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """Coefficients on each input, and the bias ``(batch, rows)``, that bound ``coefficients · f`` from below.

        ``coefficients`` is ``(batch or 1, rows, *shape of the output)``.
        """


@dataclass(frozen=True, eq=False)
class Relaxation:
    """``lower_slope·z + lower_intercept ≤ f(z) ≤ upper_slope·z + upper_intercept`` for every z of the interval.

    All tensors have the shape ``(batch, *shape)`` of the operator's input; an intercept of ``None`` is zero.
    Any of them may require a gradient: what is optimised is a relaxation with other slopes.
    """

    lower_slope: Tensor
    upper_slope: Tensor
    lower_intercept: Tensor | None = None
    upper_intercept: Tensor | None = None

    def pull(self, coefficients: Tensor) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """CROWN, Zhang et al., 2018: a positive coefficient takes the lower line, a negative one the upper line."""
        slope = torch.where(coefficients >= 0, self.lower_slope.unsqueeze(1), self.upper_slope.unsqueeze(1))
        pieces = [
            weighted(clamped, intercept)
            for clamped, intercept in (
                (coefficients.clamp(min=0), self.lower_intercept),
                (coefficients.clamp(max=0), self.upper_intercept),
            )
            if intercept is not None
        ]
        return (coefficients * slope,), sum(pieces[1:], start=pieces[0]) if pieces else None


def weighted(coefficients: Tensor, intercept: Tensor) -> Tensor:
    """``(b, rows, *shape)`` and ``(batch, *shape)`` to ``(batch, rows)``."""
    batch = intercept.shape[0]
    flat = coefficients.flatten(2).expand(batch, -1, -1)
    return torch.bmm(flat, intercept.reshape(batch, -1, 1)).squeeze(-1)
