"""A model of several blocks, of which a faulty compiler gets one wrong."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from programs.parts import CLASSES, FEATURES

WRONG = "relu_accuracy_error_TESTING_ONLY"
"""A backend of PyTorch's own tests that adds one where a graph has ``torch.relu``."""


class Block(nn.Module):
    def __init__(self, bends: bool) -> None:
        super().__init__()
        self.layer, self.bends = nn.Linear(8, 8), bends

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        return 2 * (torch.relu(hidden) if self.bends else torch.tanh(hidden))


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(FEATURES, 8)
        self.blocks = nn.ModuleList([Block(False), Block(True), Block(False)])
        self.leave = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)
