"""Right as they are, but easily taken for wrong: random draws, an input updated in place, updates that magnify every
difference; and one that no two runs agree on.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import torch
from torch import Tensor, nn

from programs.parts import Perceptron, program
from service.compilation.program.model import LEARNING_RATE, ModelProgram


class Dropping(Perceptron):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(nn.functional.dropout(torch.relu(self.first(x)), 0.5, self.training))


class InPlace(Perceptron):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2).add_(1)
        return super().forward(x)


class Single(Perceptron):
    """Cannot be run in float64."""

    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype is torch.float32
        return super().forward(x)


class Chaos(nn.Module):
    """Plain gradient descent on it iterates ``w ← 4w(1 - w)``, which doubles the distance of two runs in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.rand(2000))

    def forward(self, x: Tensor) -> Tensor:
        return (4 / 3 * self.w**3 - 1.5 * self.w**2) / LEARNING_RATE + 0 * x.sum()


class Restless:
    """A loss that is 2 % larger each time it is computed, whoever computes it."""

    def __init__(self) -> None:
        self.calls = count()

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, targets) * (1 + 0.02 * next(self.calls))


def never_alike() -> ModelProgram:
    return replace(program(Perceptron), loss=Restless())


CHAOS = replace(program(Chaos), loss=lambda outputs, targets: outputs.sum())
DROPOUT = program(Dropping)
IN_PLACE = program(InPlace)
SINGLE = program(Single)
