"""Nothing is compiled, or not what counts, while all results are right."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from programs.parts import CLASSES, FEATURES, Perceptron, program


class Disabled(Perceptron):
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class NotANumber(Perceptron):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float("nan")


class NoSlope(Perceptron):
    """Its outputs are numbers, its gradients are not: the slope of a root at zero."""

    def forward(self, x: Tensor) -> Tensor:
        outputs = super().forward(x)
        return outputs + (outputs.sum() - outputs.sum()).abs().sqrt()


def sequential() -> nn.Module:
    """Compiled in place, a bare ``nn.Sequential`` is skipped by Dynamo as a part of PyTorch."""
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, CLASSES))


NOT_A_NUMBER = program(NotANumber)
NO_SLOPE = program(NoSlope)
DISABLED = program(Disabled)
SEQUENTIAL = program(sequential)
