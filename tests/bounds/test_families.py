"""Every member of a family is sound, and ascent never ends below where it started."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lanes import examples, first_fast
from nets import mlp, output_bounds, prepared, samples
from torch import Tensor, nn

from service.bounds.graph import Node, Ref
from service.bounds.interval import Interval
from service.bounds.linear.plain import Pass
from service.bounds.methods import BoundOptions
from service.bounds.methods.base import rows_at_once
from service.bounds.methods.layers import bound_layers, one_pass
from service.bounds.network import Network
from service.bounds.operators import OPERATORS
from service.bounds.optimise import Ascent, Families
from service.bounds.relaxation import Relaxed

FUNCTIONS = {
    "relu": torch.relu,
    "leaky relu": lambda x: nn.functional.leaky_relu(x, 0.1),
    "abs": torch.abs,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "gelu": nn.functional.gelu,
    "silu": nn.functional.silu,
    "exp": torch.exp,
    "erf": torch.erf,
    "sin": torch.sin,
    "cos": torch.cos,
    "square": torch.square,
    "cube": lambda x: x**3,
    "log": lambda x: torch.log(x * x + 0.5),
    "root": lambda x: torch.sqrt(x * x + 0.5),
    "reciprocal": lambda x: 1 / (x * x + 0.5),
    "product": lambda x: x * x.flip(-1).tanh(),
    "softmax": lambda x: torch.softmax(x, dim=-1),
    "layer norm": lambda x: nn.functional.layer_norm(x, (6,)),
    "matrix product": lambda x: (x.view(-1, 3, 2) @ torch.relu(x).view(-1, 2, 3)).flatten(1),
}


class Alone(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.function = FUNCTIONS[name]
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 6))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.function(x * self.scale)
        return y


@cache
def alone(name: str) -> tuple[nn.Module, Network]:
    module = Alone(name).double()
    return module, prepared(module, 6)


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
@settings(max_examples=examples(2, 8), deadline=None)
@given(seed=st.integers(0, 10**6), radius=st.sampled_from([0.0, 1e-3, 0.1, 1.0]))
def test_members_chosen_at_random_are_sound(name: str, seed: int, radius: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(2, 6, generator=generator, dtype=torch.float64)
    module, network = alone(name)
    box = Interval(z - radius, z + radius)
    backward = bound_layers(network, box, BoundOptions(), one_pass)
    families = Families(backward)
    rows = torch.randn(1, 5, *network.graph.output.shape, generator=generator, dtype=torch.float64)
    chosen = {node.name: _member(families, node.name, 5, generator) for node in network.nonlinear}
    bounds = replace(backward, relaxations=chosen).lower_bounds(network.graph.output.name, rows)
    for x in samples(box, 40, generator):
        values = module(x).flatten(1) @ rows[0].flatten(1).T
        assert (bounds <= values + 1e-9 * (1 + values.abs())).all()


def _member(families: Families, name: str, rows: int, generator: torch.Generator) -> Relaxed:
    """Parameters of 0 and 1 now and then, since those are where a family ends."""
    family = families[name]
    drawn = (
        torch.rand(len(each), rows, *each.shape[1:], generator=generator, dtype=torch.float64) * 1.5 - 0.25
        for each in family.start
    )
    return family.member(tuple(each.clamp(0, 1) for each in drawn))


@pytest.mark.parametrize("activation", first_fast(2, [nn.ReLU(), nn.Tanh(), nn.LeakyReLU(0.2), nn.GELU()]), ids=repr)
def test_ascent_tightens_and_stays_sound(activation: nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    module = mlp([5, 12, 12, 4], activation, seed=2).double()
    network = prepared(module, 5)
    centre = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    box = Interval(centre - 0.2, centre + 0.2)
    plain = output_bounds(network, box, "crown")
    fixed = output_bounds(network, box, "alpha-crown (fixed intermediate bounds)")
    found = output_bounds(network, box, "alpha-crown")
    assert fixed.width.mean() < plain.width.mean() * 0.999
    assert found.width.mean() < fixed.width.mean()
    for x in samples(box, 200, generator):
        y = module(x)
        assert (found.lower <= y + 1e-9).all()
        assert (found.upper >= y - 1e-9).all()


def test_parts_do_not_change_the_bounds() -> None:
    module = mlp([5, 12, 12, 4], nn.ReLU(), seed=4).double()
    network = prepared(module, 5)
    centre = torch.linspace(-1, 1, 15, dtype=torch.float64).reshape(3, 5)
    box = Interval(centre - 0.2, centre + 0.2)
    whole, little = BoundOptions(ascent=Ascent(6)), BoundOptions(ascent=Ascent(6), elements=32 * 3 * 12 * 5)
    backward = Pass(network, {network.graph.input.name: box}, {})
    assert rows_at_once(backward, network.graph.output.name, little.optimising(0)) == 5
    expected, found = (output_bounds(network, box, "alpha-crown", options) for options in (whole, little))
    torch.testing.assert_close(found.lower, expected.lower, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.upper, expected.upper, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("slope", [0.0, 0.5, 1.0])
def test_leaky_relu_of_any_slope_has_a_family(slope: float) -> None:
    node = Node("f", "aten.leaky_relu.default", {"self": Ref("z"), "negative_slope": slope}, (2,), ((2,),))
    bounds = Interval(torch.tensor([[-1.0, -3.0]]), torch.tensor([[2.0, 1.0]]))
    family = OPERATORS[node.operator].family(node, [bounds])  # type: ignore[attr-defined]
    relaxed = family.member(tuple(each.unsqueeze(1) for each in family.start))
    (through,), bias = relaxed.backward(torch.ones(1, 1, 2))
    assert through.isfinite().all()
    assert bias is None or bias.isfinite().all()
