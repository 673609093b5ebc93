"""What overflows proves nothing, nor what rounding took from small values beside large ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from lanes import slow_but_for
from onnx_jobs import upload
from onnx_models import model, node
from torch import Tensor, nn
from verify_jobs import context

from service.bounds.interval import Interval
from service.bounds.methods import CROWN, METHODS, BoundOptions
from service.bounds.network import prepare
from service.formats.vnnlib import Disjunct, Halfspace, Query
from service.jobs.files import DataLayout
from service.jobs.spec.verify import VerifySpec
from service.verification import job
from service.verification.bab.driver import decide
from service.verification.bab.model import ModelUnderVerification
from service.verification.bab.settings import InputSearchSettings
from service.verification.bab.specification import specifications
from service.verification.certify import _uncross
from service.verification.engine import NetworkEngine
from service.verification.verdict import Verdict

TERMS = 32


def overflowing(features: int) -> ModelUnderVerification:
    """In float32: terms whose sum, −4.8e38, is infinite when the positive ones come first."""
    inner, outer = nn.Linear(features, TERMS), nn.Linear(TERMS, 1)
    module = nn.Sequential(inner, nn.ReLU(), outer).requires_grad_(False)
    for each in module.parameters():
        each.zero_()
    inner.bias.fill_(3e37)
    outer.weight[:, : TERMS // 2], outer.weight[:, TERMS // 2 :] = 3.0, -4.0
    return ModelUnderVerification(
        module, NetworkEngine(prepare(module, (features,))), deepcopy(module).double(), None, torch.float32
    )


class Summed(nn.Module):
    """The same terms, without weights: their sum is the output."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.inner = nn.Linear(features, TERMS)
        self.inner.weight.data.zero_()
        self.inner.bias.data[: TERMS // 2], self.inner.bias.data[TERMS // 2 :] = 9e37, -12e37

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).sum(dim=1, keepdim=True)


def narrow(features: int) -> ModelUnderVerification:
    """In float32: 1 − max(1 − |x|, 0) of the first input."""
    inner, outer, last = nn.Linear(features, 2), nn.Linear(2, 1), nn.Linear(1, 1)
    module = nn.Sequential(inner, nn.ReLU(), outer, nn.ReLU(), last).requires_grad_(False)
    inner.weight.zero_()
    inner.weight[0, 0], inner.weight[1, 0] = 1.0, -1.0
    inner.bias.zero_()
    for layer in (outer, last):
        layer.weight.fill_(-1.0)
        layer.bias.fill_(1.0)
    return ModelUnderVerification(
        module, NetworkEngine(prepare(module, (features,))), deepcopy(module).double(), None, torch.float32
    )


def asked(features: int, lower: float = 0.0, upper: float = 1.0, threshold: float = -1e38) -> Query:
    """Whether the output is ever the threshold or less."""
    case = Disjunct((lower,) * features, (upper,) * features, (Halfspace(((0, 1.0),), threshold),))
    return Query(features, 1, (case,))


@pytest.mark.parametrize("method", sorted(METHODS))
def test_an_infinite_sum_is_no_bound(method: str) -> None:
    box = Interval(torch.zeros(1, 2), torch.ones(1, 2))
    with torch.no_grad():
        analysis = METHODS[method](overflowing(2).network, box, BoundOptions())
        assert float(analysis.lower_bounds(torch.ones(1, 1, 1))) < 0


@pytest.mark.parametrize("features", [2, InputSearchSettings().most_inputs + 1])
def test_an_infinite_sum_is_no_proof(features: int) -> None:
    decision = decide(overflowing(features), asked(features), CROWN, 0.1)
    assert decision.verdict is not Verdict.VERIFIED


@pytest.mark.parametrize("features", slow_but_for([2, InputSearchSettings().most_inputs + 1], 2))
def test_a_narrow_dip_in_a_wide_box_is_not_rounded_away(features: int) -> None:
    subject = narrow(features)
    for width in (1e6, 1e8, 1e12):
        box = Interval(torch.full((1, features), -0.7 * width), torch.full((1, features), width))
        for method in METHODS.values():
            with torch.no_grad():
                assert float(method(subject.network, box, BoundOptions()).lower_bounds(torch.ones(1, 1, 1))) <= 0
        decision = decide(subject, asked(features, -0.7 * width, width, 0.5), CROWN, 0.3)
        assert decision.verdict is not Verdict.VERIFIED


@pytest.mark.parametrize("features", slow_but_for([2, InputSearchSettings().most_inputs + 1], 2))
@pytest.mark.parametrize(
    "first",
    [
        pytest.param(lambda features: overflowing(features).module, id="weighted"),
        pytest.param(Summed, id="summed", marks=pytest.mark.slow),
    ],
)
def test_an_infinite_sum_has_no_sign_for_the_next_layer(first: Callable[[int], nn.Module], features: int) -> None:
    """The output is 0: the sum is negative, so that nothing passes the last ReLU."""
    last = nn.Linear(1, 1)
    last.weight.data.fill_(2e-38)
    last.bias.data.zero_()
    module = nn.Sequential(first(features), nn.ReLU(), last).requires_grad_(False)
    float64_module = deepcopy(module).double()
    assert float(float64_module(torch.zeros(1, features, dtype=torch.float64))) == 0
    subject = ModelUnderVerification(
        module, NetworkEngine(prepare(module, (features,))), float64_module, None, torch.float32
    )
    box = Interval(torch.zeros(1, features), torch.ones(1, features))
    for method in METHODS.values():
        with torch.no_grad():
            lower, negated = method(subject.network, box, BoundOptions()).lower_bounds(torch.tensor([[[1.0], [-1.0]]]))[
                0
            ]
        assert lower <= 0 <= -negated
    decision = decide(subject, asked(features, threshold=0.1), CROWN, 0.1, restarts=0)
    assert decision.verdict is not Verdict.VERIFIED


@pytest.mark.parametrize("method", ["ibp", "crown"])
def test_a_bound_that_overflows_is_infinite_and_the_row_says_where(data: DataLayout, method: str) -> None:
    nodes = [node("Exp", ["x"], "e"), node("Exp", ["e"], "f"), node("Neg", ["f"], "y")]
    box = {"lower": [0.0, 0.0], "upper": [10.0, 0.5]}
    spec = {"model": {"onnx": upload(data, model(nodes, [1, 2]))}, "property": {"box": box}}
    ranked, report = context(data)
    job.run(VerifySpec.model_validate({"device": "cpu", "method": method, **spec}), ranked)
    (row,) = report.bounds
    assert (row["lower"][0], row["upper"][0]) == ("-Infinity", "Infinity")
    assert row["lower"][1] == pytest.approx(-math.exp(math.exp(0.5)), rel=1e-4)
    assert row["upper"][1] == pytest.approx(-math.e, rel=1e-4)
    assert "bounds are infinite from" in row["reason"]


def test_bounds_that_cross_by_rounding_are_widened_by_as_much() -> None:
    crossed = Interval(torch.tensor([[1.0, 2.0 + 1e-6]]), torch.tensor([[1.5, 2.0]]))
    found, gap = _uncross(crossed), float(crossed.lower[0, 1] - 2.0)
    assert found.lower.tolist() == [[1.0, 2.0 - gap]]
    assert found.upper.tolist() == [[1.5, 2.0 + gap + gap]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_may_explain_everything_where_a_bound_is_infinite(dtype: torch.dtype) -> None:
    (specification,) = specifications(asked(1, threshold=2.0), torch.device("cpu"))
    least = torch.tensor([5.0], dtype=dtype)
    tells = [float(specification.offsets(least, torch.tensor([most], dtype=dtype))) for most in (5.0, 1e6, torch.inf)]
    tells += [float(specification.offsets(torch.tensor([torch.nan], dtype=dtype), least))]
    assert 2.0 < tells[0] < tells[1] < tells[2]
    assert all(1e-11 * torch.finfo(dtype).max < each < torch.inf for each in tells[2:])
