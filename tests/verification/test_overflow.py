"""What overflows proves nothing."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn

from service.bounds.interval import Interval
from service.bounds.methods import METHODS, Effort
from service.bounds.network import prepare
from service.jobs.vnnlib import Case, Halfspace, Query
from service.verification.certify import Verdict
from service.verification.search import Subject, decide
from service.verification.search.goal import goals
from service.verification.search.inputs import FEW_INPUTS

TERMS = 32


def overflowing(features: int) -> Subject:
    """In float32: terms whose sum is small, and infinite when the positive ones come first."""
    inner, outer = nn.Linear(features, TERMS), nn.Linear(TERMS, 1)
    module = nn.Sequential(inner, nn.ReLU(), outer).requires_grad_(False)
    for each in module.parameters():
        each.zero_()
    inner.bias.fill_(3e37)
    outer.weight[:, : TERMS // 2], outer.weight[:, TERMS // 2 :] = 3.0, -4.0
    return Subject(module, prepare(module, (features,)), deepcopy(module).double(), None, torch.float32)


def asked(features: int) -> Query:
    """Whether the output, −4.8e38, ever is −1e38 or less."""
    return Query(features, 1, (Case((0.0,) * features, (1.0,) * features, (Halfspace(((0, 1.0),), -1e38),)),))


@pytest.mark.parametrize("method", sorted(METHODS))
def test_an_infinite_sum_is_no_bound(method: str) -> None:
    box = Interval(torch.zeros(1, 2), torch.ones(1, 2))
    with torch.no_grad():
        analysis = METHODS[method](overflowing(2).network, box, Effort())
        assert float(analysis.lower_bounds(torch.ones(1, 1, 1))) < 0


@pytest.mark.parametrize("features", [2, FEW_INPUTS + 1])
def test_an_infinite_sum_is_no_proof(features: int) -> None:
    decision = decide(overflowing(features), asked(features), "crown", 0.1)
    assert decision.verdict is not Verdict.VERIFIED


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_may_explain_everything_where_a_bound_is_infinite(dtype: torch.dtype) -> None:
    (goal,) = goals(Query(1, 1, (Case((0.0,), (1.0,), (Halfspace(((0, 1.0),), 2.0),)),)), torch.device("cpu"))
    least = torch.tensor([5.0], dtype=dtype)
    tells = [float(goal.offsets(least, torch.tensor([most], dtype=dtype))) for most in (5.0, 1e6, torch.inf)]
    tells += [float(goal.offsets(torch.tensor([torch.nan], dtype=dtype), least))]
    assert 2.0 < tells[0] < tells[1] < tells[2]
    assert all(1e-11 * torch.finfo(dtype).max < each < torch.inf for each in tells[2:])
