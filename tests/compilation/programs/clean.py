"""No defect: a perceptron; one with batch normalisation, whose buffers move; several input shapes."""

from __future__ import annotations

from torch import Tensor, nn

from programs.parts import CLASSES, FEATURES, Perceptron, program


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.first(x)).relu())


PERCEPTRON = program(Perceptron)
NORMALISED = program(Normalised)
MANY_SHAPES = program(Perceptron, sizes=(8, 5, 3))
