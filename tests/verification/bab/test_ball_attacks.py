"""Attacks on balls of inputs: near to the least value, and never outside."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lanes import examples, slow_but_for
from nets import mlp
from torch import nn

from service.bounds.methods import CROWN
from service.bounds.network import prepare
from service.formats.vnnlib import BALLS, Disjunct, Halfspace, Query
from service.verification.bab.attack import attack
from service.verification.bab.decision import Technique
from service.verification.bab.driver import decide
from service.verification.bab.model import ModelUnderVerification
from service.verification.bab.specification import Specification, specifications
from service.verification.engine import NetworkEngine
from service.verification.verdict import Verdict


def asked(middle: list[float], size: float, threshold: float = 0.0, *, order: int = 2, reach: float = 1.0) -> Query:
    """Whether the only output is ever the threshold or less; by norm 0, entries change by at most ``reach``."""
    reach = size if order else reach
    lower, upper = (tuple(each + sign * reach for each in middle) for sign in (-1, 1))
    case = Disjunct(lower, upper, (Halfspace(((0, 1.0),), threshold),))
    return Query(len(middle), 1, (case,), BALLS[order](tuple(middle), size))


def around(middle: list[float], size: float, threshold: float = 0.0, *, order: int = 2) -> Specification:
    (specification,) = specifications(asked(middle, size, threshold, order=order), torch.device("cpu"))
    return specification


def under_verification(module: nn.Module, inputs: int) -> ModelUnderVerification:
    module = module.double().requires_grad_(False)
    return ModelUnderVerification(module, NetworkEngine(prepare(module, (inputs,))), module, None, torch.float64)


@settings(max_examples=60, deadline=None)
@given(
    order=st.sampled_from(sorted(BALLS)),
    middle=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20),
    exponent=st.floats(-12, 3),
    far=st.floats(-1, 3),
    seed=st.integers(0, 10**6),
)
def test_what_is_moved_into_a_ball_is_in_it_exactly(
    order: int, middle: list[float], exponent: float, far: float, seed: int
) -> None:
    specification = around(middle, 10**exponent if order else 1 + seed % 4, order=order)
    assert specification.ball is not None
    generator = torch.Generator().manual_seed(seed)
    away = torch.randn(10, len(middle), generator=generator, dtype=torch.float64) * 10 ** (exponent + far)
    for point in specification.nearest(specification.middle + away).tolist():
        assert specification.ball.contains(point)


@settings(max_examples=examples(3, 10), deadline=None)
@given(order=st.sampled_from(sorted(BALLS)), seed=st.integers(0, 10**6), distance=st.floats(0.01, 10.0))
def test_the_least_value_over_a_ball_is_approached(order: int, seed: int, distance: float) -> None:
    """Of a linear function, whose least value is known: far from any corner of the box around the ball."""
    torch.manual_seed(seed)
    module = nn.Linear(50, 1).double().requires_grad_(False)
    subject = under_verification(module, 50)
    middle = torch.rand(50, dtype=torch.float64)
    weight, most = module.weight[0].abs(), 1 + seed % 5
    deepest = {
        0: float(weight.sort().values[-most:].sum()),
        1: distance * float(weight.max()),
        2: distance * float(weight.norm()),
    }[order]
    size = distance if order else most
    specification = around(middle.tolist(), size, float(module(middle)) - 0.999 * deepest, order=order)
    assert attack(subject, specification) is not None


@pytest.mark.parametrize("order", slow_but_for([0, 1, 2], 0))
def test_a_search_splits_activations_and_its_counterexamples_lie_in_the_ball(order: int) -> None:
    """Next to the least of many values: above it nothing is found, and below it a counterexample in the ball."""
    module = mlp([6, 12, 8, 1], nn.ReLU(), 5, scale=1.2)
    subject, middle, size = under_verification(module, 6), [0.3, -0.2, 0.5, 0.1, -0.4, 0.2], 0.6 if order else 2
    query = asked(middle, size, order=order)
    (whole,) = specifications(query, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    spread = 4 * torch.randn(20000, 6, generator=generator, dtype=torch.float64)
    kept = torch.rand(spread.shape, generator=generator) < torch.rand(20000, 1, generator=generator)
    least = float(module(whole.nearest(whole.middle + spread * kept)).min())
    width = abs(least - float(module(whole.middle)))
    found = decide(subject, asked(middle, size, least + 0.02 * width, order=order), CROWN, 20.0)
    assert found.verdict is Verdict.FALSIFIED
    assert found.counterexample is not None
    assert query.ball is not None
    assert query.ball.contains(found.counterexample)
    assert module(torch.tensor([found.counterexample], dtype=torch.float64)) <= least + 0.02 * width
    proved = decide(subject, asked(middle, size, least - 0.3 * width, order=order), CROWN, 20.0)
    assert proved.verdict is Verdict.VERIFIED
    assert proved.technique in {Technique.BOUNDS, Technique.ACTIVATIONS}
    assert proved.domains
