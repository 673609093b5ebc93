"""Jobs are listed by filters, page by page, each once."""

from __future__ import annotations

import unicodedata
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import redis as redis_py
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lanes import examples
from store_builders import World, train, verify

from service.jobs.records import Rejected
from service.jobs.store import HostReport, JobFilter, Store, StoreLimits
from service.jobs.store.keyspace import JOB, JOBS


def test_filters_combine(store: Store, world: World) -> None:
    one = world.submit(name="alpha", labels={"team": "x", "tier": "1"})
    two = world.submit(name="beta", labels={"team": "y"})
    three, _ = store.jobs.submit(train(name="alphabet", labels={"team": "x"}), "bob")
    four, _ = store.jobs.submit(verify(one.id), "bob")
    store.jobs.cancel(two.id)

    def ids(**fields: Any) -> set[str]:
        return {job.id for job in store.jobs.list(JobFilter(**fields)).items}

    assert ids() == {one.id, two.id, three.id, four.id}
    assert ids(kind="verify") == {four.id}
    assert ids(states=("cancelled",)) == {two.id}
    assert ids(label="team") == {one.id, two.id, three.id}
    assert ids(label="team=x") == {one.id, three.id}
    assert ids(owner="bob", kind="train") == {three.id}
    assert ids(q="ALPHA") == {one.id, three.id}
    assert ids(q="alpha", owner="ada", label="tier=1") == {one.id}
    assert ids(q=four.id[-8:]) == {four.id}
    assert ids(states=("running",)) == set()


@pytest.mark.parametrize(
    "name",
    [
        "Über-Modell Größe",
        "ÖFFENTLICH",
        "Червоний мак",
        "Ångström",
        "日本語の実験",
        "İstanbul",
        "e\u0301te\u0301",
        "ΟΔΟΣ",
    ],
)
def test_a_job_is_found_by_its_own_name_in_any_script(store: Store, world: World, name: str) -> None:
    named, labelled = world.submit(name=name), world.submit(labels={"place": name})
    world.submit(name="another")
    forms = {name, name.lower(), name.upper(), name.casefold(), name.swapcase()}
    forms |= {unicodedata.normalize(form, each) for each in forms for form in ("NFC", "NFD")}
    for q in forms:
        assert [each.id for each in store.jobs.list(JobFilter(q=q)).items] == [labelled.id, named.id], q
        assert store.listing.counts(JobFilter(q=q)).states["queued"] == 2, q


def test_a_job_from_before_names_were_folded_is_found_as_it_was(store: Store, world: World) -> None:
    job = world.submit(name="Alpha")
    world.redis.hdel(JOB(job.id), "folded")
    assert [each.id for each in store.jobs.list(JobFilter(q="ALPHA")).items] == [job.id]


def test_pages_are_stable_while_jobs_arrive(store: Store, world: World) -> None:
    jobs = [world.submit() for _ in range(7)]
    first = store.jobs.list(limit=3)
    world.submit()
    second = store.jobs.list(limit=3, cursor=first.next_cursor)
    world.submit()
    third = store.jobs.list(limit=3, cursor=second.next_cursor)
    walked = [job.id for page in (first, second, third) for job in page.items]
    assert walked == [job.id for job in reversed(jobs)]
    assert third.next_cursor is None


@settings(max_examples=examples(15, 25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


def test_a_page_ends_when_enough_was_looked_at(store: Store, world: World) -> None:
    wanted = world.submit(name="needle")
    for _ in range(4):
        world.submit()
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


def test_all_jobs_are_in_the_index_with_equal_scores(store: Store, redis: redis_py.Redis, world: World) -> None:
    """Lexical ranges over a sorted set are defined for equal scores only."""
    for _ in range(3):
        world.submit()
    assert {score for _, score in redis.zrange(JOBS(), 0, -1, withscores=True)} == {0.0}
    assert redis.exists(*(JOB(job.id) for job in store.jobs.list().items)) == 3


def test_a_list_leaves_phases_out_and_specs_unless_they_are_asked_for(store: Store, world: World) -> None:
    job = world.submit(2)
    (listed,) = store.jobs.list().items
    assert (listed.id, listed.spec, listed.parallel) == (job.id, None, job.spec["parallel"])
    assert store.jobs.list(specs=True).items[0].spec == job.spec
    assert listed.model_dump(exclude={"spec"}) == job.model_dump(exclude={"spec", "phases", "torch"})


def test_a_page_of_long_records_ends_early_and_goes_on(store: Store, world: World) -> None:
    """The page takes no more of what it has not read, and each job comes once."""
    jobs = [world.submit(name="x" * 200) for _ in range(5)]
    walked, cursor, pages = [], None, 0
    while cursor is not None or not pages:
        page = replace(store.jobs, limits=StoreLimits(list_page_bytes=1000)).list(limit=100, cursor=cursor, specs=True)
        assert len(page.items) < 3
        walked += [job.id for job in page.items]
        cursor, pages = page.next_cursor, pages + 1
    assert walked == [job.id for job in reversed(jobs)]


def walk_active(store: Store, limit: int, **fields: Any) -> list[str]:
    """The ids of all pages in the order ``active``."""
    walked, cursor, pages = list[str](), None, 0
    while cursor is not None or not pages:
        page = store.listing.active(JobFilter(**fields), limit, cursor, specs=False, queue=store.queue)
        assert len(page.items) <= limit
        walked += [job.id for job in page.items]
        cursor, pages = page.next_cursor, pages + 1
        assert pages < 100
    return walked


@pytest.mark.parametrize("limit", [1, 2, 3, 50])
def test_what_runs_comes_first_then_the_queue_then_what_is_over(store: Store, world: World, limit: int) -> None:
    over, runs, urgent = world.submit(name="over"), world.submit(name="runs"), world.submit(name="urgent", priority=50)
    first, second = world.submit(name="first", labels={"team": "x"}), world.submit(name="second")
    dependent = world.submit(name="dependent", after=[first.id])
    store.jobs.cancel(over.id)
    store.hosts.beat(HostReport("a", "a", cpu_slots=1))
    store.jobs.cancel(urgent.id)
    store.attempts.place()
    assert store.jobs.get(runs.id).state == "starting"
    urgent = world.submit(name="later but urgent", priority=50)
    queued = [urgent.id, first.id, second.id, dependent.id]
    ended = [job.id for job in store.jobs.list(JobFilter(states=("cancelled",))).items]
    assert walk_active(store, limit) == [runs.id, *queued, *ended]
    assert walk_active(store, limit, states=("queued", "starting")) == [runs.id, *queued]
    assert walk_active(store, limit, states=("cancelled",)) == ended
    assert walk_active(store, limit, label="team=x") == [first.id]
    assert walk_active(store, limit, q="urgent") == [urgent.id, ended[0]]


@pytest.mark.parametrize("cursor", ["queued:job_00000000000000000000", "active:7", "ended", "queued:-1", "a:"])
def test_a_cursor_of_another_list_is_refused(store: Store, cursor: str) -> None:
    with pytest.raises(Rejected, match="cursor"):
        store.listing.active(JobFilter(), 5, cursor, specs=False, queue=store.queue)


@settings(max_examples=examples(15, 25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    jobs=st.lists(st.tuples(st.sampled_from("ab"), st.booleans()), max_size=10),
    filters=st.builds(JobFilter, owner=st.sampled_from(["a", None]), q=st.sampled_from([None, "TRAIN", "nothing"])),
    scan=st.integers(1, 3),
)
def test_counts_agree_with_the_list(
    store: Store, redis: redis_py.Redis, jobs: list[tuple[str, bool]], filters: JobFilter, scan: int
) -> None:
    redis.flushall()
    for name, is_over in jobs:
        job, _ = store.jobs.submit(train(name="train"), name)
        if is_over:
            store.jobs.cancel(job.id)
    listing = replace(store.listing, limits=StoreLimits(list_scan=scan))
    listed = Counter(job.state for job in store.jobs.list(filters).items)
    counted = listing.counts(replace(filters, states=("running",)))
    assert counted.exact
    assert {state: count for state, count in counted.states.items() if count} == listed


@pytest.mark.parametrize("q", [None, "train"])
def test_counts_say_when_they_were_cut_off(store: Store, world: World, q: str | None) -> None:
    for _ in range(4):
        world.submit(name="train")
    listing = replace(store.listing, limits=StoreLimits(list_most=3, list_scan=1))
    for filters in (JobFilter(q=q), JobFilter(q=q, owner="ada")):
        counted = listing.counts(filters)
        assert (counted.states["queued"], counted.exact) == (3, False)
