"""Builds the networks of a parity folder from their safetensors, as plain modules that a peer can trace."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn


def plain(folder: Path, name: str) -> nn.Module:
    """``(batch, inputs)`` to ``(batch, 10)``, float32. Raises :class:`KeyError` for a network that is not known."""
    module = BUILT[name]()
    state = load_file(folder / f"model_{name}.safetensors")
    module.load_state_dict({key: value.float() for key, value in state.items()})
    return module.eval()


def chain(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Convolutions(nn.Sequential):
    def __init__(self) -> None:
        convolutions = nn.Conv2d(1, 16, 4, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 4, 2, 1), nn.ReLU()
        super().__init__(*convolutions, nn.Flatten(), nn.Linear(1568, 100), nn.ReLU(), nn.Linear(100, 10))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x.reshape(-1, 1, 28, 28))  # type: ignore[no-untyped-call]  # torch's is untyped
        return y


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, 2, 1)
        self.c1a, self.c1b = nn.Conv2d(16, 16, 3, 1, 1), nn.Conv2d(16, 16, 3, 1, 1)
        self.c2a, self.c2b = nn.Conv2d(16, 32, 3, 2, 1), nn.Conv2d(32, 32, 3, 1, 1)
        self.skip = nn.Conv2d(16, 32, 1, 2)
        self.f1, self.f2 = nn.Linear(2048, 100), nn.Linear(100, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x.reshape(-1, 3, 32, 32)))
        x = torch.relu(self.c1b(torch.relu(self.c1a(x))) + x)
        x = torch.relu(self.c2b(torch.relu(self.c2a(x))) + self.skip(x))
        y: Tensor = self.f2(torch.relu(self.f1(x.flatten(1))))
        return y


class Block(nn.Module):
    """Attention of 4 heads on 8 tokens of 32, then a ReLU layer of 64, both around a residual; no norms."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))
        self.f1, self.f2, self.head = nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(-1, 8, 32)
        q, k, v = (layer(x).reshape(-1, 8, 4, 8).permute(0, 2, 1, 3) for layer in (self.q, self.k, self.v))
        weights = torch.softmax(torch.matmul(q, k.permute(0, 1, 3, 2)) * 8**-0.5, dim=-1)
        x = x + self.o(torch.matmul(weights, v).permute(0, 2, 1, 3).reshape(-1, 8, 32))
        x = x + self.f2(torch.relu(self.f1(x)))
        y: Tensor = self.head(x.flatten(1))
        return y


BUILT: dict[str, Callable[[], nn.Module]] = {
    "a": lambda: chain(784, 256, 256, 256, 10),
    "b": lambda: chain(784, *[1024] * 6, 10),
    "c": Convolutions,
    "d": Residual,
    "e_plain": Block,
}
