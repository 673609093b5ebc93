"""Jobs are listed by filters, page by page, each once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import redis as redis_py
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_builders import train, verify

from service.jobs.records import Job, Rejected
from service.jobs.store import JobFilter, Store, StoreLimits
from service.jobs.store.keyspace import JOB, JOBS


def test_filters_combine(store: Store, submit: Callable[..., Job]) -> None:
    one = submit(name="alpha", labels={"team": "x", "tier": "1"})
    two = submit(name="beta", labels={"team": "y"})
    three, _ = store.jobs.submit(train(name="alphabet", labels={"team": "x"}), "bob")
    four, _ = store.jobs.submit(verify(one.id), "bob")
    store.jobs.cancel(two.id)

    def ids(**fields: str) -> set[str]:
        return {job.id for job in store.jobs.list(JobFilter(**fields)).items}

    assert ids() == {one.id, two.id, three.id, four.id}
    assert ids(kind="verify") == {four.id}
    assert ids(state="cancelled") == {two.id}
    assert ids(label="team") == {one.id, two.id, three.id}
    assert ids(label="team=x") == {one.id, three.id}
    assert ids(owner="bob", kind="train") == {three.id}
    assert ids(q="ALPHA") == {one.id, three.id}
    assert ids(q="alpha", owner="ada", label="tier=1") == {one.id}
    assert ids(q=four.id[-8:]) == {four.id}
    assert ids(state="running") == set()


def test_pages_are_stable_while_jobs_arrive(store: Store, submit: Callable[..., Job]) -> None:
    jobs = [submit() for _ in range(7)]
    first = store.jobs.list(limit=3)
    submit()
    second = store.jobs.list(limit=3, cursor=first.next_cursor)
    submit()
    third = store.jobs.list(limit=3, cursor=second.next_cursor)
    walked = [job.id for page in (first, second, third) for job in page.items]
    assert walked == [job.id for job in reversed(jobs)]
    assert third.next_cursor is None


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(owners=st.lists(st.sampled_from("ab"), max_size=12), limit=st.integers(1, 5), owner=st.sampled_from(["a", None]))
def test_walking_the_pages_finds_each_match_once(
    store: Store, redis: redis_py.Redis, owners: list[str], limit: int, owner: str | None
) -> None:
    redis.flushall()
    jobs = [store.jobs.submit(train(), name)[0] for name in owners]
    walked: list[str] = []
    cursor: str | None = None
    while True:
        page = store.jobs.list(JobFilter(owner=owner, q="train"), limit, cursor)
        walked += [job.id for job in page.items]
        assert len(page.items) <= limit
        if (cursor := page.next_cursor) is None:
            break
    assert walked == [job.id for job in reversed(jobs) if owner in (None, job.owner)]


def test_a_page_ends_when_enough_was_looked_at(store: Store, submit: Callable[..., Job]) -> None:
    wanted = submit(name="needle")
    for _ in range(4):
        submit()
    jobs = replace(store.jobs, limits=StoreLimits(list_most=3, list_scan=1))
    first = jobs.list(JobFilter(q="needle"))
    assert first.items == ()
    second = jobs.list(JobFilter(q="needle"), cursor=first.next_cursor)
    assert [job.id for job in second.items] == [wanted.id]


def test_bad_paging_is_refused(store: Store) -> None:
    with pytest.raises(Rejected, match="cursor"):
        store.jobs.list(cursor="yesterday")
    with pytest.raises(Rejected, match="limit"):
        store.jobs.list(limit=0)


def test_all_jobs_are_in_the_index_with_equal_scores(
    store: Store, redis: redis_py.Redis, submit: Callable[..., Job]
) -> None:
    """Lexical ranges over a sorted set are defined for equal scores only."""
    for _ in range(3):
        submit()
    assert {score for _, score in redis.zrange(JOBS(), 0, -1, withscores=True)} == {0.0}
    assert redis.exists(*(JOB(job.id) for job in store.jobs.list().items)) == 3


def test_a_list_leaves_specs_out_unless_they_are_asked_for(store: Store, submit: Callable[..., Job]) -> None:
    job = submit(2)
    (listed,) = store.jobs.list().items
    assert (listed.id, listed.spec, listed.parallel) == (job.id, None, job.spec["parallel"])
    assert store.jobs.list(specs=True).items[0].spec == job.spec
    assert listed.model_dump(exclude={"spec"}) == job.model_dump(exclude={"spec"})


def test_a_page_of_long_records_ends_early_and_goes_on(store: Store, submit: Callable[..., Job]) -> None:
    """The page takes no more of what it has not read, and each job comes once."""
    jobs = [submit(name="x" * 200) for _ in range(5)]
    walked, cursor, pages = [], None, 0
    while cursor is not None or not pages:
        page = replace(store.jobs, limits=StoreLimits(list_page_bytes=1000)).list(limit=100, cursor=cursor, specs=True)
        assert len(page.items) < 3
        walked += [job.id for job in page.items]
        cursor, pages = page.next_cursor, pages + 1
    assert walked == [job.id for job in reversed(jobs)]
