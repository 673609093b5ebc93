"""Parameters that training does not reach: cut off in the model, or nothing left to train."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from programs.parts import Perceptron, program


class CutOff(Perceptron):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.first(x)).detach())


class CutOffForOne(nn.Module):
    """Compiled, and only for batches of 5, the shift of the outputs gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Perceptron()
        self.shift = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        shift = self.shift.detach() if torch.compiler.is_compiling() and len(x) == 5 else self.shift
        return self.inner(x) + 0.1 * shift


def untrainable() -> nn.Module:
    return Perceptron().requires_grad_(False)


CUT_OFF = program(CutOff)
UNTRAINABLE = program(untrainable)
CUT_OFF_FOR_ONE = program(CutOffForOne, sizes=(8, 5))
