"""Balls of inputs by each norm: bounds that hold on them, tighter than on the box around."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from lanes import examples, slow_but_for
from nets import Residual, ball_around, mlp, output_bounds, prepared, redraw
from scipy.optimize import linprog
from torch import Tensor, nn

from service.bounds import methods
from service.bounds.balls import BALLS, Ball
from service.bounds.interval import Interval

METHODS = ["ibp", "crown-ibp", "crown", "alpha-crown"]


def ball_points(ball: Ball, count: int, generator: torch.Generator) -> Tensor:
    """``(count, batch, features)``: points of the set, most of them on its edge."""
    spread = 1 - 2 * torch.rand((count, *ball.middle.shape), generator=generator, dtype=torch.float64)
    # Some directions have few entries, where a norm of low order is far from those of higher ones.
    kept = torch.rand(spread.shape, generator=generator) < torch.rand((count, 1, 1), generator=generator)
    far = ball.middle.double() + 3 * ball.width.double() * spread * kept
    return torch.stack([ball.nearest(each) for each in far])


@pytest.mark.slow
@settings(max_examples=examples(3, 5), deadline=None, phases=(Phase.explicit, Phase.generate))
@given(
    seed=st.integers(0, 2**20),
    eps=st.floats(1e-3, 3),
    order=st.sampled_from([(2, None), (2, 0.6), (1, None), (1, 0.4), (0, None)]),
    activation=st.sampled_from([nn.ReLU(), nn.Tanh(), nn.GELU()]),
    residual=st.booleans(),
)
def test_points_of_the_ball_keep_within_bounds_that_are_tighter_than_the_boxes(
    seed: int, eps: float, order: tuple[int, float | None], activation: nn.Module, residual: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    module: nn.Module = mlp([5, 8, 6, 3], activation, seed)
    if residual:
        module = nn.Sequential(Residual(5, activation), nn.Linear(5, 3))
        redraw(module, generator)
    network = prepared(module.double(), 5)
    middle = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    norm, share = order
    ball = ball_around(middle, eps if norm else 2, order=norm, cut=share and share * eps)
    points = ball_points(ball, 400, generator)
    outputs = module(points)
    for method in METHODS:
        inner, outer = output_bounds(network, ball, method), output_bounds(network, ball.map(lambda end: end), method)
        assert (inner.lower <= outputs + 1e-9).all()
        assert (inner.upper >= outputs - 1e-9).all()
        assert inner.width.sum() < outer.width.sum()


def least_exactly(slope: Tensor, order: int, size: float, reach: float) -> float:
    """The least value of ``slope · v`` over changes of at most ``reach``, from what each norm means."""
    if order == 0:
        return -float(slope.abs().sort(descending=True).values[: int(size)].sum()) * reach
    count = len(slope)
    if order == 1:
        both = np.r_[slope, -slope]
        return float(linprog(both, A_ub=[np.ones(2 * count)], b_ub=[size], bounds=[(0, reach)] * 2 * count).fun)
    # The best point is a multiple of the slope where that stays in the box; the multiple that fits is bisected.
    low, high = 0.0, 1e6
    for _ in range(200):
        step = (low + high) / 2
        low, high = (step, high) if (slope.abs() * step).clamp(max=reach).norm() < size else (low, step)
    return -float((slope.abs() * (slope.abs() * low).clamp(max=reach)).sum())


@pytest.mark.parametrize(
    ("order", "size", "cut"), [(2, 0.5, None), (2, 0.5, 0.25), (1, 0.5, None), (1, 0.5, 0.2), (0, 2, 0.3), (0, 9, 0.3)]
)
def test_bounds_of_an_affine_function_are_exact(order: int, size: float, cut: float | None) -> None:
    generator = torch.Generator().manual_seed(order)
    layer = nn.Linear(7, 2).double()
    redraw(layer, generator)
    middle = torch.randn(3, 7, generator=generator, dtype=torch.float64)
    ball = ball_around(middle, size, order=order, cut=cut)
    reach = torch.tensor(
        [-least_exactly(row.detach(), order, size, cut or 0.5) for row in layer.weight], dtype=torch.float64
    )
    for method in ("ibp", "crown"):
        found = output_bounds(prepared(layer, 7), ball, method)
        torch.testing.assert_close(found.lower, layer(middle) - reach, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(found.upper, layer(middle) + reach, rtol=1e-8, atol=1e-8)
    at_least = ball.minimiser(layer.weight[:1].expand(3, -1)).detach()
    torch.testing.assert_close(at_least, ball.nearest(at_least))
    torch.testing.assert_close(layer(at_least)[:, 0], layer(middle)[:, 0] - reach[0], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("order", slow_but_for([2, 1, 0], 0))
def test_the_first_layer_is_exact_by_intervals(order: int) -> None:
    """The inputs of the first ReLU, as an affine function's outputs."""
    module = mlp([7, 9, 3], nn.ReLU(), 3).double()
    ball = ball_around(torch.randn(2, 7, generator=torch.Generator().manual_seed(1)), 2.0, order=order)
    whole = output_bounds(prepared(module[0], 7), ball, "crown")
    network = prepared(module, 7)
    for method in METHODS:
        ((first,),) = methods.METHODS[method](network, ball, methods.BoundOptions()).inputs.values()
        torch.testing.assert_close(first.lower, whole.lower)
        torch.testing.assert_close(first.upper, whole.upper)


@given(
    st.sampled_from(sorted(BALLS)),
    st.integers(0, 2**20),
    st.floats(1e-6, 1e3),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_rounded_balls_hold_the_exact_ones(order: int, seed: int, distance: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    middle = torch.randn(2, 6, generator=generator, dtype=torch.float64)
    size = distance if order else 2
    ball, exact = ball_around(middle, size, dtype, order=order), ball_around(middle, size, order=order)
    slopes = torch.randn(2, 50, 6, generator=generator, dtype=torch.float64)
    points = ball_points(exact, 50, generator)
    values = torch.einsum("brf,pbf->pbr", slopes, points)
    slack = 1e-5 if dtype == torch.float32 else 1e-12
    assert (ball.least(slopes.to(dtype)) <= values + slack * (1 + distance)).all()
    near = ball.nearest(torch.randn(2, 6, generator=generator).to(dtype) * 10 * distance)
    away = (near - ball.middle).abs()
    length = (away > 0).sum(dim=1) if order == 0 else away.double().norm(p=order, dim=1)
    assert (length <= size * (1 + 1e-5) + 1e-5).all()
    assert (near >= ball.lower).all()
    assert (near <= ball.upper).all()


def test_rearranged_balls_stay_balls_and_rules_see_their_boxes() -> None:
    for order in BALLS:
        ball = ball_around(torch.zeros(2, 4), 1.0, order=order)
        assert ball.arranged(lambda each: each.reshape(2, 2, 2)).middle.shape == (2, 2, 2)
        assert type(ball.map(torch.relu)) is Interval
