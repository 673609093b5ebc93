"""Offsets that hold over a ball: never above what is there, and better than those of each entry by itself."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lanes import examples, slow_but_for
from nets import Residual, ball_around, mlp, output_bounds, prepared, redraw
from torch import Tensor, nn

from service.bounds.near import NearLayers, offsets
from service.bounds.near.layers import near_values
from service.bounds.near.offsets import NearPieces

DOUBLE = torch.float64


def pieces(slope: float, centre: Tensor, radius: float, reach: Tensor) -> NearPieces:
    """Values ``(1, 1, n)`` in a box around the centre and in a ball."""
    lower, upper, middle = (each[None, None] for each in (centre - reach, centre + reach, centre))
    return NearPieces(slope, lower, upper, middle, torch.tensor([radius], dtype=DOUBLE))


@pytest.mark.parametrize("halvings", slow_but_for([8, 0, 2], 8))
@settings(max_examples=examples(20, 100), deadline=None)
@given(seed=st.integers(0, 2**20), slope=st.sampled_from([0.0, 0.1, -1.0]), radius=st.floats(0.01, 3))
def test_no_value_in_the_ball_is_below_the_offset_whatever_the_multiplier(
    halvings: int, seed: int, slope: float, radius: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    centre, a, g = torch.randn(3, 6, generator=generator, dtype=DOUBLE)
    reach = torch.rand(6, generator=generator, dtype=DOUBLE) * 2 * radius
    opened = (centre - reach < 0) & (centre + reach > 0)
    g = torch.where(opened, g, a * torch.where(centre > 0, 1.0, slope))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offsets, "HALVINGS", halvings)
        found = float(pieces(slope, centre, radius, reach).offset(a[None, None], g[None, None]))
    away = torch.randn(4000, 6, generator=generator, dtype=DOUBLE)
    away = away / away.norm(dim=1, keepdim=True) * radius * torch.rand(4000, 1, generator=generator) ** 0.2
    z = centre + away.clamp(-reach, reach)
    terms = a * torch.where(z > 0, z, slope * z) - g * z
    assert found <= terms.sum(dim=1).min() + 1e-9
    if halvings == 8:
        # The box alone: each entry by itself is least at an end of it or at 0.
        ends = torch.stack([centre - reach, centre + reach, torch.zeros(6, dtype=DOUBLE)])
        ends = torch.minimum(torch.maximum(ends, centre - reach), centre + reach)
        alone = (a * torch.where(ends > 0, ends, slope * ends) - g * ends).amin(dim=0).sum()
        assert found >= float(alone) - 1e-2 * abs(float(alone)) - 1e-3 * radius


@pytest.mark.parametrize("entries", [4, 100])
def test_over_a_whole_ball_around_zero_the_offset_is_smaller_by_the_root_of_the_entries(entries: int) -> None:
    centre, ones = torch.zeros(entries, dtype=DOUBLE), torch.ones(1, 1, entries, dtype=DOUBLE)
    near = pieces(0.0, centre, 0.5, torch.full((entries,), 0.5, dtype=DOUBLE))
    # ``−Σ max(z, 0)`` through CROWN's chord, whose intercept is half of the radius for each entry.
    found = float(near.offset(-ones, -ones / 2))
    assert -entries * 0.25 / found == pytest.approx(entries**0.5, rel=1e-3)


def convolutions() -> nn.Module:
    image = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 4, 3, stride=2), nn.LeakyReLU(0.1))
    return nn.Sequential(
        nn.Unflatten(1, (1, 7, 7)), image, nn.Flatten(), nn.Linear(36, 12), nn.ReLU(), nn.Linear(12, 3)
    )


def residual() -> nn.Module:
    return nn.Sequential(nn.Linear(9, 16), nn.ReLU(), Residual(16, nn.ReLU()), nn.ReLU(), nn.Linear(16, 3))


MODELS = {"mlp": lambda: mlp([9, 24, 24, 3], nn.ReLU(), 1), "residual": residual, "convolutions": convolutions}


TIGHTER = {("mlp", 2), ("convolutions", 2)}
"""Networks whose layers are near enough to each other: that small weights stretch little is what the offsets need."""


def drawn(name: str) -> tuple[nn.Module, Tensor]:
    generator = torch.Generator().manual_seed(3)
    module, inputs = MODELS[name](), 49 if name == "convolutions" else 9
    redraw(module, generator, 1.0)
    return module.double().requires_grad_(False), torch.randn(2, inputs, generator=generator, dtype=DOUBLE) / 2


@pytest.mark.parametrize("order", slow_but_for([2, 1, 0], 2))
@pytest.mark.parametrize("name", MODELS)
def test_ten_thousand_points_of_a_ball_keep_within_bounds_that_the_offsets_tighten(
    name: str, order: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, middle = drawn(name)
    network = prepared(module, middle.shape[1])
    ball = ball_around(middle, 0.8 if order else 3, order=order)
    generator = torch.Generator().manual_seed(0)
    spread = 3 * (1 - 2 * torch.rand(10000, 1, middle.shape[1], generator=generator, dtype=DOUBLE))
    kept = torch.rand(spread.shape, generator=generator) < torch.rand(10000, 1, 1, generator=generator)
    points = torch.stack([ball.nearest(middle + each) for each in spread * kept])
    outputs = module(points.flatten(0, 1)).view(10000, 2, -1)
    methods = ("crown-ibp", "crown", "alpha-crown")
    found = {method: output_bounds(network, ball, method) for method in methods}
    monkeypatch.setattr(NearLayers, "of", lambda network, box: NearLayers(network, {}))
    for method in methods:
        alone = output_bounds(network, ball, method)
        assert (found[method].lower <= outputs + 1e-9).all()
        assert (found[method].upper >= outputs - 1e-9).all()
        assert (found[method].width <= alone.width * (1 + 1e-9) + 1e-9).all() or method == "alpha-crown"
        assert (name, order) not in TIGHTER or found[method].width.sum() < 0.98 * alone.width.sum()
    values = near_values(network, ball)
    assert {node.inputs[0] for node in network.nonlinear} <= set(values)


@pytest.mark.parametrize(
    "module",
    [
        nn.Linear(12, 7),
        nn.Conv2d(2, 3, 3, padding=1),
        nn.Conv2d(2, 3, 4, stride=2, padding=1),
        nn.Conv2d(2, 4, 3, dilation=2, groups=2, padding=2),
        nn.ConvTranspose2d(2, 3, 2, stride=2),
        nn.AvgPool2d(2),
        nn.BatchNorm2d(2).eval(),
        nn.ZeroPad2d((1, -1, 0, 2)),
        Residual(12, nn.Identity()),
    ],
    ids=lambda module: type(module).__name__,
)
def test_a_stretch_is_at_least_the_largest_singular_value_and_hardly_more(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(2)
    redraw(module, generator, 0.7)
    shape = (12,) if isinstance(module, nn.Linear | Residual) else (2, 6, 6)
    whole = nn.Sequential(module, nn.ReLU(), nn.Flatten(), nn.LazyLinear(2))
    whole(torch.zeros(1, *shape))
    network = prepared(whole.double().eval().requires_grad_(False), *shape)
    ball = ball_around(torch.zeros(1, *shape), 1.0)
    (name,) = network.nonlinear[0].inputs
    matrix = torch.func.jacrev(lambda x: module(x[None]).flatten())(torch.zeros(shape, dtype=DOUBLE))
    largest = float(torch.linalg.matrix_norm(matrix.flatten(1), ord=2))
    assert largest <= float(near_values(network, ball)[name].radius) <= 2.5 * largest
