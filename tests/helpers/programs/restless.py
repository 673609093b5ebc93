"""Programs that compile again and again: a size that grows with each call, and a change that comes late."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from programs.parts import Perceptron, program


class Growing(Perceptron):
    """Keeps every input it was given: no two calls have the same shapes inside."""

    def __init__(self) -> None:
        super().__init__()
        self.past: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.past.append(x.detach())
        context = torch.cat(self.past).mean(0)
        return self.head(torch.relu(self.first(x + context)))


class LateChange(Perceptron):
    """Changes its mode for good after three backward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.mode, self.passes = "early", 0
        self.first.weight.register_hook(self._count)

    def _count(self, gradient: Tensor) -> None:
        self.passes += 1
        if self.passes == 3:
            self.mode = "late"

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.head(nn.functional.relu(hidden) if self.mode == "early" else nn.functional.leaky_relu(hidden))


SHAPE_STORM = program(Growing)
LATE_CHANGE = program(LateChange)
