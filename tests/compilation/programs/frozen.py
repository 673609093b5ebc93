"""Parameters that training does not reach: cut off in the model, or nothing left to train."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from programs.parts import Perceptron, program


class CutOff(Perceptron):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.first(x)).detach())


def untrainable() -> nn.Module:
    return Perceptron().requires_grad_(False)


CUT_OFF = program(CutOff)
UNTRAINABLE = program(untrainable)
