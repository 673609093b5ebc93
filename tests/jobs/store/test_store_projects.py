"""Projects: which keys and jobs belong to them."""

from __future__ import annotations

import orjson
import pytest
import redis as redis_py
from store_builders import World, train

from service.jobs.accounts import Scope
from service.jobs.records import Rejected
from service.jobs.spec.common import STATES
from service.jobs.store import JobFilter, Store
from service.jobs.store.keyspace import API_KEYS, JOB, JOBS, JOBS_BY


def listed(store: Store, **filters: str) -> set[str]:
    return {job.id for job in store.jobs.list(JobFilter(**filters)).items}


def test_a_job_belongs_to_one_project(store: Store, world: World) -> None:
    ours, (theirs, _) = world.submit(), store.jobs.submit(train(), "ada", project="vision")
    assert (ours.project, theirs.project) == ("default", "vision")
    assert listed(store, project="vision") == listed(store, visible_to="vision") == {theirs.id}
    assert listed(store, project="default", owner="ada") == {ours.id}
    store.jobs.cancel(theirs.id)
    store.jobs.delete(theirs.id)
    assert listed(store, project="vision") == set()


def test_an_idempotency_key_counts_within_a_project(store: Store) -> None:
    one, _ = store.jobs.submit(train(), "ada", "key-1")
    two, created = store.jobs.submit(train(), "ada", "key-1", project="vision")
    assert created
    assert one.id != two.id
    assert store.jobs.submit(train(), "ada", "key-1", project="vision") == (two, False)


def test_states_are_counted_by_project(store: Store, redis: redis_py.Redis, world: World) -> None:
    def by_state(project: str) -> dict[str, int]:
        counts = {state: redis.zcard(JOBS_BY(f"state:{state}:{project}")) for state in STATES}
        return {state: count for state, count in counts.items() if count}

    job, (other, _) = world.submit(), store.jobs.submit(train(), "ada", project="vision")
    world.beat("a", cpu=1)
    world.start(job)
    assert by_state("default") == {"running": 1}
    assert by_state("vision") == {"queued": 1}
    store.jobs.cancel(other.id)
    assert by_state("vision") == {"cancelled": 1}
    store.jobs.delete(other.id)
    assert by_state("vision") == {}


def test_jobs_of_older_versions_belong_to_the_default_project(store: Store, world: World) -> None:
    """As they were stored then: without the field and its indexes."""
    jobs = [world.submit() for _ in range(3)]
    for job in jobs:
        indexes = orjson.loads(world.redis.hget(JOB(job.id), "indexes") or b"")
        kept = [index for index in indexes if not index.startswith(("project:", "visible:"))]
        world.redis.hset(JOB(job.id), "indexes", orjson.dumps(kept))
        world.redis.hdel(JOB(job.id), "project")
    world.redis.delete(*(JOBS_BY(index) for index in ("project:default", "visible:default", "state:queued:default")))
    assert store.jobs.get(jobs[0].id).project == "default"
    store.jobs.cancel(jobs[0].id)
    store.jobs.adopt()
    ids = {job.id for job in jobs}
    assert listed(store, project="default") == listed(store, visible_to="default") == ids
    assert world.redis.zcard(JOBS_BY("state:queued:default")) == 2
    assert world.redis.zcard(JOBS_BY("state:cancelled:default")) == 1
    before = world.redis.dump(JOB(jobs[1].id))
    store.jobs.adopt()
    assert world.redis.dump(JOB(jobs[1].id)) == before
    store.jobs.delete(jobs[0].id)
    assert listed(store, project="default") == ids - {jobs[0].id}


def test_adoption_walks_all_jobs(store: Store, redis: redis_py.Redis, world: World) -> None:
    job = world.submit()
    redis.zadd(JOBS(), {f"job_{number:020}": 0 for number in range(1200)})  # deleted while they were walked
    redis.hdel(JOB(job.id), "project")
    store.jobs.adopt()
    assert redis.hget(JOB(job.id), "project") == b"default"


@pytest.mark.parametrize(
    ("scopes", "project", "found", "operates", "role"),
    [
        (["read"], None, "default", False, "viewer"),
        (["read", "submit"], None, "default", False, "submitter"),
        (["admin"], None, None, True, "maintainer"),
        (["submit", "admin"], "vision", "vision", False, "maintainer"),
        (["read"], "vision", "vision", False, "viewer"),
    ],
)
def test_a_key_speaks_in_one_project_unless_an_operator_has_it(
    store: Store, *, scopes: list[Scope], project: str | None, found: str | None, operates: bool, role: str
) -> None:
    store.projects.create("vision")
    made, secret = store.keys.create("ann", scopes, project)
    key = store.keys.verify(secret)
    assert key is not None
    assert (key.project, key.is_operator, key.role) == (found, operates, role)
    assert made.project == found


@pytest.mark.parametrize(("scopes", "project"), [(["read", "submit"], "default"), (["admin"], None)])
def test_keys_of_older_versions_speak_as_they_did(
    store: Store, redis: redis_py.Redis, scopes: list[Scope], project: str | None
) -> None:
    key, secret = store.keys.create("ann", scopes)
    entry = orjson.loads(redis.hget(API_KEYS(), key.id) or b"")
    del entry["project"]
    redis.hset(API_KEYS(), key.id, orjson.dumps(entry))
    found = store.keys.verify(secret)
    assert found is not None
    assert found.project == project


@pytest.mark.parametrize("name", ["", "Vision", "a b", "-x", "a" * 64, "a/b"])
def test_other_names_of_projects_are_refused(store: Store, name: str) -> None:
    with pytest.raises(Rejected, match="project"):
        store.keys.create("ann", ["read"], name)


def test_an_admin_of_one_project_is_no_operator(store: Store) -> None:
    store.projects.create("vision")
    store.keys.create("ann", ["admin"], "vision")
    assert store.keys.ensure_admin() is not None
    assert store.keys.ensure_admin() is None


def test_the_same_name_in_two_projects_is_two_owners(store: Store) -> None:
    """Processes that check specs, and caches of compiled code, are one owner's."""
    store.projects.create("vision")
    owners = [store.keys.create("ann", ["submit"], project)[0].owner for project in ("default", "vision")]
    assert len(set(owners)) == 2
