"""An analysis tells how far it is, and a job how long it is going to take."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lanes import slow_but_for
from verify_jobs import context, specification

from benchmarks.recording_reporter import RecordingReporter
from service.bounds.interval import Interval
from service.bounds.methods import METHODS, BoundOptions, ProgressMeter
from service.bounds.network import prepare
from service.bounds.optimise import Ascent
from service.jobs.files import DataLayout
from service.verification import progress
from service.verification.job import run
from service.verification.progress import JobProgress


@pytest.mark.parametrize("method", slow_but_for(METHODS, "ibp", "alpha-crown"))
@pytest.mark.parametrize("rigorous", slow_but_for([False, True], False))
def test_the_share_grows_to_one_and_the_bounds_stay(method: str, rigorous: bool) -> None:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(6, 12), torch.nn.ReLU(), torch.nn.Linear(12, 12), torch.nn.Tanh(), torch.nn.Linear(12, 3)]
    dtype = torch.float64 if rigorous else torch.float32
    network = prepare(torch.nn.Sequential(*layers).to(dtype), (6,))
    x = torch.randn(4, 6, dtype=dtype)
    rows = torch.cat([torch.eye(3, dtype=dtype), -torch.eye(3, dtype=dtype)])[None]
    told: list[float] = []
    few = BoundOptions(elements=64, ascent=Ascent(iterations=3))
    metered = BoundOptions(elements=64, ascent=Ascent(iterations=3), progress=ProgressMeter(told.append))
    bounding = METHODS[method].rigorous if rigorous else METHODS[method].plain
    with torch.no_grad():
        plain, counted = (bounding(network, Interval(x - 0.1, x + 0.1), e).lower_bounds(rows) for e in (few, metered))
    assert torch.equal(plain, counted)
    assert metered == few
    assert len(told) > 2
    assert all(0 < first <= second <= 1 for first, second in pairwise(told))
    assert told[-1] == pytest.approx(1.0)


class _Told(RecordingReporter):
    def __init__(self) -> None:
        super().__init__()
        self.finer: list[tuple[float | None, float | None]] = []

    def progress(self, done: int, total: int, unit: str, **finer: float | str | None) -> None:
        assert 0 <= done <= total
        share, left_s = finer["share"], finer["left_s"]
        assert not isinstance(share, str)
        assert not isinstance(left_s, str)
        self.finer.append((share, left_s))


@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    stages=st.integers(1, 3),
    decided=st.integers(0, 10),
)
def test_work_at_an_even_pace_leaves_the_time_that_it_takes(sizes: list[int], stages: int, decided: int) -> None:
    """A second for each quarter of an instance: whatever the batches, the estimate is the time that follows."""
    total, clock = decided + sum(sizes), 100.0
    reporter = _Told()
    job = JobProgress(reporter, total, now=lambda: clock)
    job.resume(decided)
    expected = []
    for size in sizes:
        job.begin_batch()
        for quarter in range(1, 4 * size + 1):
            clock += 1.0
            if quarter >= progress.QUIET_S:
                expected.append(4 * (total - decided) - (clock - 100.0))
            job.analyse(size, quarter / (4 * size))
        job.decide(size)
    told = [left_s for share, left_s in reporter.finer if share is not None]
    assert told == pytest.approx(expected)


def test_stages_share_an_analysis() -> None:
    ends = [JobProgress.of_stage(RecordingReporter(), 1, 1, stage, 3) for stage in range(3)]
    assert [stage.first for stage in ends] == pytest.approx([0, 1 / 9, 4 / 9])
    assert [stage.last for stage in ends] == pytest.approx([1 / 9, 4 / 9, 1])


def test_a_job_tells_its_share_and_the_time_left(trained: DataLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "QUIET_S", 0.0)
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    job, report = context(trained)
    run(specification(method="crown", budget={"batch": 15}), job)
    assert report.steps == [(15, 30, "instances"), (30, 30, "instances")]
    shares = [told["share"] for told in report.within]
    assert shares == sorted(shares)
    assert min(shares) < 0.5 < max(shares)
    assert {told["phase"] for told in report.within} == {"bounding"}
    assert all(told["left_s"] >= 0 for told in report.within)
