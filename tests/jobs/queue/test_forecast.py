"""When waiting jobs may start: known ends add up, unknown ones give no estimate, and no device is counted twice."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from service.jobs.queue.fair_share import PendingJob
from service.jobs.queue.forecast import Fleet, Known, RunningJob, Start, expected, forecast

LONG = 1e9


def pending(name: str, ranks: int = 1, **fields: Any) -> PendingJob:
    given_fields = {"max_hosts": 1, "priority": 0, "queued_at_ms": 0, **fields}
    return PendingJob(id=name, kind="train", owner="ada", pool="cpu", ranks=ranks, **given_fields)


def fleet(free: dict[str, int], total: dict[str, int]) -> Fleet:
    return Fleet({"cpu": free}, {"cpu": total})


def starts(free: int, running: list[RunningJob], queue: list[PendingJob], **options: Any) -> dict[str, Start]:
    total = free + sum(job.devices["a"] for job in running)
    known = {"typical_s": {}, "now_ms": 0, "max_queue_bypass_s": LONG, **options}
    return forecast(fleet({"a": free}, {"a": total}), running, queue, **known)


def busy(devices: int, left: Known | None) -> RunningJob:
    return RunningJob("cpu", {"a": devices}, left)


def test_what_fits_starts_now_and_rests_on_nothing() -> None:
    assert starts(2, [], [pending("one", 2)]) == {"one": Start(0.0, frozenset())}


def test_a_job_starts_when_what_is_before_it_ends() -> None:
    found = starts(0, [busy(2, Known(60, "limits"))], [pending("one", 2, timeout_s=30.0), pending("two", 1)])
    assert found == {"one": Start(60, frozenset({"limits"})), "two": Start(90, frozenset({"limits"}))}


def test_an_estimate_names_all_that_it_rests_on() -> None:
    running = [busy(1, Known(10, "progress")), busy(1, Known(20, "limits"))]
    assert starts(0, running, [pending("one", 2)])["one"] == Start(20, frozenset({"progress", "limits"}))
    assert starts(0, running, [pending("one", 1)])["one"] == Start(10, frozenset({"progress"}))


def test_nothing_known_gives_no_estimate() -> None:
    assert starts(0, [busy(2, None)], [pending("one", 2)]) == {}
    assert starts(2, [], [pending("unbounded", 2), pending("behind", 1)]).keys() == {"unbounded"}


def test_durations_of_the_kind_stand_in_for_a_missing_limit() -> None:
    found = starts(2, [], [pending("first", 2), pending("behind", 1)], typical_s={"train": 40.0})
    assert found["behind"] == Start(40, frozenset({"durations"}))


def test_a_job_that_ran_longer_than_is_typical_has_only_its_limit() -> None:
    assert expected(100, None, 30) == Known(70, "durations")
    assert expected(100, 50, 30) == Known(20, "limits")
    assert expected(100, 500, 130) == Known(370, "limits")
    assert expected(100, None, 130) is None
    assert expected(None, 100, 130) == Known(0, "limits")


def test_nothing_overtakes_a_job_that_has_waited_too_long() -> None:
    running = [busy(2, Known(60, "limits"))]
    queue = [pending("large", 4), pending("small", 1)]
    assert starts(2, running, queue)["small"].in_s == 0
    found = starts(2, running, queue, now_ms=10_000, max_queue_bypass_s=5)
    assert (found["large"].in_s, "small" in found) == (60, False)
    impossible = [pending("never", 9), pending("small", 1)]
    assert starts(2, running, impossible, now_ms=10_000, max_queue_bypass_s=5)["small"].in_s == 0


def test_a_quota_of_devices_keeps_a_job_waiting_and_no_other_projects() -> None:
    running = [RunningJob("cpu", {"a": 2}, Known(60, "limits"), "vision")]
    queue = [pending("ours", 2, project="vision"), pending("theirs", 3)]
    assert starts(4, running, queue)["ours"].in_s == 0
    found = starts(4, running, queue, room={"vision": 1}, now_ms=10_000, max_queue_bypass_s=5)
    assert found == {"ours": Start(60, frozenset({"limits"})), "theirs": Start(0, frozenset())}
    assert starts(4, running, queue, room={"vision": -math.inf}).keys() == {"theirs"}


def test_a_gang_spreads_over_hosts_only_where_it_may() -> None:
    two = fleet({"a": 2, "b": 2}, {"a": 2, "b": 2})
    jobs = [pending("alone", 3), pending("gang", 3, max_hosts=2)]
    found = forecast(two, [], jobs, {}, now_ms=0, max_queue_bypass_s=LONG)
    assert found.keys() == {"gang"}


jobs = st.builds(
    lambda number, ranks, priority, timeout: pending(
        f"job{number}", ranks, priority=priority, queued_at_ms=number, timeout_s=timeout
    ),
    st.integers(0, 10**6),
    st.integers(1, 4),
    st.integers(-1, 1),
    st.none() | st.floats(1, 100),
)
ends = st.none() | st.builds(Known, st.floats(0, 100), st.just("limits"))


@given(
    queue=st.lists(jobs, max_size=8, unique_by=lambda job: job.id),
    running=st.lists(st.builds(busy, st.integers(1, 3), ends), max_size=4),
    free=st.integers(0, 3),
)
def test_what_is_planned_never_holds_more_than_there_is(
    queue: list[PendingJob], running: list[RunningJob], free: int
) -> None:
    ordered = sorted(queue, key=lambda job: (-job.priority, job.queued_at_ms, job.id))
    found = starts(free, running, ordered)
    total = free + sum(job.devices["a"] for job in running)
    by_id = {job.id: job for job in queue}
    for moment in {start.in_s for start in found.values()}:
        held = sum(job.devices["a"] for job in running if job.left is None or job.left.seconds > moment)
        for name, start in found.items():
            job = by_id[name]
            if start.in_s <= moment and (job.timeout_s is None or start.in_s + job.timeout_s > moment):
                held += job.ranks
        assert held <= total
    same = [(one, other) for one in ordered for other in ordered if one.ranks == other.ranks and one.id in found]
    for one, other in same:
        if other.id in found and ordered.index(one) < ordered.index(other):
            assert found[one.id].in_s <= found[other.id].in_s
