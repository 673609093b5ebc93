"""Graph breaks: a side effect in Python, a branch on what a tensor holds, a hook. Results stay right."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from programs.parts import Perceptron, program


class Chatty(Perceptron):
    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        print("hidden", end="")  # BREAK: side effect
        return self.head(hidden)


class Undecided(Perceptron):
    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        if hidden.sum() > 0:  # BREAK: branch
            hidden = hidden * 2
        return self.head(hidden)


class Hooked(Perceptron):
    """Somebody's hook on a layer: it is traced with the layer, and cannot be."""

    def __init__(self) -> None:
        super().__init__()
        self.first.register_forward_hook(_tell)


def _tell(_layer: nn.Module, _inputs: object, _output: Tensor) -> None:
    print("forward", end="")  # BREAK: hook


SIDE_EFFECT = program(Chatty)
HOOK = program(Hooked)
BRANCH = program(Undecided)


def line_of(mark: str) -> int:
    """The line of this file that breaks the graph."""
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, start=1) if line.endswith(f"# BREAK: {mark}"))
