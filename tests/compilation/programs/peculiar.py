"""Right as they are, but easily taken for wrong: random draws, an input updated in place."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from programs.parts import Perceptron, program


class Dropping(Perceptron):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(nn.functional.dropout(torch.relu(self.first(x)), 0.5, self.training))


class InPlace(Perceptron):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2).add_(1)
        return super().forward(x)


DROPOUT = program(Dropping)
IN_PLACE = program(InPlace)
