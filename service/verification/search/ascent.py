"""Gradient ascent of the parameters of many domains at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Climb:
    """An ascent: steps of the slopes in units of their range, of the multipliers in units of the coefficients that
    arrive, of the weights; all are multiplied by ``decay`` after each iteration.
    """

    iterations: int
    slopes: float
    multipliers: float = 0.1
    weights: float = 0.1
    decay: float = 0.97


class Adam:
    """Ascent (Kingma and Ba, 2015) of several tensors, each at its own rate."""

    def __init__(self, moving: list[Tensor], rates: list[float | Tensor], decay: float) -> None:
        self.rates, self.decay, self.count = rates, decay, 0
        self.first = [torch.zeros_like(each) for each in moving]
        self.second = [torch.zeros_like(each) for each in moving]

    def step(self, moving: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
        self.count += 1
        scale = (1 - 0.999**self.count) ** 0.5 / (1 - 0.9**self.count) * self.decay**self.count
        stepped = []
        for each, gradient, first, second, rate in zip(
            moving, gradients, self.first, self.second, self.rates, strict=True
        ):
            first.lerp_(gradient, 0.1)
            second.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
            stepped.append(each + rate * scale * first / second.sqrt().add_(1e-12))
        return stepped
