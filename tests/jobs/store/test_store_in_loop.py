"""Calls of the store in an event loop: what they return and raise is theirs, and many share a trip to the broker."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis as redis_py
from broker_outages import PATIENT, back_soon
from store_builders import World, train

from service.jobs.files import DataLayout
from service.jobs.host.embedded_broker import EmbeddedBroker
from service.jobs.records import Job, NotFound
from service.jobs.store import Store, StoreUnavailable, in_loop
from service.jobs.tracing import current_traceparent, set_current_traceparent


@pytest.fixture
def own(tmp_path: Path, data: DataLayout) -> Iterator[tuple[Store, redis_py.Redis]]:
    """A store on a broker of its own, and a client that looks at that."""
    with EmbeddedBroker.start(tmp_path / "broker") as broker:
        store = Store.connect(broker.url, data)
        yield store, redis_py.Redis.from_url(broker.url)
        store.close()


def test_each_of_many_calls_gets_its_own_answer(store: Store, world: World) -> None:
    jobs = [world.submit(name=f"job {number}") for number in range(20)]
    unknown = "job_" + "0" * 20

    async def read() -> list[Job | BaseException]:
        wanted = [job_id for job in jobs for job_id in (job.id, unknown)]
        found = await asyncio.gather(*(in_loop(store.jobs.get, each) for each in wanted), return_exceptions=True)
        await store.client.leave_loop()
        return found

    found = asyncio.run(read())
    assert found[::2] == jobs
    assert all(isinstance(each, NotFound) for each in found[1::2])


def test_calls_of_one_moment_share_few_connections(own: tuple[Store, redis_py.Redis]) -> None:
    store, broker = own
    job, _ = store.jobs.submit(train(), "ada")
    store.client.close()
    before = broker.info("stats")["total_connections_received"]

    async def read() -> None:
        for _ in range(5):
            assert await asyncio.gather(*(in_loop(store.jobs.get, job.id) for _ in range(100))) == [job] * 100
        assert len(broker.client_list()) <= 1 + 4
        await store.client.leave_loop()

    asyncio.run(read())
    assert broker.info("stats")["total_connections_received"] - before <= 4
    assert len(broker.client_list()) == 1, "all are closed when the loop ends"


def test_a_broker_that_forgot_the_scripts_gets_their_texts(own: tuple[Store, redis_py.Redis]) -> None:
    store, broker = own
    job, _ = store.jobs.submit(train(), "ada")

    async def read() -> list[Job]:
        broker.script_flush()
        return await asyncio.gather(*(in_loop(store.jobs.get, job.id) for _ in range(10)))

    assert asyncio.run(read()) == [job] * 10


def test_a_call_that_nobody_waits_for_any_more_is_made_once_and_to_its_end(
    own: tuple[Store, redis_py.Redis],
) -> None:
    """A submission is several commands; one that has begun becomes a whole job."""
    store, _ = own

    async def leave() -> None:
        submitting = asyncio.create_task(in_loop(store.jobs.submit, train(name="left"), "ada"))
        await asyncio.sleep(0)
        submitting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await submitting
        while not store.jobs.list().items:
            await asyncio.sleep(0.01)
        await store.client.leave_loop()

    asyncio.run(leave())
    assert [job.name for job in store.jobs.list().items] == ["left"]


def test_calls_wait_for_a_broker_that_restarts(tmp_path: Path, data: DataLayout) -> None:
    folder = tmp_path / "broker"
    with EmbeddedBroker.start(folder) as broker:
        store = Store.connect(broker.url, data, timeouts=PATIENT)
        job, _ = store.jobs.submit(train(), "ada")

    async def read() -> list[Job]:
        found = await asyncio.gather(*(in_loop(store.jobs.get, job.id) for _ in range(10)))
        await store.client.leave_loop()
        return found

    with back_soon(folder):
        assert asyncio.run(read()) == [job] * 10
    store.close()


def test_all_calls_of_a_trip_learn_that_the_broker_is_gone(tmp_path: Path, data: DataLayout) -> None:
    store = Store.connect(f"unix://{tmp_path}/nothing.sock", data)

    async def read() -> list[Job | BaseException]:
        calls = (in_loop(store.jobs.get, "job_" + "0" * 20) for _ in range(10))
        return await asyncio.gather(*calls, return_exceptions=True)

    found = asyncio.run(read())
    assert all(isinstance(each, StoreUnavailable) for each in found)


def test_a_call_knows_the_context_of_its_task() -> None:
    async def ask(name: str) -> str | None:
        set_current_traceparent(name)
        return await in_loop(current_traceparent)

    async def both() -> list[str | None]:
        return await asyncio.gather(ask("one"), ask("other"))

    assert asyncio.run(both()) == ["one", "other"]
