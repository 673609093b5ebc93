"""Whole networks: no input of the box, random or attacked, leaves the bounds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lanes import examples, slow_but_for
from nets import Residual, box_around, mlp, output_bounds, prepared, redraw, samples
from torch import Tensor, nn

from service.bounds.interval import Interval
from service.bounds.methods import METHODS, BoundOptions
from service.bounds.network import Network
from service.bounds.optimise import Ascent

DEEP = [5, 12, 10, 12, 8, 4]
NETWORKS: dict[str, nn.Module] = {
    "relu": mlp(DEEP, nn.ReLU(), seed=1),
    "tanh": mlp(DEEP, nn.Tanh(), seed=2),
    "gelu": mlp(DEEP, nn.GELU(), seed=3),
    "sigmoid and exp": nn.Sequential(mlp([5, 8, 8, 6], nn.Sigmoid(), seed=4), nn.Tanh(), nn.Linear(6, 3)),
    "leaky relu, residual": nn.Sequential(
        nn.Linear(5, 8), Residual(8, nn.LeakyReLU(0.1)), nn.ReLU(), Residual(8, nn.ReLU()), nn.Linear(8, 3), nn.ReLU()
    ),
}
redraw(NETWORKS["leaky relu, residual"], torch.Generator().manual_seed(5))

SHORT = Ascent(iterations=8)
"""Bounds hold wherever an ascent ends."""


@pytest.fixture(params=slow_but_for(NETWORKS, "relu", "gelu", "leaky relu, residual"), scope="module")
def network(request: pytest.FixtureRequest) -> tuple[nn.Module, Network]:
    module = NETWORKS[request.param].double()
    return module, prepared(module, 5)


def attacked(module: nn.Module, box: Interval, sign: int, steps: int = 12) -> Tensor:
    """Projected gradient on every output: the most extreme outputs found, ``(batch, outputs)``."""
    outputs = module(box.centre).shape[1]
    x = box.centre.repeat(outputs, 1, 1)
    for _ in range(steps):
        x.requires_grad_()
        (gradient,) = torch.autograd.grad(sign * _own(module(x.flatten(0, 1)), outputs).sum(), x)
        x = torch.minimum(torch.maximum(x.detach() + gradient.sign() * box.width / 6, box.lower), box.upper)
    return _own(module(x.flatten(0, 1)), outputs).detach()


def _own(values: Tensor, outputs: int) -> Tensor:
    """Of the inputs that were moved for each output, this output: ``(batch, outputs)``."""
    return values.unflatten(0, (outputs, -1)).diagonal(dim1=0, dim2=2)


@pytest.mark.parametrize("intersect", slow_but_for([True, False], True))
@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=examples(2, 6), deadline=None)
@given(seed=st.integers(0, 2**31), radius=st.sampled_from([0.0, 1e-3, 0.1, 1.0, 20.0]))
def test_no_input_leaves_the_bounds(
    network: tuple[nn.Module, Network], method: str, intersect: bool, seed: int, radius: float
) -> None:
    module, prepared_network = network
    generator = torch.Generator().manual_seed(seed)
    box = box_around(torch.randn(3, 5, generator=generator, dtype=torch.float64), radius)
    bounds = output_bounds(prepared_network, box, method, BoundOptions(intersect=intersect, ascent=SHORT))
    slack = 1e-11 * (1 + torch.maximum(bounds.lower.abs(), bounds.upper.abs()))
    values = module(samples(box, 40, generator).flatten(0, 1)).unflatten(0, (40, -1))
    assert (bounds.lower <= values + slack).all()
    assert (bounds.upper >= values - slack).all()
    assert (attacked(module, box, 1) <= bounds.upper + slack).all()
    assert (attacked(module, box, -1) >= bounds.lower - slack).all()


@pytest.mark.parametrize("method", METHODS)
def test_a_point_has_its_value_for_bounds(network: tuple[nn.Module, Network], method: str) -> None:
    module, prepared_network = network
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    bounds = output_bounds(prepared_network, box_around(x, 0.0), method)
    torch.testing.assert_close(bounds.lower, module(x), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(bounds.upper, module(x), rtol=1e-10, atol=1e-10)


def test_crown_is_tighter_than_intervals_where_they_explode() -> None:
    module = mlp([5, 32, 32, 32, 32, 32, 4], nn.ReLU(), seed=1).double()
    network = prepared(module, 5)
    box = box_around(torch.randn(8, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64), 0.02)
    ibp, crown_ibp, crown = (output_bounds(network, box, name).width.mean() for name in ("ibp", "crown-ibp", "crown"))
    assert crown < 0.2 * crown_ibp
    assert crown_ibp < ibp


@pytest.mark.parametrize("method", slow_but_for(METHODS, "crown"))
def test_an_instance_has_the_same_bounds_in_any_company(network: tuple[nn.Module, Network], method: str) -> None:
    _, prepared_network = network
    box = box_around(torch.randn(5, 5, generator=torch.Generator().manual_seed(4), dtype=torch.float64), 0.3)
    together = output_bounds(prepared_network, box, method, BoundOptions(ascent=SHORT))
    for index in range(5):
        own = Interval(box.lower[index : index + 1], box.upper[index : index + 1])
        alone = output_bounds(prepared_network, own, method, BoundOptions(ascent=SHORT))
        torch.testing.assert_close(alone.lower[0], together.lower[index], rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(alone.upper[0], together.upper[index], rtol=1e-11, atol=1e-11)


def test_little_memory_changes_nothing(network: tuple[nn.Module, Network]) -> None:
    _, prepared_network = network
    box = box_around(torch.randn(2, 5, generator=torch.Generator().manual_seed(4), dtype=torch.float64), 0.3)
    whole, pieces = (output_bounds(prepared_network, box, "crown", BoundOptions(elements=size)) for size in (2**26, 1))
    torch.testing.assert_close(whole.lower, pieces.lower, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(whole.upper, pieces.upper, rtol=1e-12, atol=1e-12)


def test_intersection_never_loosens_intermediate_bounds() -> None:
    module = mlp([5, 12, 10, 12, 8, 4], nn.ReLU(), seed=1).double()
    network = prepared(module, 5)
    box = box_around(torch.randn(4, 5, generator=torch.Generator().manual_seed(4), dtype=torch.float64), 1.0)
    crown, ibp = (METHODS[name](network, box, BoundOptions()).inputs for name in ("crown", "ibp"))
    assert list(crown) == list(ibp)
    for name, (tight,) in crown.items():
        (loose,) = ibp[name]
        assert (tight.lower >= loose.lower - 1e-12).all()
        assert (tight.upper <= loose.upper + 1e-12).all()


@pytest.mark.slow
def test_float32_bounds_agree_with_float64(network: tuple[nn.Module, Network]) -> None:
    module, precise = network
    single = prepared(_as_float32(module), 5)
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(4))
    for method in METHODS:
        low, high = (
            output_bounds(each, box_around(x.to(dtype), 0.05), method, BoundOptions(ascent=SHORT))
            for each, dtype in ((single, torch.float32), (precise, torch.float64))
        )
        scale = high.lower.abs().max().maximum(high.upper.abs().max())
        # Weights were rounded as well, so this is looser than rounding in the passes alone.
        assert (low.lower.double() - high.lower).abs().max() <= 1e-4 * scale
        assert (low.upper.double() - high.upper).abs().max() <= 1e-4 * scale


def _as_float32(module: nn.Module) -> nn.Module:
    import copy

    return copy.deepcopy(module).float()


@pytest.mark.parametrize("method", METHODS)
def test_overflow_gives_no_bound_rather_than_a_wrong_one(method: str) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(1e25)
    bounds = output_bounds(prepared(module, 2), box_around(torch.zeros(1, 2), 1.0), method)
    assert bounds.lower.item() == -torch.inf
    assert bounds.upper.item() == torch.inf


def test_one_value_that_feeds_two_operators_is_counted_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            return torch.relu(y) + torch.tanh(y) - 0.5 * y

    module = Twice().double()
    generator = torch.Generator().manual_seed(2)
    redraw(module, generator)
    box = box_around(torch.randn(2, 3, generator=generator, dtype=torch.float64), 0.5)
    bounds = output_bounds(prepared(module, 3), box, "crown")
    outputs = torch.stack([module(x) for x in samples(box, 400, generator)])
    assert (outputs >= bounds.lower - 1e-12).all()
    assert (outputs <= bounds.upper + 1e-12).all()
    seen = outputs.amax(dim=0) - outputs.amin(dim=0)
    assert (bounds.width <= 3 * seen + 0.5).all()
