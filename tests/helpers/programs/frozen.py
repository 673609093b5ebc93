"""Parameters that training does not reach: cut off in the model, not used by the loss, or nothing left to train."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from programs.parts import CLASSES, FEATURES, Perceptron, program
from service.compilation.program import Parts
from service.compilation.program.model import ModelProgram


class CutOff(Perceptron):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.first(x)).detach())


class Pooling(nn.Module):
    """Gives beside its scores, as encoders do, what its pooler makes of them; its loss is of the scores alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head, self.pooler = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES), nn.Linear(8, 4)
        self.spare = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.relu(self.first(x))
        return self.head(hidden), torch.tanh(self.pooler(hidden))


class CutOffPooling(Pooling):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.relu(self.first(x)).detach()
        return self.head(hidden), torch.tanh(self.pooler(hidden))


class Decaying(ModelProgram):
    """Takes a part off each parameter that has a gradient, be it zero."""

    def _parts(self, modules: Mapping[str, nn.Module], dtype: torch.dtype, group: str) -> Parts:
        parts = super()._parts(modules, dtype, group)
        for settings in parts.optimizers[0].param_groups:
            settings["weight_decay"] = 1.0
        return parts


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
UNUSED = program(Pooling)
CUT_OFF_BESIDE_UNUSED = program(CutOffPooling)
DECAYING = Decaying(UNUSED.module, UNUSED.batches)
UNTRAINABLE = program(untrainable)
CUT_OFF_FOR_ONE = program(CutOffForOne, sizes=(8, 5))
