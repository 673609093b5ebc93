"""Jobs as users handle them: submission, idempotency, dependencies, listing, cancel, retry, delete."""

from __future__ import annotations

import string
import threading

import pytest
import redis as redis_py
from store_builders import FAILED, World, train, verify

from service.jobs.files import DataLayout
from service.jobs.records import AttemptRef, Conflict, Job, NotFound, PartOutcome, Rejected
from service.jobs.store import Store
from service.jobs.store.keyspace import CLOCK, ENDED, IDEMPOTENCY, JOB

NOBODY = "job_" + "0" * 20


def test_a_submitted_job_can_be_read_back(store: Store) -> None:
    spec = train(2, name="mine", labels={"team": "x"}, priority=3)
    job, created = store.jobs.submit(spec, "ada")
    assert created
    assert store.jobs.get(job.id) == job
    assert (job.kind, job.name, job.owner, job.priority, job.state, job.attempt) == (
        "train",
        "mine",
        "ada",
        3,
        "queued",
        0,
    )
    assert job.labels == {"team": "x"}
    assert type(spec).model_validate(job.spec) == spec


def test_ids_are_short_and_sort_by_age(store: Store, world: World) -> None:
    ids = [world.submit().id for _ in range(20)]
    assert ids == sorted(ids)
    assert all(len(name) == 24 and set(name[4:]) <= set(string.ascii_lowercase + string.digits) for name in ids)


def test_the_same_key_and_body_give_the_same_job(store: Store) -> None:
    first, _ = store.jobs.submit(train(), "ada", "key-1")
    again, created = store.jobs.submit(train(), "ada", "key-1")
    other, other_created = store.jobs.submit(train(), "bob", "key-1")
    assert (again.id, created) == (first.id, False)
    assert other_created
    assert other.id != first.id


def test_the_same_key_with_another_body_is_a_conflict(store: Store) -> None:
    store.jobs.submit(train(), "ada", "key-1")
    with pytest.raises(Conflict, match="another body"):
        store.jobs.submit(train(priority=1), "ada", "key-1")
    assert len(store.jobs.list().items) == 1


def test_a_race_between_two_bodies_of_one_key_is_decided_by_the_script(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both saw no earlier job when they looked."""
    monkeypatch.setattr("service.jobs.store.jobs.Jobs.known", lambda *_: None)
    first, _ = store.jobs.submit(train(), "ada", "key-1")
    assert store.jobs.submit(train(), "ada", "key-1") == (first, False)
    with pytest.raises(Conflict, match="another body"):
        store.jobs.submit(train(priority=1), "ada", "key-1")


def test_a_key_of_a_deleted_job_makes_a_new_one(store: Store) -> None:
    first, _ = store.jobs.submit(train(), "ada", "key-1")
    store.jobs.cancel(first.id)
    store.jobs.delete(first.id)
    second, created = store.jobs.submit(train(priority=1), "ada", "key-1")
    assert created
    assert second.id != first.id


def test_a_key_still_leads_to_its_job_when_the_checks_would_now_refuse(store: Store, world: World) -> None:
    needed = world.submit()
    spec = train(after=[needed.id])
    job, _ = store.jobs.submit(spec, "ada", "key-1")
    store.jobs.cancel(needed.id)
    assert store.jobs.submit(spec, "ada", "key-1") == (store.jobs.get(job.id), False)
    with pytest.raises(Rejected):
        store.jobs.submit(spec, "ada", "key-2")


def test_a_key_is_remembered_for_a_day(store: Store, redis: redis_py.Redis) -> None:
    store.jobs.submit(train(), "ada", "key-1")
    (name,) = [key for key in redis.scan_iter() if IDEMPOTENCY.pattern.fullmatch(key.decode())]
    assert 86_000 < redis.ttl(name) <= 86_400


def test_owner_and_key_cannot_be_mixed_up(store: Store) -> None:
    one, _ = store.jobs.submit(train(), "a:b", "c")
    two, created = store.jobs.submit(train(), "a", "b:c")
    assert created
    assert one.id != two.id


def test_concurrent_submissions_with_one_key_make_one_job(store: Store) -> None:
    found: list[tuple[str, bool]] = []
    gate = threading.Barrier(8)

    def submit_at_once() -> None:
        gate.wait()
        job, created = store.jobs.submit(train(), "ada", "key-1")
        found.append((job.id, created))

    threads = [threading.Thread(target=submit_at_once) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({name for name, _ in found}) == 1
    assert sorted(created for _, created in found) == [False] * 7 + [True]


def test_however_many_dependents_a_job_has_only_some_are_ended_in_one_call(store: Store, world: World) -> None:
    needed = world.submit()
    for _ in range(250):
        world.submit(after=[needed.id])
    store.jobs.cancel(needed.id)
    failed = []
    for _ in range(4):
        failed.append(store.gauges.jobs()["failed"])
        store.attempts.place()
    assert failed == [100, 200, 250, 250]
    assert world.redis.exists(ENDED()) == 0


def test_a_job_is_not_queued_again_while_its_dependents_are_still_being_ended(store: Store, world: World) -> None:
    needed = world.submit()
    for _ in range(150):
        world.submit(after=[needed.id])
    store.jobs.cancel(needed.id)
    with pytest.raises(Conflict, match="still being ended"):
        store.jobs.retry(needed.id)
    store.attempts.place()
    assert store.jobs.retry(needed.id).state == "queued"


def test_a_job_that_many_need_is_refused_deletion_in_few_words(store: Store, world: World) -> None:
    world.beat("a", cpu=1)
    needed = world.submit()
    users = [world.submit(after=[needed.id]) for _ in range(20)]
    store.attempts.finish(world.start(needed)[0], PartOutcome("succeeded"))
    with pytest.raises(Conflict, match=f"needed by {users[0].id}, .* and 15 more"):
        store.jobs.delete(needed.id)


def test_a_refused_job_leaves_nothing(store: Store, redis: redis_py.Redis) -> None:
    with pytest.raises(Rejected) as refusal:
        store.jobs.submit(train(after=[NOBODY]), "ada", "key-1")
    assert [problem.path for problem in refusal.value.problems] == ["after.0"]
    assert set(redis.keys()) <= {CLOCK().encode()}


def test_a_dependency_that_ends_between_check_and_write_refuses_the_job(
    store: Store, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = world.submit()
    monkeypatch.setattr("service.jobs.submission.request.CheckRequest.problems", lambda *_: [])
    store.jobs.cancel(needed.id)
    with pytest.raises(Rejected, match="is cancelled"):
        store.jobs.submit(train(after=[needed.id]), "ada")
    with pytest.raises(Rejected, match="there is no job"):
        store.jobs.submit(train(after=[NOBODY]), "ada")
    assert len(store.jobs.list().items) == 1


def test_more_devices_than_the_fleet_has_are_refused_once_a_host_is_known(store: Store, world: World) -> None:
    assert world.submit(8).state == "queued"
    world.beat("a", cpu=4)
    with pytest.raises(Rejected, match="4 cpu devices"):
        world.submit(8)


def test_a_job_waits_for_all_that_it_needs(store: Store, world: World) -> None:
    world.beat("a", cpu=4)
    one, two = world.submit(), world.submit()
    last, _ = store.jobs.submit(train(after=[one.id, two.id]), "ada")
    assert last.reason == f"waits for {one.id}, {two.id}"
    assert set(store.attempts.place()) == {one.id, two.id}
    reasons = []
    for job in (one, two):
        assert store.attempts.place() == []
        ref = AttemptRef(job.id, 1, "a")
        store.attempts.claim(ref, "s")
        store.attempts.finish(ref, PartOutcome("succeeded"))
        reasons.append(store.jobs.get(last.id).reason)
    assert reasons == [f"waits for {two.id}", "waits for devices"]
    assert store.attempts.place() == [last.id]


def test_a_retried_job_names_only_the_needed_jobs_that_have_not_ended(store: Store, world: World) -> None:
    world.beat("a", cpu=4)
    one, two = world.submit(), world.submit()
    last = world.submit(after=[two.id, one.id])
    (ref, *_) = world.start(one)
    store.jobs.cancel(last.id)
    assert store.jobs.retry(last.id).reason == f"waits for {two.id}, {one.id}"
    store.attempts.finish(ref, PartOutcome("succeeded"))
    assert store.jobs.get(last.id).reason == f"waits for {two.id}"


def test_a_model_from_a_job_implies_a_dependency(store: Store, world: World) -> None:
    trained = world.submit()
    job, _ = store.jobs.submit(verify(trained.id), "ada")
    world.beat("a", cpu=4)
    assert store.attempts.place() == [trained.id]
    assert store.jobs.get(job.id).state == "queued"


def test_a_failure_fails_all_that_need_it_at_once(store: Store, world: World) -> None:
    world.beat("a", cpu=4)
    root = world.submit()
    left, right = world.submit(after=[root.id]), world.submit(after=[root.id])
    tip = world.submit(after=[left.id, right.id])
    (ref,) = world.start(root)
    store.attempts.finish(ref, FAILED)
    for job in (left, right, tip):
        now = store.jobs.get(job.id)
        assert now.state == "failed"
        assert now.error is not None
        assert now.error.type == "DependencyFailed"
        assert world.states(job) == ["queued", "failed"]
    assert store.attempts.place() == []


def test_cancelling_what_others_need_fails_them(store: Store, world: World) -> None:
    root = world.submit()
    user = world.submit(after=[root.id])
    assert store.jobs.cancel(root.id).state == "cancelled"
    assert store.jobs.get(user.id).state == "failed"


def test_retry_starts_over_and_needs_its_dependencies_again(store: Store, world: World) -> None:
    world.beat("a", cpu=4)
    root = world.submit()
    user = world.submit(after=[root.id])
    (ref,) = world.start(root)
    store.attempts.finish(ref, FAILED)
    with pytest.raises(Conflict, match=root.id):
        store.jobs.retry(user.id)
    again = store.jobs.retry(root.id)
    assert (again.state, again.error, again.ended_at, again.placement) == ("queued", None, None, ())
    assert store.jobs.retry(user.id).reason == f"waits for {root.id}"
    (ref,) = world.start(root)
    assert ref.attempt == 2
    store.attempts.finish(ref, PartOutcome("succeeded"))
    assert store.attempts.place() == [user.id]
    assert world.states(root) == [
        "queued",
        "starting",
        "running",
        "failed",
        "queued",
        "starting",
        "running",
        "succeeded",
    ]
    with pytest.raises(Conflict, match="succeeded"):
        store.jobs.retry(root.id)


def test_a_retry_brings_all_automatic_retries_back(store: Store, world: World) -> None:
    world.beat("a", cpu=1)
    job = world.submit(retries=1)
    for expected in ("queued", "failed"):
        assert store.attempts.finish(world.start(job)[0], FAILED).state == expected
    store.jobs.retry(job.id)
    for expected in ("queued", "failed"):
        assert store.attempts.finish(world.start(job)[0], FAILED).state == expected


def test_delete_takes_terminal_jobs_that_nobody_needs(store: Store, data: DataLayout, world: World) -> None:
    root = world.submit(labels={"a": "b"})
    user = world.submit(after=[root.id])
    with pytest.raises(Conflict, match="queued"):
        store.jobs.delete(root.id)
    folder = data.job(root.id).artifacts
    folder.mkdir(parents=True)
    (folder / "x").write_text("x")
    store.jobs.cancel(root.id)
    store.jobs.delete(root.id)
    assert not data.job(root.id).root.exists()
    assert world.redis.keys(f"*{root.id}*") == []
    assert [job.id for job in store.jobs.list().items] == [user.id]
    with pytest.raises(NotFound):
        store.jobs.delete(root.id)


def test_a_finished_job_that_an_unfinished_one_will_read_is_kept(store: Store, world: World) -> None:
    world.beat("a", cpu=4)
    root = world.submit()
    (ref,) = world.start(root)
    store.attempts.finish(ref, PartOutcome("succeeded"))
    user, _ = store.jobs.submit(verify(root.id), "ada")
    with pytest.raises(Conflict, match=user.id):
        store.jobs.delete(root.id)
    store.jobs.cancel(user.id)
    store.jobs.delete(root.id)


def test_cancelling_an_ended_job_is_a_conflict_and_twice_is_not(store: Store, world: World) -> None:
    world.beat("a", cpu=4)
    done, stopped = world.submit(), world.submit()
    (ref,) = world.start(done)
    store.attempts.finish(ref, PartOutcome("succeeded"))
    with pytest.raises(Conflict, match="final"):
        store.jobs.cancel(done.id)
    store.jobs.cancel(stopped.id)
    assert store.jobs.cancel(stopped.id).state == "cancelled"


@pytest.mark.parametrize("call", ["get", "cancel", "retry", "delete"])
@pytest.mark.parametrize("name", [NOBODY, "job_1", "../../etc/passwd"])
def test_unknown_jobs_are_not_found(store: Store, call: str, name: str) -> None:
    with pytest.raises(NotFound):
        getattr(store.jobs, call)(name)


def test_delete_never_leaves_the_jobs_folder(store: Store, data: DataLayout) -> None:
    precious = data.root / "precious"
    precious.mkdir(parents=True)
    with pytest.raises(NotFound):
        store.jobs.delete("../precious")
    assert precious.is_dir()


def test_expiry_reaches_past_jobs_that_stay(store: Store, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many of those submitted first ended only now."""
    monkeypatch.setattr("service.jobs.store.jobs._CHUNK", 2)
    jobs = [world.submit() for _ in range(7)]
    for job in jobs:
        store.jobs.cancel(job.id)
        world.redis.hincrby(JOB(job.id), "created_at", -10_000_000)
    for job in jobs[4:]:
        world.redis.hincrby(JOB(job.id), "ended_at", -10_000_000)
    assert store.jobs.expire(3600, most=2) == (jobs[4].id, jobs[5].id)
    assert store.jobs.expire(3600) == (jobs[6].id,)
    later = [world.submit() for _ in range(3)]
    for job in later:
        store.jobs.cancel(job.id)
    asked = world.redis.info("commandstats")["cmdstat_hmget"]["calls"]
    assert store.jobs.expire(3600) == ()
    assert world.redis.info("commandstats")["cmdstat_hmget"]["calls"] == asked + 5, "of jobs that are too young, one"


def test_ended_jobs_expire_unless_something_needs_them(store: Store, redis: redis_py.Redis, world: World) -> None:
    world.beat("a", cpu=4)

    def ended() -> Job:
        (ref,) = world.start(job := world.submit())
        store.attempts.finish(ref, PartOutcome("succeeded", {}))
        return job

    old, needed, fresh = ended(), ended(), ended()
    running = world.submit(after=[needed.id])
    world.start(running)
    for job in (old, needed):
        redis.hset(JOB(job.id), mapping={"created_at": 1_000_000, "ended_at": 1_000_000})
    assert store.jobs.expire(3600.0) == (old.id,)
    assert {job.id for job in store.jobs.list().items} == {needed.id, fresh.id, running.id}
    assert store.jobs.expire(3600.0) == ()
