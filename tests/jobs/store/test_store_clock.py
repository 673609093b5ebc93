"""The store's own clock: no lease ends because the broker was away or its time of day was set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis as redis_py
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lanes import examples
from store_builders import train

from service.jobs.files import DataLayout
from service.jobs.records import AttemptRef
from service.jobs.store import Store, StoreLimits
from service.jobs.store.client import BrokerClient, translated
from service.jobs.store.hosts import HostReport
from service.jobs.store.scripts import assemble

LEASE_S = 15.0
LONGEST_STEP_S = 1.0
NOW = assemble("-- USES: core\nreturn whole(now_ms())", [])


class TimeOfDay:
    """Stands in for the broker's ``TIME`` in every script."""

    def __init__(self) -> None:
        self.seconds = 1_763_000_000.0

    def put_in(self, text: str) -> str:
        assert 'redis.call("TIME")' in text or "TIME" not in text
        whole, fraction = divmod(self.seconds, 1)
        return text.replace('redis.call("TIME")', f'{{ "{whole:.0f}", "{fraction * 1e6:.0f}" }}')


@pytest.fixture
def time_of_day(monkeypatch: pytest.MonkeyPatch) -> TimeOfDay:
    standing_in = TimeOfDay()

    def script(client: BrokerClient, sha: str, text: str, arguments: Any) -> Any:
        with translated():
            return client._run("EVAL", standing_in.put_in(text), 0, *(str(argument) for argument in arguments))

    monkeypatch.setattr(BrokerClient, "script", script)
    return standing_in


@pytest.fixture
def store(broker: str, redis: redis_py.Redis, data: DataLayout, time_of_day: TimeOfDay) -> Iterator[Store]:
    connected = Store.connect(broker, data, StoreLimits(lease_s=LEASE_S, heartbeat_s=10))
    yield connected
    connected.close()


@pytest.fixture
def running(store: Store) -> AttemptRef:
    """A part that was just claimed, of a job that may not be lost at all."""
    store.hosts.beat(HostReport("a", "a", cpu_slots=2))
    job, _ = store.jobs.submit(train(), "ada")
    assert store.attempts.place() == [job.id]
    ref = AttemptRef(job.id, 1, "a")
    store.attempts.claim(ref, "s")
    return ref


@pytest.fixture
def live_on(store: Store, time_of_day: TimeOfDay) -> Callable[[float], list[str]]:
    """Agents work for so many seconds; the jobs that they reaped."""

    def live(seconds: float) -> list[str]:
        reaped = []
        for _ in range(round(seconds * 4)):
            time_of_day.seconds += 0.25
            reaped += store.attempts.reap()
        return reaped

    return live


@pytest.mark.parametrize("jump_s", [60.0, -60.0, 3600.0, -3600.0])
def test_a_lease_survives_that_the_brokers_time_is_set(
    store: Store, time_of_day: TimeOfDay, running: AttemptRef, live_on: Callable[[float], list[str]], jump_s: float
) -> None:
    time_of_day.seconds += jump_s
    assert store.attempts.reap() == []
    assert live_on(0.8 * LEASE_S) == []
    assert store.attempts.renew(running) == "run"
    assert live_on(LEASE_S - 1) == []


@pytest.mark.parametrize("jump_s", [0.0, 60.0, -60.0])
def test_a_lease_that_nobody_renews_ends_in_its_time_all_the_same(
    time_of_day: TimeOfDay, running: AttemptRef, live_on: Callable[[float], list[str]], jump_s: float
) -> None:
    live_on(1)
    time_of_day.seconds += jump_s
    assert live_on(LEASE_S + 0.5) == [running.job_id]


def test_after_an_outage_supervisors_have_the_time_to_renew_that_they_had_before(
    store: Store, time_of_day: TimeOfDay, running: AttemptRef, live_on: Callable[[float], list[str]]
) -> None:
    time_of_day.seconds += 20 * LEASE_S
    assert store.attempts.reap() == []
    assert live_on(LEASE_S - 2) == []
    assert store.attempts.renew(running) == "run"
    assert live_on(LEASE_S - 2) == []
    assert live_on(3) == [running.job_id]


@pytest.mark.parametrize("jump_s", [60.0, -60.0])
def test_a_host_keeps_its_work_and_gets_more_when_the_time_is_set(
    store: Store, time_of_day: TimeOfDay, running: AttemptRef, jump_s: float
) -> None:
    time_of_day.seconds += jump_s
    job, _ = store.jobs.submit(train(), "ada")
    assert store.attempts.place() == [job.id]
    assert store.jobs.get(running.job_id).state == "running"


def test_jobs_keep_their_order_when_the_time_is_set_back(
    store: Store, time_of_day: TimeOfDay, running: AttemptRef, live_on: Callable[[float], list[str]]
) -> None:
    store.hosts.drain("a")
    submitted = []
    for jump_s in (0.0, -60.0, 30.0):
        live_on(0.5)
        time_of_day.seconds += jump_s
        submitted.append(store.jobs.submit(train(), "ada")[0].id)
    store.hosts.beat(HostReport("b", "b", cpu_slots=3))
    assert store.attempts.place() == submitted
    assert submitted == sorted(submitted)


def test_a_host_is_dead_by_the_time_of_day_when_nobody_calls_the_store(
    store: Store, time_of_day: TimeOfDay, running: AttemptRef
) -> None:
    """The store's clock stands still, since the only worker is gone; whoever asks about hosts is told all the same."""
    assert store.hosts.list()[0].alive
    time_of_day.seconds += 31
    assert not store.hosts.list()[0].alive


@settings(max_examples=examples(20, 50), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.tuples(st.floats(0, 5), st.sampled_from([0.0, 0.0, 60.0, -60.0, -0.1])), max_size=30))
def test_the_clock_never_goes_back_and_is_never_ahead(
    redis: redis_py.Redis, time_of_day: TimeOfDay, steps: list[tuple[float, float]]
) -> None:
    """Between two calls it goes on by a second at most, so it overtakes real time only where the time of day jumped:
    by a second each time. Under a quarter of a second is not noted, and a small step back may take that much away.
    """
    redis.flushall()
    before = int(redis.eval(time_of_day.put_in(NOW), 0))
    for passed, jump in steps:
        time_of_day.seconds += passed + jump
        now = int(redis.eval(time_of_day.put_in(NOW), 0))
        assert before - 250 <= now <= before + 1000 * LONGEST_STEP_S + 250
        if jump == 0 and 0.25 <= passed <= LONGEST_STEP_S:
            assert now >= before
        before = now
