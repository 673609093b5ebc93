"""Attacks on balls of inputs: near to the least value, and never outside."""

from __future__ import annotations

from fractions import Fraction

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lanes import examples
from torch import nn

from service.bounds.network import prepare
from service.formats.vnnlib import Disjunct, Halfspace, L2Ball, Query
from service.verification.bab.attack import attack
from service.verification.bab.model import ModelUnderVerification
from service.verification.bab.specification import Specification, specifications
from service.verification.engine import NetworkEngine


def around(middle: list[float], distance: float, threshold: float = 0.0) -> Specification:
    """Whether the only output is ever the threshold or less."""
    lower, upper = (tuple(each + sign * distance for each in middle) for sign in (-1, 1))
    case = Disjunct(lower, upper, (Halfspace(((0, 1.0),), threshold),))
    (specification,) = specifications(
        Query(len(middle), 1, (case,), L2Ball(tuple(middle), distance)), torch.device("cpu")
    )
    return specification


@settings(max_examples=60, deadline=None)
@given(
    middle=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20),
    exponent=st.floats(-12, 3),
    far=st.floats(-1, 3),
    seed=st.integers(0, 10**6),
)
def test_what_is_moved_into_a_ball_is_in_it_exactly(
    middle: list[float], exponent: float, far: float, seed: int
) -> None:
    specification = around(middle, 10**exponent)
    generator = torch.Generator().manual_seed(seed)
    away = torch.randn(10, len(middle), generator=generator, dtype=torch.float64) * 10 ** (exponent + far)
    for point in specification.nearest(specification.middle + away).tolist():
        squares = ((Fraction(x) - Fraction(m)) ** 2 for x, m in zip(point, middle, strict=True))
        assert sum(squares) <= Fraction(10**exponent) ** 2


@settings(max_examples=examples(3, 10), deadline=None)
@given(seed=st.integers(0, 10**6), distance=st.floats(0.01, 10.0))
def test_the_least_value_over_a_ball_is_approached(seed: int, distance: float) -> None:
    """Of a linear function, whose least value is known: far from any corner of the box around the ball."""
    torch.manual_seed(seed)
    module = nn.Linear(50, 1).double().requires_grad_(False)
    subject = ModelUnderVerification(module, NetworkEngine(prepare(module, (50,))), module, None, torch.float64)
    middle = torch.rand(50, dtype=torch.float64)
    deepest = distance * float(module.weight.norm())
    specification = around(middle.tolist(), distance, float(module(middle)) - 0.999 * deepest)
    assert attack(subject, specification) is not None
