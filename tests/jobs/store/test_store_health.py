"""Hosts that cannot start work: avoided by the job that they failed, marked after a second failure, tried again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from service.jobs.records import AttemptRef, FailingHost, Job, JobError, PartOutcome
from service.jobs.store import Store

Submit = Callable[..., Job]
Fail = Callable[..., None]
PassTime = Callable[[float], None]
LOG: Any = {"type": "log", "time": 1.0, "rank": 0, "stream": "stdout", "line": "hello"}


@pytest.fixture
def where(store: Store) -> Callable[[Job], list[str]]:
    """The hosts on which a job was placed."""
    return lambda job: [share.host for share in store.jobs.get(job.id).placement]


@pytest.fixture
def fail(store: Store, expire: Callable[[AttemptRef], None]) -> Fail:
    """Nobody claims the parts of these jobs on the sick host in time."""

    def fail_some(*jobs: Job, host: str = "sick") -> None:
        for job in jobs:
            expire(AttemptRef(job.id, store.jobs.get(job.id).attempt, host))
        assert sorted(store.attempts.reap()) == sorted(job.id for job in jobs)

    return fail_some


@pytest.fixture
def failing(store: Store) -> Callable[[], FailingHost | None]:
    return lambda: next(host for host in store.hosts.list() if host.name == "sick").failing


@pytest.fixture
def marked(store: Store, submit: Submit, beat: Any, fail: Fail) -> list[Job]:
    """Two jobs that the only host, of four slots, did not start."""
    beat("sick", cpu=4)
    jobs = [submit(), submit()]
    store.attempts.place()
    fail(*jobs)
    return jobs


def test_a_job_goes_to_the_good_host_after_the_sick_one_did_not_start_it(
    store: Store, submit: Submit, beat: Any, fail: Fail, where: Any
) -> None:
    """The sick host fits better, so without a memory it would be chosen every time."""
    beat("sick", cpu=1)
    beat("good", cpu=8)
    job = submit()
    store.attempts.place()
    assert where(job) == ["sick"]
    fail(job)
    assert store.attempts.place() == [job.id]
    assert where(job) == ["good"]


def test_a_job_waits_for_a_good_host_that_is_busy(
    store: Store, submit: Submit, beat: Any, fail: Fail, where: Any
) -> None:
    beat("good", cpu=1)
    busy = submit()
    assert store.attempts.place() == [busy.id]
    beat("sick", cpu=1)
    job, other = submit(), submit(priority=-1)
    store.attempts.place()
    fail(job)
    assert store.attempts.place() == [other.id], "one failure does not mark the host"
    reason = store.jobs.get(job.id).reason
    assert reason is not None
    assert reason.endswith("waits for 1 free cpu devices on one host, other than host sick, where it did not start")
    store.jobs.cancel(busy.id)
    assert store.attempts.place() == [job.id]
    assert where(job) == ["good"]


def test_a_gang_that_needs_the_host_gets_it_again(
    store: Store, submit: Submit, beat: Any, fail: Fail, where: Any
) -> None:
    """It could not run anywhere else, ever."""
    beat("sick", cpu=2)
    beat("good", cpu=2)
    gang = submit(4, max_hosts=2)
    store.attempts.place()
    fail(gang)
    assert store.attempts.place() == [gang.id]
    assert sorted(where(gang)) == ["good", "sick"]


def test_a_gang_avoids_the_host_where_others_suffice(
    store: Store, submit: Submit, beat: Any, fail: Fail, where: Any
) -> None:
    for name in ("good", "sick", "well"):
        beat(name, cpu=2)
    gang = submit(4, max_hosts=2)
    store.attempts.place()
    assert "sick" in where(gang)
    fail(gang)
    assert store.attempts.place() == [gang.id]
    assert sorted(where(gang)) == ["good", "well"]


def test_a_host_is_marked_with_the_reason_after_a_second_failure(
    store: Store, submit: Submit, beat: Any, fail: Fail, failing: Any
) -> None:
    beat("sick", cpu=1)
    job = submit()
    store.attempts.place()
    fail(job)
    assert failing() is None
    store.attempts.place()
    fail(job)
    mark = failing()
    assert mark.failed_starts == 2
    assert mark.reason == "nobody on host sick claimed the job in time"
    assert 59 < mark.retry_in_s <= 60
    assert store.attempts.place() == []
    reason = store.jobs.get(job.id).reason
    assert reason is not None
    assert "no hosts that take work" in reason


def test_a_marked_host_is_tried_with_one_part_after_growing_pauses(
    store: Store, fail: Fail, failing: Any, pass_time: PassTime, marked: list[Job]
) -> None:
    first = marked[0]
    assert store.attempts.place() == []
    pass_time(61)
    assert failing().retry_in_s == 0
    assert store.attempts.place() == [first.id]
    assert store.attempts.place() == []
    fail(first)
    assert 119 < failing().retry_in_s <= 120
    pass_time(61)
    assert store.attempts.place() == []
    pass_time(60)
    assert len(store.attempts.place()) == 1


def test_parts_that_were_placed_together_count_as_one_failure_of_a_marked_host(
    store: Store, submit: Submit, beat: Any, fail: Fail, failing: Any
) -> None:
    beat("sick", cpu=8)
    jobs = [submit() for _ in range(8)]
    store.attempts.place()
    fail(*jobs)
    assert failing().failed_starts == 8
    assert 59 < failing().retry_in_s <= 60


def test_ranks_that_run_clear_the_mark(
    store: Store, submit: Submit, failing: Any, pass_time: PassTime, marked: list[Job]
) -> None:
    pass_time(61)
    (tried,) = store.attempts.place()
    ref = AttemptRef(tried, 2, "sick")
    store.attempts.claim(ref, "s")
    assert failing() is not None
    store.attempts.emit(ref, [LOG])
    assert failing() is None
    assert len(store.attempts.place()) == 1


def test_an_operators_resume_clears_the_mark(store: Store, failing: Any, marked: list[Job]) -> None:
    assert store.hosts.resume("sick").failing is None
    assert sorted(store.attempts.place()) == sorted(job.id for job in marked)


@pytest.mark.parametrize("began", [False, True])
def test_a_supervisor_that_is_lost_before_anything_ran_counts_as_a_failed_start(
    store: Store, submit: Submit, beat: Any, failing: Any, began: bool
) -> None:
    """A host that claims everything and starts nothing, say with a full disk."""
    beat("sick", cpu=1)
    submit()
    for attempt in (1, 2):
        (job_id,) = store.attempts.place()
        ref = AttemptRef(job_id, attempt, "sick")
        store.attempts.claim(ref, "s")
        if began:
            store.attempts.emit(ref, [LOG])
        store.attempts.finish(ref, PartOutcome("lost", error=JobError(type="SupervisorFault", message="disk full")))
    assert (failing() is None) == began
    assert began or failing().reason == "disk full"


def test_a_job_that_fails_by_itself_says_nothing_against_its_host(
    store: Store, submit: Submit, beat: Any, failing: Any
) -> None:
    beat("sick", cpu=1)
    submit(retries=3)
    for attempt in (1, 2, 3):
        (job_id,) = store.attempts.place()
        ref = AttemptRef(job_id, attempt, "sick")
        store.attempts.claim(ref, "s")
        store.attempts.finish(ref, PartOutcome("failed", error=JobError(type="ValueError", message="no")))
    assert failing() is None


def test_the_mark_goes_with_the_host_and_a_drain_stays(store: Store, beat: Any, marked: list[Job]) -> None:
    store.hosts.leave("sick")
    beat("sick", cpu=4)
    assert store.hosts.list()[0].failing is None
    store.hosts.drain("sick")
    store.hosts.leave("sick")
    assert not store.hosts.list()[0].alive
    assert beat("sick", cpu=4).drain
    assert store.attempts.place() == []
