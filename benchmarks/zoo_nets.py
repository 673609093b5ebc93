"""Nets of torch alone, of every kind that people verify, for ``benchmarks/model_zoo.py``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional


class Residual(nn.Module):
    """A body beside an identity."""

    def __init__(self, *body: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*body)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class Recurrent(nn.Module):
    """A recurrent layer and a head on its last state."""

    def __init__(self, kind: type[nn.RNNBase], features: int = 4, hidden: int = 16) -> None:
        super().__init__()
        self.layer, self.head = kind(features, hidden, batch_first=True), nn.Linear(hidden, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.layer(x)[0][:, -1])
        return found


class Encoder(nn.Module):
    """torch's own transformer encoder and a head on the mean of tokens."""

    def __init__(self, *, norm_first: bool, activation: str) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, activation, batch_first=True, norm_first=norm_first)
        self.layers, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.layers(x).mean(dim=1))
        return found


class Dueling(nn.Module):
    """Values and advantages of actions."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.value, self.advantage = nn.Linear(64, 1), nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        advantage = self.advantage(hidden)
        found: Tensor = self.value(hidden) + advantage - advantage.mean(dim=1, keepdim=True)
        return found


class Graph(nn.Module):
    """Two rounds of messages over fixed edges, added up by ``index_add`` or by a matrix."""

    def __init__(self, *, scatter: bool) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 16), nn.Linear(16, 16), nn.Linear(16, 3)
        self.scatter = scatter
        source = torch.arange(12)
        self.register_buffer("source", source % 6)
        self.register_buffer("target", (source * 5 + 1) % 6)
        adjacency = torch.zeros(6, 6).index_put_((self.target, self.source), torch.ones(12), accumulate=True)
        self.register_buffer("adjacency", adjacency)

    def gathered(self, x: Tensor) -> Tensor:
        if not self.scatter:
            return self.adjacency @ x
        return torch.zeros_like(x).index_add(1, self.target, x[:, self.source])

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.relu(self.first(self.gathered(x)))
        hidden = functional.relu(self.second(self.gathered(hidden)))
        found: Tensor = self.head(hidden.mean(dim=1))
        return found


class UNet(nn.Module):
    """Down and up again, with skip connections."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU())
        self.inner = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU())
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.last = nn.Sequential(nn.Conv2d(16, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 1), nn.AvgPool2d(4))

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        found: Tensor = self.last(torch.cat([first, self.up(self.inner(first))], dim=1)).flatten(1)
        return found


class Mixture(nn.Module):
    """Experts, weighted by a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(dim=1)
        found: Tensor = sum(weights[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))  # type: ignore[assignment]
        return found


class Coupling(nn.Module):
    """An affine coupling, as normalising flows have them, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 6)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for net in self.nets:
            kept, moved = x.chunk(2, dim=1)
            scale, shift = net(kept).chunk(2, dim=1)
            x = torch.cat([moved * torch.tanh(scale).exp() + shift, kept], dim=1)
        return x


class Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(3 * x)


class Unit(nn.Module):
    """Vectors of length 1."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.normalize(x, dim=-1)


def mlp(activation: Callable[[], nn.Module], width: int = 64) -> nn.Module:
    layers = [nn.Linear(8, width), activation(), nn.Linear(width, width), activation(), nn.Linear(width, 5)]
    return nn.Sequential(*layers)


def _normed(norm: Callable[[int], nn.Module]) -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 32), norm(32), nn.ReLU(), nn.Linear(32, 32), norm(32), nn.ReLU(), nn.Linear(32, 4)
    )


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(16 * 49, 10),
    )  # fmt: skip


def _group_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(), nn.MaxPool2d(2),
        Residual(nn.Conv2d(8, 8, 3, padding=1), nn.InstanceNorm2d(8), nn.SiLU()),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10),
    )  # fmt: skip


def _temporal() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(3, 16, 3, padding=2, dilation=2), nn.LeakyReLU(),
        Residual(nn.Conv1d(16, 16, 3, padding=4, dilation=4), nn.LeakyReLU()),
        nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(16, 4),
    )  # fmt: skip


def _decoder() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 64), nn.ELU(), nn.Unflatten(1, (16, 2, 2)), nn.ConvTranspose2d(16, 8, 4, stride=2, padding=1),
        nn.Softplus(), nn.Upsample(scale_factor=2), nn.Conv2d(8, 1, 3, padding=1), nn.Sigmoid(), nn.Flatten(),
    )  # fmt: skip


def _embedding() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.Hardswish(), nn.Linear(32, 8), Unit())


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], float]] = {
    "mlp-relu": (lambda: mlp(nn.ReLU), (8,), 0.05),
    "mlp-tanh": (lambda: mlp(nn.Tanh), (8,), 0.05),
    "mlp-gelu": (lambda: mlp(nn.GELU), (8,), 0.05),
    "mlp-mish": (lambda: mlp(nn.Mish), (8,), 0.05),
    "siren": (lambda: mlp(Sine, 32), (8,), 0.01),
    "mlp-layernorm": (lambda: _normed(nn.LayerNorm), (8,), 0.05),
    "mlp-rmsnorm": (lambda: _normed(nn.RMSNorm), (8,), 0.05),
    "mlp-softmax": (lambda: nn.Sequential(mlp(nn.ReLU), nn.Softmax(dim=1)), (8,), 0.1),
    "cnn": (_cnn, (1, 28, 28), 0.01),
    "group-cnn": (_group_cnn, (3, 16, 16), 0.001),
    "temporal-cnn": (_temporal, (3, 24), 0.01),
    "unet": (UNet, (1, 16, 16), 0.005),
    "decoder": (_decoder, (4,), 0.02),
    "rnn": (lambda: Recurrent(nn.RNN), (6, 4), 0.01),
    "gru": (lambda: Recurrent(nn.GRU), (6, 4), 0.01),
    "lstm": (lambda: Recurrent(nn.LSTM), (6, 4), 0.01),
    "encoder-post": (lambda: Encoder(norm_first=False, activation="relu"), (6, 32), 0.005),
    "encoder-pre": (lambda: Encoder(norm_first=True, activation="gelu"), (6, 32), 0.005),
    "dueling-dqn": (Dueling, (8,), 0.05),
    "gnn-matrix": (lambda: Graph(scatter=False), (6, 4), 0.02),
    "gnn-scatter": (lambda: Graph(scatter=True), (6, 4), 0.02),
    "mixture": (Mixture, (8,), 0.05),
    "coupling": (Coupling, (6,), 0.02),
    "embedding": (_embedding, (8,), 0.02),
}
"""How each net is built, the shape of an instance and the box's radius."""
