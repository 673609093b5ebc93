"""Who makes room: nobody in vain, the fewest, those of the lowest priorities, and those that lose the least."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from service.jobs.queue.fair_share import PendingJob
from service.jobs.queue.preemption import PreemptibleJob, fits, plan

MIN_RUN_S = 10.0


def waiting(name: str = "urgent", ranks: int = 2, **fields: Any) -> PendingJob:
    common = {"kind": "train", "owner": "ada", "pool": "cpu", "max_hosts": 1, "priority": 5, "queued_at_ms": 0}
    return PendingJob(**{"id": name, "ranks": ranks, **common, **fields})


def running(name: str, ran_s: float = 100, priority: int = 0, **devices: int) -> PreemptibleJob:
    return PreemptibleJob(name, 1, priority, "cpu", devices, ran_s)


def victims(job: PendingJob, jobs: list[PreemptibleJob], **free: int) -> list[str] | None:
    found = plan([job], jobs, {"cpu": free}, MIN_RUN_S)
    return None if found is None else [victim.id for victim in found.victims]


def test_nobody_is_stopped_for_a_job_that_fits_or_never_would() -> None:
    jobs = [running("low", a=2)]
    assert victims(waiting(ranks=1), jobs, a=1) is None
    assert victims(waiting(ranks=9), jobs, a=1) is None
    assert victims(waiting(ranks=2), jobs, a=0) == ["low"]


def test_only_lower_priorities_that_ran_for_a_while_make_room() -> None:
    assert victims(waiting(), [running("equal", priority=5, a=2)], a=0) is None
    assert victims(waiting(), [running("fresh", ran_s=9, a=2)], a=0) is None
    assert victims(waiting(), [PreemptibleJob("gpu", 1, 0, "cuda", {"a": 2}, 100)], a=0) is None


def test_the_fewest_then_the_lowest_then_the_youngest() -> None:
    assert victims(waiting(), [running("one", a=1), running("other", a=1), running("both", ran_s=9e9, a=2)], a=0) == [
        "both"
    ]
    assert victims(waiting(), [running("low", ran_s=9e9, a=2), running("high", priority=1, a=2)], a=0) == ["low"]
    assert victims(waiting(), [running("old", a=2), running("young", ran_s=50, a=2)], a=0) == ["young"]


def test_what_is_free_counts_and_one_host_is_enough() -> None:
    jobs = [running("here", a=1), running("there", b=1)]
    assert victims(waiting(), jobs, a=0, b=1) == ["there"]
    assert victims(waiting(max_hosts=2), jobs, a=0, b=0) == ["here", "there"]
    assert victims(waiting(), jobs, a=0, b=0) is None
    assert victims(waiting(), [running("elsewhere", drained=2)], a=0) is None


def test_a_later_job_may_be_helped_where_the_first_cannot() -> None:
    found = plan([waiting("large", ranks=9), waiting("small")], [running("low", a=2)], {"cpu": {"a": 0}}, MIN_RUN_S)
    assert found is not None
    assert found.beneficiary.id == "small"


fleets = st.dictionaries(st.sampled_from("abc"), st.integers(0, 2), min_size=1)
crowds = st.lists(
    st.tuples(
        st.dictionaries(st.sampled_from("abcd"), st.integers(1, 2), min_size=1, max_size=2),
        st.integers(-1, 6),
        st.integers(0, 40),
    ),
    max_size=20,
).map(
    lambda rows: [
        PreemptibleJob(f"job{n:02}", 1, priority, "cpu", held, ran) for n, (held, priority, ran) in enumerate(rows)
    ]
)


@given(crowd=crowds, free=fleets, ranks=st.integers(1, 9), most_hosts=st.integers(1, 3))
def test_the_chosen_make_room_and_none_could_be_spared(
    crowd: list[PreemptibleJob], free: dict[str, int], ranks: int, most_hosts: int
) -> None:
    job = waiting(ranks=ranks, max_hosts=most_hosts)
    found = plan([job], crowd, {"cpu": free}, MIN_RUN_S)
    able = [other for other in crowd if other.priority < job.priority and other.ran_s >= MIN_RUN_S]
    if found is None:
        assert fits(job, free) or not fits(job, after(free, able))
        return
    chosen = found.victims
    assert set(chosen) <= set(able) if not chosen else all(victim in able for victim in chosen)
    assert not fits(job, free)
    assert fits(job, after(free, chosen))
    for spared in chosen:
        assert not fits(job, after(free, [victim for victim in chosen if victim is not spared]))
    if len(able) <= 8:
        fewer = itertools.combinations(able, len(chosen) - 1)
        assert not any(fits(job, after(free, some)) for some in fewer)


def after(free: dict[str, int], ended: Any) -> dict[str, int]:
    return {host: count + sum(job.devices.get(host, 0) for job in ended) for host, count in free.items()}
