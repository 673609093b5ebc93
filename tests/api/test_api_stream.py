"""Live streams on a real server: complete, in order, resumable, bounded, and gone when the service goes."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import httpx2
import pytest
import redis as redis_py
from api_world import TRAIN, Keys, Server, Worker, bearer, listening, serving
from lanes import first_fast
from waiting import eventually

from api.streams.subscriptions import Subscription
from service.jobs.settings import Settings
from service.jobs.store import Store


@pytest.fixture
def secret(keys: Keys) -> str:
    return keys["admin"]


def submit(server: Server, secret: str) -> str:
    answer = httpx2.post(f"{server.url}/v1/jobs", json=TRAIN, headers=bearer(secret), timeout=300)
    return str(answer.json()["id"])


def losses(events: Iterable[httpx2.ServerSentEvent]) -> list[float]:
    return [json.loads(event.data)["values"]["loss"] for event in events if event.event == "metric"]


def states(events: Iterable[httpx2.ServerSentEvent]) -> list[str]:
    return [json.loads(event.data)["state"] for event in events if event.event == "state"]


def test_history_then_live_then_the_end(server: Server, secret: str, worker: Worker, store: Store) -> None:
    job_id = submit(server, secret)
    ref = worker.start(job_id)
    worker.metrics(ref, [4, 3])
    with listening(f"{server.url}/v1/jobs/{job_id}/events", secret) as events:
        seen = list(itertools.islice(events, 5))
        assert states(seen) == ["queued", "starting", "running"]
        assert losses(seen) == [4, 3]
        worker.metrics(ref, [2, 1], first=3)
        assert losses(itertools.islice(events, 2)) == [2, 1]
        worker.succeed(ref)
        last = list(events)
    assert [event.event for event in last] == ["state", "end"]
    assert states(last) == ["succeeded"]
    stored = store.events.page(job_id).items
    assert [event.id for event in [*seen, last[0]]] == [
        item.id for item in stored if item.event.get("step") not in (3, 4)
    ]
    data = json.loads(seen[0].data)
    assert (data["job"], data["id"], data["type"]) == (job_id, seen[0].id, "state")


@pytest.mark.parametrize("by_header", first_fast(1, [True, False]))
def test_a_stream_resumes_after_the_last_event(server: Server, secret: str, worker: Worker, *, by_header: bool) -> None:
    job_id = submit(server, secret)
    ref = worker.start(job_id)
    worker.metrics(ref, range(10))
    url = f"{server.url}/v1/jobs/{job_id}/events"
    with listening(url, secret) as events:
        last = next(event for event in events if losses([event]) == [4])
    worker.succeed(ref)
    headers = {"Last_Event_ID": last.id} if by_header else {}
    with listening(url if by_header else f"{url}?after={last.id}", secret, **headers) as events:
        assert losses(events) == [5, 6, 7, 8, 9]


@pytest.mark.slow
def test_a_finished_stream_ends_at_once_wherever_it_is_resumed(server: Server, secret: str, worker: Worker) -> None:
    job_id = submit(server, secret)
    worker.succeed(worker.start(job_id))
    with listening(f"{server.url}/v1/jobs/{job_id}/events", secret) as events:
        *_, last, end = list(events)
    assert end.event == "end"
    with listening(f"{server.url}/v1/jobs/{job_id}/events", secret, Last_Event_ID=last.id) as events:
        assert [event.event for event in events] == ["end"]


@pytest.mark.slow
def test_types_choose_what_is_sent_and_the_end_still_comes(server: Server, secret: str, worker: Worker) -> None:
    job_id = submit(server, secret)
    ref = worker.start(job_id)
    worker.emit(ref, [{"type": "log", "stream": "stdout", "line": "hi"}])
    worker.metrics(ref, [1])
    worker.succeed(ref)
    with listening(f"{server.url}/v1/jobs/{job_id}/events?types=metric,log", secret) as events:
        assert [event.event for event in events] == ["log", "metric", "end"]


@pytest.mark.slow
def test_a_retried_job_is_followed_past_its_failures(server: Server, secret: str, worker: Worker, store: Store) -> None:
    job_id = submit(server, secret)
    worker.fail(worker.start(job_id))
    store.jobs.retry(job_id)
    with listening(f"{server.url}/v1/jobs/{job_id}/events", secret) as events:
        seen = states(itertools.islice(events, 5))
        assert seen == ["queued", "starting", "running", "failed", "queued"]
        worker.succeed(worker.start(job_id))
        assert states(events) == ["starting", "running", "succeeded"]


@pytest.mark.slow
def test_several_jobs_in_one_stream_resume_exactly(server: Server, secret: str, worker: Worker) -> None:
    ids = [submit(server, secret) for _ in range(3)]
    refs = [worker.start(job_id) for job_id in ids]
    for step in range(20):
        for ref in refs:
            worker.metrics(ref, [step], first=step + 1)
    for ref in refs:
        worker.succeed(ref)
    url = f"{server.url}/v1/events?jobs={','.join(ids)}"
    with listening(url, secret) as events:
        whole = list(events)
    assert whole[-1].event == "end"
    keys = [(data["job"], data["id"]) for data in (json.loads(event.data) for event in whole[:-1])]
    assert len(set(keys)) == len(keys) == 3 * 24
    for cut in range(0, len(keys), 7):
        with listening(url, secret, Last_Event_ID=whole[cut].id) as events:
            rest = [json.loads(event.data) for event in events if event.event != "end"]
        assert [(data["job"], data["id"]) for data in rest] == keys[cut + 1 :]


def test_a_stream_over_everything_starts_now_and_sees_new_jobs(server: Server, secret: str, worker: Worker) -> None:
    old = submit(server, secret)
    with listening(f"{server.url}/v1/events", secret) as events:
        new = submit(server, secret)
        first = next(events)
        assert json.loads(first.data)["job"] == new
        ref = worker.start(old)
        worker.metrics(ref, [7])
        event = next(event for event in events if event.event == "metric")
        assert json.loads(event.data)["job"] == old
    with listening(f"{server.url}/v1/events", secret, Last_Event_ID=first.id) as events:
        again = next(event for event in events if event.event == "metric")
    assert again.data == event.data


def test_a_stream_over_everything_that_breaks_before_its_first_event_loses_none(server: Server, secret: str) -> None:
    url, headers = f"{server.url}/v1/events", {"Accept": "text/event-stream", **bearer(secret)}
    with httpx2.stream("GET", url, headers=headers, timeout=300.0) as response:
        new = submit(server, secret)
        begun = next(event for event in httpx2.EventSource(response) if event.id)
    assert begun.data == ""
    with listening(url, secret, Last_Event_ID=begun.id) as events:
        assert json.loads(next(events).data)["job"] == new


@pytest.mark.slow
def test_removed_events_are_announced_as_a_gap(
    server: Server, secret: str, worker: Worker, redis: redis_py.Redis
) -> None:
    job_id = submit(server, secret)
    ref = worker.start(job_id)
    worker.metrics(ref, range(10))
    worker.succeed(ref)
    first_id = worker.store.events.page(job_id).items[0].id
    redis.xtrim(f"trivet:job:{job_id}:events", maxlen=4, approximate=False)
    left = worker.store.events.page(job_id).items[0].id
    with listening(f"{server.url}/v1/jobs/{job_id}/events", secret, Last_Event_ID=first_id) as events:
        gap, *rest = list(events)
    assert gap.event == "gap"
    assert json.loads(gap.data) == {"job": job_id, "first": left}
    assert losses(rest) == [7, 8, 9]
    with listening(f"{server.url}/v1/jobs/{job_id}/events", secret, Last_Event_ID=left) as events:
        assert "gap" not in [event.event for event in events]


def test_a_slow_reader_loses_nothing_and_its_queue_stays_bounded(
    server: Server, secret: str, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = server.app.state.context.hub
    monkeypatch.setattr(hub, "settings", replace(hub.settings, queue_frames=16))
    largest = 0
    offer = Subscription.offer

    def watched(self: Subscription, found: Any) -> bool:
        nonlocal largest
        taken = offer(self, found)
        largest = max(largest, self._queued)
        return taken

    monkeypatch.setattr(Subscription, "offer", watched)
    job_id = submit(server, secret)
    ref = worker.start(job_id)
    padding = "x" * 2000
    with listening(f"{server.url}/v1/jobs/{job_id}/events?types=log", secret) as events:
        for start in range(0, 3000, 50):
            lines = [{"type": "log", "stream": "stdout", "line": f"{n} {padding}"} for n in range(start, start + 50)]
            worker.emit(ref, lines)
        worker.succeed(ref)
        seen = [json.loads(event.data)["line"].split()[0] for event in events if event.event == "log"]
    assert seen == [str(n) for n in range(3000)]
    assert largest <= 16


@pytest.mark.slow
def test_many_subscribers_all_see_everything(server: Server, secret: str, worker: Worker, keys: Keys) -> None:
    job_id = submit(server, secret)
    ref = worker.start(job_id)
    others = [keys.named(f"reader-{n}", "read") for n in range(6)]
    found: dict[str, list[float]] = {}

    def listen(its_secret: str) -> None:
        with listening(f"{server.url}/v1/jobs/{job_id}/events", its_secret) as events:
            found[its_secret] = losses(events)

    threads = [threading.Thread(target=listen, args=[other]) for other in others]
    for thread in threads:
        thread.start()
    hub = server.app.state.context.hub
    eventually(lambda: hub.open_streams == 6)
    for start in range(0, 500, 25):
        worker.metrics(ref, range(start, start + 25), first=start)
    worker.succeed(ref)
    for thread in threads:
        thread.join(120)
    assert all(found[other] == list(range(500)) for other in others)
    eventually(lambda: hub.open_streams == 0)
    assert not hub._cursors
    assert not hub._watchers


def test_open_streams_are_limited_per_key_and_given_back(server: Server, secret: str, keys: Keys) -> None:
    job_id = submit(server, secret)
    url = f"{server.url}/v1/jobs/{job_id}/events"
    headers = {"Accept": "text/event-stream", **bearer(secret)}
    with httpx2.Client(headers=headers, timeout=300.0) as http:
        open_ones = [http.send(http.build_request("GET", url), stream=True) for _ in range(4)]
        bodies = [response.iter_bytes() for response in open_ones]  # kept: a dropped iterator closes its stream
        assert all(next(body) for body in bodies)
        refused = http.get(url)
        assert (refused.status_code, refused.json()["status"]) == (429, 429)
        assert refused.headers["retry-after"]
        with listening(url, keys["read"]) as events:
            assert next(events).event == "state"
        for response in open_ones:
            response.close()
        eventually(lambda: server.app.state.context.hub.open_streams == 0)
        with http.stream("GET", url) as response:
            assert response.status_code == 200


@pytest.mark.slow
def test_silence_is_filled_with_pings(server: Server, secret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = server.app.state.context.hub
    monkeypatch.setattr(hub, "settings", replace(hub.settings, ping_s=0.05))
    job_id = submit(server, secret)
    headers = {"Accept": "text/event-stream", **bearer(secret)}
    with httpx2.stream("GET", f"{server.url}/v1/jobs/{job_id}/events", headers=headers, timeout=300) as response:
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-accel-buffering"] == "no"
        lines = response.iter_lines()
        assert next(lines).startswith("retry: ")
        assert ": ping" in itertools.islice(lines, 20)


@pytest.mark.slow
def test_events_that_are_filtered_out_end_no_silence(
    server: Server, secret: str, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the logs are followed of a job that reports metrics and prints nothing."""
    hub = server.app.state.context.hub
    monkeypatch.setattr(hub, "settings", replace(hub.settings, ping_s=2.0))
    job_id = submit(server, secret)
    ref = worker.start(job_id)
    pinged = threading.Event()

    def report() -> None:
        while not pinged.wait(0.02):
            worker.metrics(ref, [1.0])

    reporting = threading.Thread(target=report)
    headers = {"Accept": "text/event-stream", **bearer(secret)}
    url = f"{server.url}/v1/jobs/{job_id}/events?types=log"
    with httpx2.stream("GET", url, headers=headers, timeout=300) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("retry: ")
        reporting.start()
        try:
            assert next(line for line in lines if line) == ": ping"
        finally:
            pinged.set()
            reporting.join()


def test_a_closing_service_says_goodbye(settings: Settings, store: Store, secret: str) -> None:
    with serving(settings, store) as server:
        job_id = submit(server, secret)
        with listening(f"{server.url}/v1/jobs/{job_id}/events", secret) as events:
            assert next(events).event == "state"
            server.app.state.context.hub.close_soon()
            last = list(events)[-1]
    assert (last.event, last.retry) == ("bye", 500)


BAD_REQUESTS: list[tuple[str, dict[str, str], str]] = [
    ("/v1/jobs/{job}/events?types=metrics", {}, "types"),
    ("/v1/jobs/{job}/events?after=yesterday", {}, "after"),
    ("/v1/jobs/{job}/events", {"Last-Event-ID": "x;y"}, "Last-Event-ID"),
    ("/v1/events", {"Last-Event-ID": "17;job"}, "Last-Event-ID"),
    ("/v1/events?jobs=,", {}, "jobs"),
    ("/v1/jobs/{job}/logs?after=-", {}, "after"),
]
"""What is asked for, with which headers, and the field that is wrong."""


def test_a_bad_stream_request_is_refused_before_it_opens(server: Server, secret: str) -> None:
    job = submit(server, secret)
    for path, headers, field in BAD_REQUESTS:
        every = {"Accept": "text/event-stream", **bearer(secret), **headers}
        answer = httpx2.get(server.url + path.format(job=job), headers=every, timeout=300)
        assert answer.status_code == 422, path
        assert answer.json()["errors"][0]["path"] == field


@pytest.mark.slow
def test_a_stream_over_an_unknown_job_is_not_found(server: Server, secret: str) -> None:
    url = f"{server.url}/v1/events?jobs=job_{'0' * 20}"
    assert httpx2.get(url, headers=bearer(secret), timeout=300).status_code == 404


@pytest.mark.slow
def test_the_log_can_be_followed(server: Server, secret: str, worker: Worker) -> None:
    job_id = submit(server, secret)
    ref = worker.start(job_id)
    worker.emit(ref, [{"type": "log", "stream": "stdout", "line": "one"}])
    with listening(f"{server.url}/v1/jobs/{job_id}/logs", secret) as events:
        assert json.loads(next(events).data)["line"] == "one"
        worker.emit(ref, [{"type": "log", "stream": "stderr", "line": "two"}])
        assert json.loads(next(events).data)["line"] == "two"
        worker.succeed(ref)
        assert [event.event for event in events] == ["end"]
