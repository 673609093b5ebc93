"""No defect: a perceptron; one with batch normalisation, whose buffers move; several input shapes."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from programs.parts import CLASSES, FEATURES, Perceptron, program
from service.compilation.program.model import ModelProgram, SampleBatch


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.first(x)).relu())


class Looking(nn.Module):
    """Its table has sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8, sparse=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table((x.abs() * 5).long().clamp(max=19)).sum(1))


PERCEPTRON = program(Perceptron)
NORMALISED = program(Normalised)
LOOKING = program(Looking)
MANY_SHAPES = program(Perceptron, sizes=(8, 5, 3))


def on(device: str, given: ModelProgram) -> ModelProgram:
    """The same program on another device."""
    batches = tuple(
        SampleBatch(tuple(value.to(device) for value in each.inputs), each.targets.to(device)) for each in given.batches
    )
    return replace(given, module=lambda dtype: given.module(dtype).to(device), batches=batches)
