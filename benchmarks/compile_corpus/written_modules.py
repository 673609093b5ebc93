"""Modules for :mod:`benchmarks.compile_corpus.written`, each with one common operation within a forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.compile_corpus.modules import HEADS, D
from benchmarks.compile_corpus.programs import Mlp


class Rounded(torch.autograd.Function):
    """Rounds, and lets gradients through as if it did not."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return (8 * x).round() / 8

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient


class Quantised(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(Rounded.apply(torch.tanh(self.first(x))))


class Ensemble(nn.Module):
    """Runs the same layer with several weights, by vmap."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(0.3 * torch.randn(3, 8, D)), nn.Parameter(torch.zeros(3, 8))

    def forward(self, x: Tensor) -> Tensor:
        each = torch.vmap(functional.linear, in_dims=(None, 0, 0))(x, self.weight, self.bias)
        return torch.tanh(each).mean(0)


class Forces(nn.Module):
    """Gives the slope of an energy, by torch.func.grad."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = Mlp(D, 32, 1)

    def forward(self, x: Tensor) -> Tensor:
        return -torch.func.grad(lambda place: self.energy(place).sum())(x)


class Cells(nn.Module):
    """Goes through a sequence cell by cell."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(D, D), nn.Linear(D, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = memory = torch.zeros_like(x[:, 0])
        for place in range(x.shape[1]):
            hidden, memory = self.cell(x[:, place], (hidden, memory))
        return self.head(hidden)


class Counting(Mlp):
    """Counts its calls and follows the mean of its inputs, in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(D))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.calls += 1
                self.mean.lerp_(x.mean(0), 0.1)
        return super().forward(x - self.mean.clone())


class Parts(Mlp):
    """Returns views: two halves of its result, and its input."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        output = super().forward(x)
        return output[:, :4], output[:, 4:], x


class Switching(Mlp):
    """Takes one of two ways, by its numbers."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.last(torch.tanh(hidden) if bool(x.sum() > 0) else torch.relu(hidden))


class Noisy(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.last(torch.tanh(hidden + 0.1 * torch.randn_like(hidden) * self.training))


class Growing(nn.Module):
    """Attends to all words so far, and gives the cache that has grown by one."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = self.lift(x).chunk(3, -1)
        keys, values = torch.cat([keys, key], 1), torch.cat([values, value], 1)
        shape = (x.shape[0], -1, HEADS, D // HEADS)
        split = (each.view(shape).transpose(1, 2) for each in (query, keys, values))
        mixed = functional.scaled_dot_product_attention(*split)
        return self.out(mixed.transpose(1, 2).reshape(x.shape)), keys, values


class Losing(Mlp):
    """Returns its own loss."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        output = super().forward(x)
        return output.square().mean(), output


class Hooked(Mlp):
    """Keeps, by a hook, the output of an inner layer."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Tensor] = {}
        self.first.register_forward_hook(lambda _module, _given, output: self.seen.update(first=output.detach()))


class Clamping(Mlp):
    """Clamps each gradient, by a hook, when it is there."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(_clamp)


def _clamp(parameter: Tensor) -> None:
    parameter.grad.clamp_(-0.05, 0.05)
