"""Every operator, alone between two layers: no input of a random box leaves the bounds, in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nets import output_bounds, prepared, redraw, samples
from torch import Tensor, nn
from torch.nn import functional

from service.bounds.interval import Interval
from service.bounds.methods import METHODS
from service.bounds.network import Network
from service.bounds.rules import RULES

Build = Callable[["Operator", Tensor], Tensor]


class Operator(nn.Module):
    """``last(build(first(x)))`` of ``(batch, 6)``; ``build`` gets ``(batch, 16)``."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.build = build
        self.first, self.second = nn.Linear(6, 16), nn.Linear(6, 16)
        self.image, self.grouped = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 4, 2, stride=2, groups=2)
        self.line, self.dilated = nn.Conv1d(2, 3, 3, stride=2, padding=1), nn.Conv1d(2, 3, 2, dilation=3, bias=False)
        self.up, self.uneven = nn.ConvTranspose2d(1, 2, 2, stride=2), nn.ConvTranspose1d(2, 3, 3, 2, 1, 1, groups=1)
        self.batch_norm = nn.BatchNorm2d(1)
        self.layer_norm, self.rms_norm = nn.LayerNorm(16), nn.RMSNorm(16)
        self.vector = nn.Parameter(torch.empty(16))
        redraw(self, torch.Generator().manual_seed(11), scale=1.0)
        generator = torch.Generator().manual_seed(12)
        self.batch_norm.running_mean.normal_(generator=generator)
        self.batch_norm.running_var.uniform_(0.5, 2, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        return self.build(self, x)


def picture(m: Operator, x: Tensor) -> Tensor:
    return m.first(x).view(-1, 1, 4, 4)


def positive(m: Operator, x: Tensor) -> Tensor:
    return torch.exp(m.first(x) / 4) + 0.1


def attention(m: Operator, x: Tensor) -> Tensor:
    q, k = m.first(x).view(-1, 2, 4, 2), m.second(x).view(-1, 2, 4, 2)
    return torch.softmax(q @ k.transpose(-1, -2) / 2, dim=-1) @ k


INDEX = torch.tensor([3, 0, 3, 15])
MASK = torch.tensor([True, False] * 8)
LINEAR: dict[str, Build] = {
    "conv2d": lambda m, x: m.image(picture(m, x)),
    "conv2d with groups and stride": lambda m, x: m.grouped(m.image(picture(m, x))),
    "conv1d with stride": lambda m, x: m.line(m.first(x).view(-1, 2, 8)),
    "dilated conv1d without bias": lambda m, x: m.dilated(m.first(x).view(-1, 2, 8)),
    "transposed conv2d": lambda m, x: m.up(picture(m, x)),
    "transposed conv1d with padding": lambda m, x: m.uneven(m.first(x).view(-1, 2, 8)),
    "batch norm": lambda m, x: m.batch_norm(picture(m, x)),
    "average pool": lambda m, x: functional.avg_pool2d(picture(m, x), 2),
    "average pool with padding": lambda m, x: functional.avg_pool2d(picture(m, x), 3, 2, 1),
    "global average": lambda m, x: functional.adaptive_avg_pool2d(m.image(picture(m, x)), 1).flatten(1),
    "sum": lambda m, x: picture(m, x).sum(dim=(1, 3)),
    "mean": lambda m, x: picture(m, x).mean(dim=-1, keepdim=True),
    "index": lambda m, x: torch.index_select(m.first(x), 1, INDEX),
    "element": lambda m, x: picture(m, x)[:, 0, -1],
    "split": lambda m, x: torch.cat(torch.split(m.first(x), [5, 11], dim=1)[::-1], dim=1),
    "zero padding": lambda m, x: functional.pad(picture(m, x), (1, 0, 2, 1)),
    "padding with a value, and cropping": lambda m, x: functional.pad(picture(m, x), (1, -1, 0, 2), value=1.5),
    "concatenation with a constant": lambda m, x: torch.cat([m.vector.expand(x.shape[0], 16), m.first(x)], dim=1),
    "choice by a mask": lambda m, x: torch.where(MASK, m.first(x), m.second(x)),
    "choice of a constant": lambda m, x: torch.where(MASK, m.first(x), m.vector),
    "matrices by dimension": lambda m, x: m.first(x).view(-1, 2, 2, 4) @ m.vector.view(2, 4, 2),
    "one matrix against many": lambda m, x: m.first(x).view(-1, 1, 4, 4) @ m.vector.view(2, 4, 2),
}
NONLINEAR: dict[str, Build] = {
    "product": lambda m, x: m.first(x) * m.second(x),
    "product with broadcasting": lambda m, x: picture(m, x) * m.second(x)[:, :4].view(-1, 1, 4, 1),
    "square by product": lambda m, x: (h := m.first(x)) * h,
    "matrix product": lambda m, x: m.first(x).view(-1, 4, 4) @ m.second(x).view(-1, 4, 4),
    "quotient": lambda m, x: m.second(x) / positive(m, x),
    "constant over": lambda m, x: 2.5 / positive(m, x) + m.vector / positive(m, x),
    "square": lambda m, x: m.first(x) ** 2,
    "cube": lambda m, x: m.first(x) ** 3,
    "fourth power": lambda m, x: torch.pow(m.first(x), 4),
    "broken power": lambda m, x: positive(m, x) ** 1.5,
    "root": lambda m, x: torch.sqrt(positive(m, x)),
    "root that touches zero": lambda m, x: torch.sqrt(torch.relu(m.first(x))),
    "logarithm": lambda m, x: torch.log(positive(m, x)),
    "reciprocal": lambda m, x: torch.reciprocal(positive(m, x)) - 1 / -positive(m, x),
    "absolute": lambda m, x: m.first(x).abs(),
    "sine": lambda m, x: torch.sin(2 * m.first(x)),
    "cosine": lambda m, x: torch.cos(m.first(x)),
    "silu": lambda m, x: functional.silu(m.first(x)),
    "error function": lambda m, x: torch.erf(m.first(x)),
    "floor": lambda m, x: torch.floor(m.first(x)),
    "clamp": lambda m, x: m.first(x).clamp(-0.5, 0.7) + functional.relu6(m.first(x)),
    "maximum and minimum": lambda m, x: torch.maximum(m.first(x), m.second(x)) * torch.minimum(m.first(x), m.vector),
    "max pool": lambda m, x: functional.max_pool2d(picture(m, x), 2),
    "max pool with padding": lambda m, x: functional.max_pool2d(picture(m, x), 3, 2, 1),
    "softmax": lambda m, x: torch.softmax(m.first(x), dim=-1),
    "attention": attention,
    "layer norm": lambda m, x: m.layer_norm(m.first(x)),
    "rms norm": lambda m, x: m.rms_norm(m.first(x)),
}


class Together(nn.Module):
    """All operators side by side: tracing takes far longer than bounding."""

    def __init__(self, builds: dict[str, Build]) -> None:
        super().__init__()
        self.builds, self.inner = builds, Operator(lambda m, x: x)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([build(self.inner, x).flatten(1) for build in self.builds.values()], dim=1)

    def names(self) -> list[str]:
        """Of the operator that each output comes from."""
        x = torch.zeros(1, 6, dtype=torch.float64)
        sizes = {name: build(self.inner, x).flatten(1).shape[1] for name, build in self.builds.items()}
        return [name for name, size in sizes.items() for _ in range(size)]


@cache
def made(linear: bool) -> tuple[Together, Network]:
    module = Together(LINEAR if linear else NONLINEAR).double().eval()
    return module, prepared(module, 6)


def blame(module: Together, wrong: Tensor) -> set[str]:
    """The operators with a wrong output, of ``(…, outputs)``."""
    positions = wrong.flatten(0, -2).any(dim=0).nonzero().squeeze(1).tolist()
    names = module.names()
    return {names[position] for position in positions}


@pytest.mark.parametrize("linear", [True, False])
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**31), radius=st.sampled_from([0.0, 1e-3, 0.1, 0.5, 3.0]))
def test_no_input_leaves_the_bounds(linear: bool, seed: int, radius: float) -> None:
    module, network = made(linear)
    generator = torch.Generator().manual_seed(seed)
    centre = torch.randn(2, 6, generator=generator, dtype=torch.float64)
    radii = radius * torch.rand(2, 6, generator=generator, dtype=torch.float64)
    box = Interval(centre - radii, centre + radii)
    drawn = samples(box, 60, generator)
    values = torch.stack([module(x) for x in drawn]).detach()
    for method in METHODS:
        bounds = output_bounds(network, box, method)
        slack = 1e-11 * (1 + values.abs())
        assert not blame(module, bounds.lower > values + slack), method
        assert not blame(module, bounds.upper < values - slack), method


@pytest.mark.parametrize("linear", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_bounds_shrink_to_the_value(linear: bool, method: str) -> None:
    """Soundness alone would allow infinite bounds; around a point they must close in."""
    module, network = made(linear)
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    value, bounds = module(x), output_bounds(network, Interval(x - 1e-9, x + 1e-9), method)
    loose = bounds.width > 1e-5 * (1 + value.abs())
    assert not blame(module, loose)


def test_linear_operators_are_exact() -> None:
    module, network = made(True)
    assert not network.nonlinear
    x = torch.randn(2, 6, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    jacobian = torch.func.vmap(torch.func.jacrev(lambda each: module(each[None])[0]))(x)
    bounds, value = output_bounds(network, Interval(x - 0.3, x + 0.3), "crown"), module(x)
    reach = 0.3 * jacobian.abs().sum(dim=2)
    assert not blame(module, (bounds.lower - value + reach).abs() > 1e-11 * (1 + value.abs() + reach))
    assert not blame(module, (bounds.upper - value - reach).abs() > 1e-11 * (1 + value.abs() + reach))


def test_a_root_of_what_may_be_negative_has_no_bounds() -> None:
    network = prepared(Operator(lambda m, x: torch.sqrt(m.first(x))).double(), 6)
    box = Interval(torch.full((1, 6), -9.0, dtype=torch.float64), torch.full((1, 6), 9.0, dtype=torch.float64))
    for method in METHODS:
        assert (output_bounds(network, box, method).lower == -torch.inf).all()


def test_every_rule_is_covered() -> None:
    reached = {node.operator for linear in (True, False) for node in made(linear)[1].graph.nodes[1:]}
    elsewhere = {
        "tanh",
        "sigmoid",
        "gelu",
        "leaky_relu",
        "addmm",
        "mm",
        "_to_copy",
        "alias",
        "detach",
        "clone",
        "squeeze",
    }
    known = {name for name in RULES if name.startswith("aten.") and name.split(".")[1] not in elsewhere}
    assert known - reached <= {
        "aten._unsafe_view.default", "aten.reshape.default", "aten.unsqueeze.default", "aten.permute.default",
        "aten.neg.default", "aten.expand.default", "aten.rsqrt.default",
    }, known - reached  # fmt: skip
