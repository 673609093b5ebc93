"""Euclidean balls of inputs: bounds that hold on them, tighter than on the box around."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from lanes import examples
from nets import Residual, mlp, output_bounds, prepared, redraw
from torch import Tensor, nn

from service.bounds.ball import Ball
from service.bounds.interval import Interval

METHODS = ["ibp", "crown-ibp", "crown", "alpha-crown"]


def ball_points(ball: Ball, count: int, generator: torch.Generator) -> Tensor:
    """``(count, batch, features)``: half of them on the sphere."""
    direction = torch.randn((count, *ball.middle.shape), generator=generator, dtype=ball.middle.dtype)
    share = torch.rand((count, len(ball.middle), 1), generator=generator, dtype=ball.middle.dtype)
    share[: count // 2] = 1
    return ball.middle + direction / direction.norm(dim=2, keepdim=True) * share * ball.distance


@pytest.mark.slow
@settings(max_examples=examples(3, 5), deadline=None, phases=(Phase.explicit, Phase.generate))
@given(
    seed=st.integers(0, 2**20),
    eps=st.floats(1e-3, 3),
    activation=st.sampled_from([nn.ReLU(), nn.Tanh(), nn.GELU()]),
    residual=st.booleans(),
)
def test_points_of_the_ball_keep_within_bounds_that_are_tighter_than_the_boxes(
    seed: int, eps: float, activation: nn.Module, residual: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    module: nn.Module = mlp([5, 8, 6, 3], activation, seed)
    if residual:
        module = nn.Sequential(Residual(5, activation), nn.Linear(5, 3))
        redraw(module, generator)
    network = prepared(module.double(), 5)
    middle = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    ball = Ball.within(middle, eps, torch.float64)
    outputs = module(ball_points(ball, 400, generator))
    for method in METHODS:
        inner, outer = output_bounds(network, ball, method), output_bounds(network, ball.map(lambda end: end), method)
        assert (inner.lower <= outputs + 1e-9).all()
        assert (inner.upper >= outputs - 1e-9).all()
        assert inner.width.sum() < outer.width.sum()


def test_bounds_of_an_affine_function_are_exact() -> None:
    layer = nn.Linear(7, 2).double()
    middle = torch.randn(1, 7, dtype=torch.float64)
    found = output_bounds(prepared(layer, 7), Ball.within(middle, 0.5, torch.float64), "crown")
    reach = 0.5 * layer.weight.norm(dim=1)
    torch.testing.assert_close(found.lower[0], layer(middle)[0] - reach)
    torch.testing.assert_close(found.upper[0], layer(middle)[0] + reach)


@given(st.integers(0, 2**20), st.floats(1e-6, 1e3), st.sampled_from([torch.float32, torch.float64]))
def test_rounded_balls_hold_the_exact_ones(seed: int, distance: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    middle = torch.randn(2, 6, generator=generator, dtype=torch.float64)
    ball = Ball.within(middle, distance, dtype)
    exact = ball_points(Ball(*[middle] * 3, torch.full_like(middle, distance)), 50, generator)
    away = (exact - ball.middle.double()).norm(dim=2)
    assert (away <= ball.distance[:, 0].double() * (1 + 1e-14) + 1e-14).all()
    near = ball.nearest(torch.randn(2, 6, generator=generator).to(dtype) * 10 * distance)
    assert ((near - ball.middle).norm(dim=1) <= ball.distance[:, 0] * (1 + 1e-5) + 1e-5).all()
    assert (near >= ball.lower).all()
    assert (near <= ball.upper).all()


def test_rearranged_balls_stay_balls_and_rules_see_their_boxes() -> None:
    ball = Ball.within(torch.zeros(2, 4, dtype=torch.float64), 1.0, torch.float64)
    assert ball.arranged(lambda each: each.unflatten(1, (2, 2))).middle.shape == (2, 2, 2)
    assert type(ball.map(torch.relu)) is Interval
