"""What an instance may take: from the start of its bounds to its row."""

from __future__ import annotations

import math

import pytest
import torch
from nets import mlp
from onnx_jobs import BOX, DECLARED, NETWORK, specification, upload
from torch import nn
from verify_jobs import context

from service.bounds.interval import Interval
from service.bounds.methods import ALPHA_CROWN, CROWN, BoundOptions, Method
from service.bounds.network import prepare
from service.bounds.optimise import Ascent
from service.bounds.progress import OutOfTimeError
from service.jobs.files import DataLayout
from service.jobs.spec.verify import VerifySpec
from service.verification import job

WHOLE = {"lower": [-1, -1, -1], "upper": [1, 1, 1], "output": [{"coefficients": [1, 0], "threshold": -1.6}]}
ENDS = Interval(-torch.ones(1, 3), torch.ones(1, 3))


@pytest.mark.parametrize("method", [CROWN, ALPHA_CROWN], ids=["crown", "alpha-crown"])
def test_an_analysis_ends_at_the_next_part_after_its_time(method: Method) -> None:
    network = prepare(mlp([3, 8, 8, 2], nn.ReLU(), 0), (3,))
    with torch.no_grad(), pytest.raises(OutOfTimeError):
        method(network, ENDS, BoundOptions().until(-math.inf))
    told: list[float] = []
    rows = torch.eye(2)[None]
    with torch.no_grad():
        limited = method(network, ENDS, BoundOptions().until(math.inf, told.append)).lower_bounds(rows)
        assert torch.equal(limited, method(network, ENDS, BoundOptions()).lower_bounds(rows))
    assert told == sorted(told)
    assert 0 < told[-1] <= 1


def test_an_ascent_that_is_late_keeps_the_bounds_of_its_first_iteration() -> None:
    network, rows = prepare(mlp([3, 8, 8, 2], nn.ReLU(), 0), (3,)), torch.eye(2)[None]
    with torch.no_grad():
        late = ALPHA_CROWN(network, ENDS, BoundOptions(ascent=Ascent(deadline=-math.inf))).lower_bounds(rows)
        first = ALPHA_CROWN(network, ENDS, BoundOptions(ascent=Ascent(iterations=1))).lower_bounds(rows)
    assert torch.equal(late, first)


def of_box(data: DataLayout, seconds: float | None) -> VerifySpec:
    given = {"model": {"onnx": upload(data, NETWORK)}, "property": {"box": WHOLE}, "budget": {"seconds": seconds}}
    return VerifySpec.model_validate({"device": "cpu", **given})


def test_bounds_alone_have_a_limit_of_their_own(data: DataLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.verification.search_runner.SECONDS_OF_BOUNDS", 1e-9)
    ranked, report = context(data)
    job.run(of_box(data, None), ranked)
    assert report.bounds[0]["reason"] == "its seconds were spent on bounds by crown; these are by intervals"
    ranked, report = context(data)
    job.run(of_box(data, 60), ranked)
    assert report.bounds[0]["method"] == "crown"


def test_bounds_whose_time_is_over_are_by_intervals_and_say_so(data: DataLayout) -> None:
    ranked, report = context(data)
    job.run(of_box(data, 1e-9), ranked)
    (row,) = report.bounds
    assert (row["verdict"], row["method"]) == ("unknown", "ibp")
    assert row["reason"] == "its seconds were spent on bounds by crown; these are by intervals"
    ranked, report = context(data)
    job.run(of_box(data, 60), ranked)
    (usual,) = report.bounds
    assert usual["method"] == "crown"
    assert row["upper"][0] - row["lower"][0] > usual["upper"][0] - usual["lower"][0]


@pytest.mark.slow
def test_a_query_whose_bounds_take_its_time_is_not_searched(data: DataLayout) -> None:
    ranked, report = context(data)
    job.run(specification(data, f"{DECLARED}{BOX}(assert (>= Y_0 0))", budget={"seconds": 1e-9}), ranked)
    (row,) = report.bounds
    assert (row["verdict"], row["reason"]) == ("timeout", "its 1e-09 seconds were spent")
    assert all(math.isfinite(end) for end in (*row["lower"], *row["upper"]))
    assert not report.searches


def test_rows_appear_one_by_one(data: DataLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a look at one instance's rounding takes does not hold up the rows before it."""
    from service.verification.rounding_guard import RoundingGuard

    queries = [upload(data, f"{DECLARED}{BOX}(assert (>= Y_0 {above}))".encode()) for above in (1e5, 1e6)]
    given = {"model": {"onnx": upload(data, NETWORK)}, "property": {"vnnlib": queries}}
    ranked, report = context(data)
    seen: list[int] = []
    settled = RoundingGuard.settled

    def looking(self: RoundingGuard, *arguments: object) -> object:
        seen.append(len(report.bounds))
        return settled(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(RoundingGuard, "settled", looking)
    job.run(VerifySpec.model_validate({"device": "cpu", **given}), ranked)
    assert seen == [0, 1]
