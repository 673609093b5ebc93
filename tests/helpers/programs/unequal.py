"""A module that is another one when it is compiled: the loss is right, its gradient is not."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from programs.parts import Perceptron, program


class Steeper(Perceptron):
    """As a custom operator's backward may do, the compiled one takes a wrong slope."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        if torch.compiler.is_compiling():
            hidden = hidden + 0.05 * (hidden - hidden.detach())
        return self.head(hidden)


@dataclass
class Scores:
    values: Tensor


class Aside(nn.Module):
    """What is not in the loss is wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.scorer = Perceptron()

    def forward(self, x: Tensor) -> tuple[Tensor, Scores]:
        outputs = self.scorer(x)
        return outputs, Scores(outputs * (2 if torch.compiler.is_compiling() else 1))


class Noisy(Perceptron):
    """Its draws are small, and others in float64."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        return self.head(hidden * (1 + 0.02 * torch.randn_like(hidden)))


class NoisySteeper(Perceptron):
    """The same, and compiled its slope is wrong by about twice as much as they move it."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        hidden = hidden * (1 + 0.02 * torch.randn_like(hidden))
        if torch.compiler.is_compiling():
            hidden = hidden + 0.05 * (hidden - hidden.detach())
        return self.head(hidden)


WRONG_GRADIENT = program(Steeper)
NOISY = program(Noisy)
NOISY_WRONG_GRADIENT = program(NoisySteeper)
WRONG_ASIDE = program(Aside)
