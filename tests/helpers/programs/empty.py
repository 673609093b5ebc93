"""Nothing is compiled, or not what counts, while all results are right."""

from __future__ import annotations

import torch
from torch import Tensor

from programs.parts import Perceptron, program


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


class BreakingInALoop(Perceptron):
    """Dynamo compiles nothing of a function whose loop breaks the graph: here, that asks for the number of rows."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        for column in range(2):
            hidden = hidden + len(hidden[:, column].nonzero())
        return self.head(hidden)


NOT_A_NUMBER = program(NotANumber)
NO_SLOPE = program(NoSlope)
DISABLED = program(Disabled)
BREAKING_IN_A_LOOP = program(BreakingInALoop)
