"""What ranks reported is on disk before anything else happens to it: no fault makes a hole in a job's history."""

from __future__ import annotations

import signal
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import LIMIT_S, eventually
from worker_fleet import SHORT_LEASES, Fleet, MortalBroker, processes_of

from api.reads import EventHistory
from service.jobs.events import event_key, rank_file
from service.jobs.records import AttemptRef
from workers.supervisor.collector import METRIC, select_unrelayed

pytestmark = pytest.mark.waits

STEPS = list(range(1, 201))


def on_disk(fleet: Fleet, ref: AttemptRef) -> int:
    """Steps that rank 0 has on record of this attempt."""
    path = rank_file(fleet.data.job(ref.job_id).attempt(ref.attempt), 0)
    return path.read_text().count('"metric"') if path.exists() else 0


def shown(fleet: Fleet, ref: AttemptRef) -> list[int]:
    """Steps of the metrics that the API shows."""
    return sorted({event["step"] for event in EventHistory(fleet.store, fleet.data).events(ref.job_id, METRIC)})


def run_again(fleet: Fleet, ref: AttemptRef) -> AttemptRef:
    """The job's next attempt, once the host has confirmed that nothing of the last one is left."""
    eventually(lambda: not processes_of(ref))
    eventually(lambda: fleet.beat() is not None and fleet.store.attempts.place())
    again = AttemptRef(ref.job_id, fleet.job(ref).attempt, ref.host)
    fleet.supervise(again)
    return again


@pytest.mark.slow
@pytest.mark.distributed
def test_steps_that_a_stopped_supervisor_did_not_relay_are_shown_and_in_the_stream_of_the_next_attempt(
    fleet: Fleet,
) -> None:
    ref = fleet.submit("counting", retries=1)
    supervisor = fleet.supervise(ref)
    eventually(lambda: fleet.events(ref, "metric"))
    supervisor.send_signal(signal.SIGSTOP)
    relayed = len(fleet.events(ref, "metric"))
    eventually(lambda: on_disk(fleet, ref) > relayed + 20)
    supervisor.kill()
    eventually(lambda: not processes_of(ref))
    found = on_disk(fleet, ref)
    assert len(fleet.events(ref, "metric")) < found
    assert shown(fleet, ref) == list(range(1, found + 1))
    fleet.expire_lease(ref)
    assert fleet.store.attempts.reap() == [ref.job_id]
    again = run_again(fleet, ref)
    assert fleet.ended(again).state == "succeeded"
    assert_whole(fleet, again)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("limits", [SHORT_LEASES], ids=["ends"])
def test_steps_that_a_hanging_broker_did_not_take_are_in_the_stream_of_the_next_attempt(
    outage: Fleet, mortal: MortalBroker
) -> None:
    ref = outage.submit("counting_slowly", retries=1)
    supervisor = outage.supervise(ref)
    eventually(lambda: outage.events(ref, "metric"))
    with mortal.hanging():
        eventually(lambda: not processes_of(ref))
    outage.store.client.close()
    assert supervisor.wait(LIMIT_S) == 0
    eventually(lambda: outage.store.attempts.reap() or outage.job(ref).state == "queued")
    again = run_again(outage, ref)
    assert outage.ended(again).state == "succeeded"
    assert_whole(outage, again)


def assert_whole(fleet: Fleet, ref: AttemptRef) -> None:
    """Every step is in the stream, none of them twice in one attempt; and every step is shown."""
    events = fleet.events(ref, "metric", "state")
    assert {event["step"] for event in events if event["type"] == "metric"} == set(STEPS)
    last = max(index for index, event in enumerate(events) if event.get("state") == "running")
    steps = [event["step"] for event in events[last:] if event["type"] == "metric"]
    assert len(steps) == len(set(steps))
    assert shown(fleet, ref) == STEPS


def metric(step: int, time: float, name: str = "loss") -> dict[str, Any]:
    return {"type": "metric", "step": step, "values": {name: time}, "time": time, "rank": 0}


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 30)), min_size=2, max_size=5),
    st.sets(st.integers(0, 200)),
)
def test_what_attempts_left_unrelayed_completes_the_stream_whatever_it_lacks(
    runs: list[tuple[int, int]], lost: set[int]
) -> None:
    """Attempts that begin where a checkpoint of an earlier one is, and a stream that lacks any of their metrics."""
    reached, attempts, clock = 0, [], 0
    for back, steps in runs:
        begin = max(0, reached - back)
        attempts.append([metric(step, float(clock := clock + 1)) for step in range(begin + 1, begin + steps + 1)])
        reached = begin + steps
    *earlier, last = attempts
    stream = [event for events in earlier for event in events if event["time"] not in lost]
    known = {event_key(event) for event in stream}
    found = select_unrelayed(dict(enumerate(earlier, start=1)), known, last[0], 0.0)
    assert not known & {event_key(event) for event in found}
    assert all(event["step"] < last[0]["step"] for event in found)
    assert [event["step"] for event in found] == sorted({event["step"] for event in found})
    whole = {event["step"] for events in earlier for event in events if event["step"] < last[0]["step"]}
    assert whole <= {event["step"] for event in [*stream, *found]}


def test_metrics_of_the_same_step_by_other_names_are_kept() -> None:
    """As of a training that was lost between its last step and its evaluation."""
    first = metric(3, 9.0, "eval_loss")
    earlier = {1: [metric(1, 1.0), metric(2, 2.0), metric(3, 3.0)]}
    assert [event["step"] for event in select_unrelayed(earlier, set(), first, 0.0)] == [1, 2, 3]
    assert [event["step"] for event in select_unrelayed(earlier, set(), first, 1.5)] == [2, 3]
    assert [event["step"] for event in select_unrelayed(earlier, set(), metric(3, 9.0), 0.0)] == [1, 2]
    assert select_unrelayed({}, set(), None, 0.0) == []


def test_what_was_relayed_of_a_long_attempt_is_not_held() -> None:
    there = weakref.WeakSet[Any]()

    class Held(dict[str, Any]):
        __hash__ = object.__hash__  # type: ignore[assignment]

    def read() -> Iterator[Held]:
        for step in range(1, 100):
            there.add(event := Held(metric(step, float(step))))
            yield event
            del event
            assert len(there) < 9

    known = {event_key(metric(step, float(step))) for step in range(1, 98)}
    assert [event["step"] for event in select_unrelayed({1: read()}, known, None, 0.0)] == [98, 99]
