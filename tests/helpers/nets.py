"""Small networks and boxes for the verification tests."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from service.bounds.balls import BALLS, Ball
from service.bounds.interval import Interval
from service.bounds.methods import METHODS, BoundOptions
from service.bounds.network import Network, prepare
from service.jobs.spec.model import TransformerConfig
from service.models import build
from service.models.transformer import Transformer


def box_around(centre: Tensor, radius: float | Tensor) -> Interval:
    return Interval(centre - radius, centre + radius)


def ball_around(
    middle: Tensor, size: float, dtype: torch.dtype = torch.float64, *, order: int = 2, cut: float | None = None
) -> Ball:
    """A ball by the norm of an order, within the box around it; by norm 0, in [−1, 1] around. ``cut`` makes the box
    smaller.
    """
    reach = min(size if order else 1.0, size if order and cut is None else cut or 1.0)
    exact = middle.double()
    return BALLS[order].within(exact, size, Interval.about(exact, reach), dtype)


def output_bounds(network: Network, box: Interval, method: str, options: BoundOptions | None = None) -> Interval:
    """Bounds of all outputs, flattened."""
    size = network.graph.output.size
    identity = torch.eye(size, dtype=box.lower.dtype, device=box.lower.device)
    rows = torch.cat([identity, -identity]).reshape(1, 2 * size, *network.graph.output.shape)
    with torch.no_grad():
        bounds = METHODS[method](network, box, options or BoundOptions()).lower_bounds(rows)
    return Interval(bounds[:, :size], -bounds[:, size:])


def prepared(module: nn.Module, *shape: int) -> Network:
    return prepare(module, shape)


def samples(box: Interval, count: int, generator: torch.Generator) -> Tensor:
    """Random inputs of each box, half of them corners, ``(count, batch, *shape)``."""
    weights = torch.rand((count, *box.lower.shape), generator=generator, dtype=box.lower.dtype)
    weights[: count // 2] = weights[: count // 2].round()
    return box.lower + weights * (box.upper - box.lower)


class Residual(nn.Module):
    """``x + second(activation(first(x)))``."""

    def __init__(self, width: int, activation: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.activation = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), activation

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.activation(self.first(x)))


def mlp(widths: list[int], activation: nn.Module, seed: int, scale: float = 1.5) -> nn.Sequential:
    """Scaled up, so that bounds are loose enough for mistakes to show."""
    generator = torch.Generator().manual_seed(seed)
    layers: list[nn.Module] = []
    for index, (inputs, outputs) in enumerate(pairwise(widths)):
        layers += [nn.Linear(inputs, outputs), *([activation] if index < len(widths) - 2 else [])]
    net = nn.Sequential(*layers)
    redraw(net, generator, scale)
    return net


def redraw(module: nn.Module, generator: torch.Generator, scale: float = 1.5) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            fan_in = parameter.shape[-1]
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale / fan_in**0.5)


def transformer(mesh: Any = None, **fields: Any) -> Transformer:
    """Weights large enough that attention and gates are far from linear."""
    given = {"vocab_size": 16, "dim": 8, "layers": 1, "ffn_dim": 12, "max_sequence": 8, **fields}
    model = build(TransformerConfig.model_validate(given), mesh, dtype=torch.float64, seed=4)
    assert isinstance(model, Transformer)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.mul_(12)
    return model.eval().requires_grad_(False)


def tokens(sequence: int) -> Tensor:
    return torch.randint(0, 16, (2, sequence), generator=torch.Generator().manual_seed(2))


class Gated(nn.Module):
    """Two layers beside each other whose product goes into a third, added to the input."""

    def __init__(self, width: int = 6, hidden: int = 10) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, hidden), nn.Linear(width, hidden)
        self.down, self.last = nn.Linear(hidden, width), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))))
