"""Networks whose rounding shows, and what is exactly true of them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from fractions import Fraction
from functools import cache

import torch
from nets import mlp, prepared
from torch import Tensor, nn

from service.bounds.interval import Interval
from service.bounds.network import Network, prepare
from service.bounds.options import BoundOptions
from service.bounds.rigorous import rigorous_crown
from service.formats.vnnlib import Disjunct, Halfspace, Query
from service.verification.bab.model import ModelUnderVerification
from service.verification.engine import PLAIN, RIGOROUS, NetworkEngine

DOUBLE = torch.float64


def exactly(module: nn.Sequential, x: Sequence[float]) -> list[Fraction]:
    """A ReLU network's output over the rational numbers."""
    values = [Fraction(entry) for entry in x]
    for layer in module:
        if isinstance(layer, nn.ReLU):
            values = [max(value, Fraction(0)) for value in values]
            continue
        assert isinstance(layer, nn.Linear)
        weight, bias = layer.weight.tolist(), layer.bias.tolist()
        values = [
            sum((Fraction(w) * v for w, v in zip(row, values, strict=True)), Fraction(b))
            for row, b in zip(weight, bias, strict=True)
        ]
    return values


def check_exactly(module: nn.Sequential, points: Tensor, bounds: Tensor) -> None:
    """No output over the rational numbers is beyond its bounds: first all lower ones, then all upper ones, negated."""
    for x in points.tolist():
        values = exactly(module, x)
        lower, upper = bounds[0, : len(values)].tolist(), bounds[0, len(values) :].tolist()
        for value, low, high in zip(values, lower, upper, strict=True):
            assert Fraction(low) <= value <= -Fraction(high)


def corners(box: Interval, count: int, seed: int = 6) -> Tensor:
    is_upper = torch.rand(count, box.lower.shape[1], generator=torch.Generator().manual_seed(seed)) < 0.5
    return torch.where(is_upper, box.upper, box.lower)


def rigorous_lower_bounds(network: Network, box: Interval, rows: Tensor) -> Tensor:
    return rigorous_crown(network, box, BoundOptions()).lower_bounds(rows)


def both_sides(size: int) -> Tensor:
    identity = torch.eye(size, dtype=DOUBLE)
    return torch.cat([identity, -identity])[None]


@cache
def cancelling(seed: int) -> tuple[nn.Sequential, Network, Network]:
    """Large terms whose sum is small, so that rounding shows; as a network in float32 and in float64."""
    net = mlp([4, 12, 12, 2], nn.ReLU(), seed)
    with torch.no_grad():
        for layer in net:
            if isinstance(layer, nn.Linear):
                layer.weight.mul_(30)
                layer.bias.mul_(1e3)
    single = prepared(net, 4)
    return net.double(), single, prepared(net.double(), 4)


def linear(weight: list[list[float]]) -> nn.Linear:
    layer = nn.Linear(len(weight[0]), len(weight), dtype=DOUBLE)
    layer.weight.data, layer.bias.data = torch.tensor(weight, dtype=DOUBLE), torch.zeros(len(weight), dtype=DOUBLE)
    return layer


def vanishing(bits: int) -> nn.Sequential:
    """``y = x`` for x ≥ 0: x times the difference of two products that come out the same when they are rounded.

    ``(2^b + 1)² − 2^b (2^b + 2) = 1``, and the first product needs ``2 b + 1`` bits.
    """
    large = 2.0**bits
    weights = [[[1.0], [1.0]], [[large + 1, 0.0], [0.0, large]], [[large + 1, 0.0], [0.0, large + 2]], [[1.0, -1.0]]]
    layers = [layer for weight in weights for layer in (linear(weight), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def subject(module: nn.Module, features: int, dtype: torch.dtype, *, rigorous: bool) -> ModelUnderVerification:
    float64_module = copy.deepcopy(module).double().eval().requires_grad_(False)
    own = copy.deepcopy(float64_module).to(dtype)
    engine = NetworkEngine(prepare(own, (features,)), RIGOROUS if rigorous else PLAIN)
    return ModelUnderVerification(own, engine, float64_module, None, dtype)


def above(features: int, radius: float, *thresholds: float) -> Query:
    """Is there an input of the box with an output above its threshold?"""
    cases = (
        Disjunct((-radius,) * features, (radius,) * features, (Halfspace(((index, -1.0),), -threshold),))
        for index, threshold in enumerate(thresholds)
    )
    return Query(features, len(thresholds), tuple(cases))
