"""Fair share: use decays and adds up, the order equals the obvious one, and nobody waits past the bound."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.jobs.queue.fair_share import AHEAD_S, PendingJob, Use, in_order

BOUND_MS = 1000
PROJECTS = ("default", "vision", "speech")


def pending(number: int, **fields: Any) -> PendingJob:
    common = {"kind": "train", "owner": "ada", "pool": "cpu", "ranks": 1, "max_hosts": 1, "priority": 0}
    return PendingJob(**{"id": f"job{number:03}", "queued_at_ms": number, **common, **fields})


queues = st.lists(
    st.tuples(
        st.sampled_from(PROJECTS), st.integers(-1, 1), st.integers(1, 8), st.one_of(st.integers(0, 50), st.just(1500))
    ),
    max_size=24,
).map(
    lambda rows: [
        pending(number, project=project, priority=priority, ranks=ranks, queued_at_ms=2000 - waited)
        for number, (project, priority, ranks, waited) in enumerate(rows)
    ]
)
shares = st.dictionaries(
    st.sampled_from(PROJECTS),
    st.builds(Use, st.integers(0, 3000).map(float), st.integers(0, 20), st.sampled_from([0.5, 1.0, 2.0])),
)


def obvious(jobs: list[PendingJob], uses: Mapping[str, Use]) -> list[str]:
    """Take the best of all that are left, one by one."""
    now = {project: uses.get(project, Use()) for project in PROJECTS}
    left, taken = list(jobs), []

    def turn(job: PendingJob) -> tuple[Any, ...]:
        is_overdue = 2000 - job.queued_at_ms >= BOUND_MS
        share = -1.0 if is_overdue else now[job.project].share
        return -job.priority, share, job.queued_at_ms, job.id

    while left:
        best = min(left, key=turn)
        left.remove(best)
        taken.append(best.id)
        now[best.project] = replace(now[best.project], held=now[best.project].held + best.ranks)
    return taken


def order(jobs: list[PendingJob], uses: Mapping[str, Use]) -> list[str]:
    return [job.id for job in in_order(jobs, uses, now_ms=2000, fair_share_bound_ms=BOUND_MS)]


@given(jobs=queues, uses=shares)
def test_the_order_equals_the_obvious_one(jobs: list[PendingJob], uses: dict[str, Use]) -> None:
    assert order(jobs, uses) == obvious(jobs, uses)


@given(jobs=queues, uses=shares)
def test_what_has_waited_past_the_bound_is_not_overtaken(jobs: list[PendingJob], uses: dict[str, Use]) -> None:
    ordered = order(jobs, uses)
    for job in jobs:
        if 2000 - job.queued_at_ms >= BOUND_MS:
            before = {other.id: other for other in jobs if ordered.index(other.id) < ordered.index(job.id)}
            for other in before.values():
                assert other.priority > job.priority or (other.queued_at_ms, other.id) < (job.queued_at_ms, job.id)


@given(jobs=queues, uses=shares)
def test_within_a_project_priority_and_age_decide(jobs: list[PendingJob], uses: dict[str, Use]) -> None:
    ordered = order(jobs, uses)
    for project in PROJECTS:
        own = sorted(
            (job for job in jobs if job.project == project), key=lambda job: (-job.priority, job.queued_at_ms, job.id)
        )
        assert [name for name in ordered if name in {job.id for job in own}] == [job.id for job in own]


def test_equal_projects_take_turns() -> None:
    jobs = [pending(number, project="vision") for number in range(4)]
    jobs += [pending(number, project="speech") for number in range(10, 14)]
    projects = [job.project for job in in_order(jobs, {}, now_ms=20, fair_share_bound_ms=BOUND_MS)]
    assert projects == ["vision", "speech"] * 4


def test_a_heavier_project_gets_more() -> None:
    jobs = [pending(number, project="vision") for number in range(9)]
    jobs += [pending(number, project="speech") for number in range(10, 19)]
    first = in_order(jobs, {"speech": Use(weight=2.0)}, now_ms=20, fair_share_bound_ms=BOUND_MS)[:9]
    assert sum(job.project == "speech" for job in first) == 6


def test_use_counts_half_after_a_half_life_and_settles_at_what_is_held() -> None:
    assert Use(800).after(10, 10).used_s == pytest.approx(400)
    assert Use(0, 4).after(1e6, 10).used_s == pytest.approx(4 * 10 / math.log(2))
    assert Use(0, 4).after(1e-3, 1e6).used_s == pytest.approx(4e-3)
    assert Use(100, 2, 4.0).share == pytest.approx((100 + 2 * AHEAD_S) / 4)


@given(
    used=st.floats(0, 1e6), held=st.integers(0, 5000), first=st.floats(0, 1e5), second=st.floats(0, 1e5),
    half_life=st.floats(1, 1e6),
)  # fmt: skip
def test_use_may_be_brought_up_to_date_at_any_moment(
    used: float, held: int, first: float, second: float, half_life: float
) -> None:
    in_steps = Use(used, held).after(first, half_life).after(second, half_life)
    at_once = Use(used, held).after(first + second, half_life)
    assert in_steps.used_s == pytest.approx(at_once.used_s, rel=1e-9, abs=1e-6)
    assert 0 <= at_once.used_s <= max(used, held * half_life / math.log(2)) * (1 + 1e-9)
