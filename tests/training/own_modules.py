"""Modules as a package may have them, and trainings of them in place of an mlp."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from training_runs import JOB, train

from service.models import registry
from service.models.initialize import Distribution, Uniform
from service.parallel.mesh import SINGLE

SPEC: dict[str, Any] = {
    "model": {"family": "mlp", "in_features": 64, "hidden": [8], "out_features": 10},
    "data": {"source": "digits"},
    "batch": {"global": 24},
    "optimizer": {"lr": 1e-2},
    "schedule": {"decay": "constant"},
    "checkpoint": {"every": 2, "keep": 9},
    "steps": 4,
}


class Tied(nn.Module):
    """Two layers with one weight, a last one that starts at zero, and a constant."""

    def __init__(self, dropout: float, scalar: bool = False) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(64, 8), nn.Linear(8, 10)
        self.a, self.b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.b.weight = self.a.weight
        nn.init.normal_(self.a.weight, std=0.5)
        nn.init.zeros_(self.leave.weight)
        self.scale = torch.full((8,), 2.0)
        self.drop = nn.Dropout(dropout)
        self.temperature = nn.Parameter(torch.ones(() if scalar else (1,)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(self.drop(torch.tanh(self.a(torch.tanh(self.enter(x)) * self.scale))))
        return self.leave(x) * self.temperature


class Chosen(nn.Module):
    """Layers of one size, of which the samples of a forward choose one or none."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(64, 8), nn.Linear(8, 10)
        self.some, self.others, self.never = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x, mean = torch.tanh(self.enter(x)), x.mean()
        if mean > MEANS[0]:
            x = torch.tanh((self.some if mean > MEANS[1] else self.others)(x))
        return self.leave(x)


MEANS = (0.302, 0.31)
"""Of the pixels of 12 samples, a third are below, and a third above."""


class Part(nn.Module):
    """Layers of one size, of which the samples of a forward choose one."""

    def __init__(self) -> None:
        super().__init__()
        self.some, self.others = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, mean: Tensor) -> Tensor:
        return torch.tanh((self.some if mean > MEANS[1] else self.others)(x))


class Chain(nn.Module):
    """Blocks of one size, of which the samples of a forward choose one."""

    before_blocks, after_blocks, output_axis = ("enter",), ("leave",), SINGLE

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(64, 8), nn.Linear(8, 10)
        self.blocks = nn.ModuleDict({str(index): Part() for index in range(2)})

    def forward(self, x: Tensor) -> Tensor:
        x, mean = torch.tanh(self.enter(x)), x.mean()
        x = self.blocks["0" if mean > MEANS[0] else "1"](x, mean)
        return self.leave(x)

    def distribution(self, name: str) -> Distribution:
        return Uniform(0.3)


class Resting(Tied):
    """Has a part that is always in evaluation, by its constructor."""

    def __init__(self) -> None:
        super().__init__(0.5)
        self.drop.eval()


class Restful(Tied):
    """Has one by its own ``train``, which is called with every change of mode."""

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.drop.eval()
        return self


class Drawing(Tied):
    """Draws from the generators of NumPy and of Python."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.sin(x * np.random.uniform(0.5, 2))) * random.uniform(0.5, 2)


class Hooked(Chosen):
    def __init__(self) -> None:
        super().__init__()
        self.enter.weight.register_hook(lambda gradient: gradient / 2)


class Listed(Chosen):
    def __init__(self) -> None:
        super().__init__()
        self.weights = {"enter": [self.enter.weight]}


class Limited(nn.Module):
    """Writes to its only parameter in its forward, as an embedding with ``max_norm`` does."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(64, 10, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.enter.weight.clamp_(-0.05, 0.05)
        return self.enter(x)


class Moving(Chosen):
    """Takes from its inputs their running mean, that of this batch included."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(dim=0)
        return super().forward(x - self.mean)


class Warming(Chosen):
    def __init__(self) -> None:
        super().__init__()
        self.calls = [0]

    def forward(self, x: Tensor) -> Tensor:
        self.calls[0] += self.training
        return super().forward(x) * min(1.0, self.calls[0] / 10)


def run(folder: str | Path, dropout: float, *, scalar: bool = False, job_id: str = JOB, **changes: Any) -> Any:
    """A training of that module in place of an mlp, in float64."""
    return run_of(lambda: Tied(dropout, scalar), folder, job_id=job_id, **changes)


def run_of(make: Callable[[], nn.Module], folder: str | Path, *, job_id: str = JOB, **changes: Any) -> Any:
    with patch.object(registry, "FAMILIES", SimpleNamespace(function=lambda family: lambda config, axis: make())):
        return train(folder, {**SPEC, **changes}, job_id=job_id, test_samples=8, state=torch.float64)
