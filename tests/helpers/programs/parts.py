"""What the planted programs share: a small perceptron, and batches for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from service.compilation.program.model import ModelProgram, SampleBatch

FEATURES, CLASSES = 6, 3


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.first(x)))


def batches(sizes: Sequence[int] = (5,)) -> tuple[SampleBatch, ...]:
    generator = torch.Generator().manual_seed(7)
    return tuple(
        SampleBatch(
            (torch.randn(size, FEATURES, generator=generator),),
            torch.randint(CLASSES, (size,), generator=generator),
        )
        for size in sizes
    )


def program(module: Callable[[], nn.Module], sizes: Sequence[int] = (5,)) -> ModelProgram:
    def build(dtype: torch.dtype) -> nn.Module:
        torch.manual_seed(3)
        return module().to(dtype)

    return ModelProgram(build, batches(sizes))
