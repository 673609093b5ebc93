"""A store that outlasts a restart of its broker: nothing that could not be sent is lost, nothing is sent twice."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from broker_outages import PATIENT, back_soon
from store_builders import train

from service.jobs.files import DataLayout
from service.jobs.host.embedded_broker import EmbeddedBroker
from service.jobs.store import BrokerTimeouts, Store, StoreUnavailable
from service.jobs.store.outage import BrokerOutage
from service.jobs.store.tail import StreamTail


def test_calls_wait_for_a_broker_that_restarts(tmp_path: Path, data: DataLayout) -> None:
    folder = tmp_path / "broker"
    with EmbeddedBroker.start(folder) as broker:
        store = Store.connect(broker.url, data, timeouts=PATIENT)
        first, _ = store.jobs.submit(train(), "ada")
    with back_soon(folder):
        second, _ = store.jobs.submit(train(), "ada")
        assert [job.id for job in store.jobs.list().items] == [second.id, first.id]
    store.close()


def test_live_events_wait_for_a_broker_that_restarts(tmp_path: Path, data: DataLayout) -> None:
    folder = tmp_path / "broker"
    with EmbeddedBroker.start(folder) as broker:
        store = Store.connect(broker.url, data)
        job, _ = store.jobs.submit(train(), "ada")

    async def newest() -> str | None:
        tail = StreamTail.connect(broker.url, outage_s=300.0)
        try:
            return await tail.last_id(job.id)
        finally:
            await tail.close()

    with back_soon(folder):
        assert asyncio.run(newest()) is not None
    store.close()


def test_an_outage_is_waited_for_once_and_not_by_each_call(tmp_path: Path, data: DataLayout) -> None:
    store = Store.connect(f"unix://{tmp_path}/nothing.sock", data, timeouts=BrokerTimeouts(outage_s=0.2))
    began = time.monotonic()
    with pytest.raises(StoreUnavailable):
        store.gauges.jobs()
    assert time.monotonic() - began >= 0.2
    outage = store.client._pool.outage
    assert outage.pause() is None
    outage.end()
    assert outage.pause() is not None


def test_pauses_grow_to_a_bound() -> None:
    outage = BrokerOutage(3600.0)
    pauses = [outage.pause() or 0.0 for _ in range(20)]
    assert pauses == sorted(pauses)
    assert 0 < pauses[0] < pauses[-1] <= 0.5
