"""The client library over connections that break."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest
from cli_world import TRAIN, Worker, serving

from api.streams import HubSettings
from service.jobs.events import STREAM_PING_S
from service.jobs.records import AttemptRef
from service.jobs.settings import Settings
from service.jobs.spec.train import TrainSpec
from service.jobs.store import Store
from trivet import Client, Refused, Unreachable
from trivet.client import _joined
from trivet.connection import Connection
from trivet.follow import follow

Cut = Callable[[int, int], bool]
"""Whether to cut a connection (counted from 0) after so many bytes of the answer."""


@contextmanager
def proxy(url: str, cut: Cut) -> Iterator[str]:
    """A way to the service that cuts connections, hiding what the service answered from there on."""
    listening = socket.create_server(("127.0.0.1", 0))
    upstream = (str(urlsplit(url).hostname), int(urlsplit(url).port or 80))

    def forward(source: socket.socket, target: socket.socket, stop: Callable[[int], bool]) -> None:
        passed = 0
        try:
            while (data := source.recv(4096)) and not stop(passed := passed + len(data)):
                target.sendall(data)
        except OSError:
            pass
        for end in (source, target):
            with_shutdown(end)

    def accept() -> None:
        number = 0
        while True:
            try:
                near, _ = listening.accept()
            except OSError:
                return
            far = socket.create_connection(upstream)
            threading.Thread(target=forward, args=(near, far, lambda _: False), daemon=True).start()
            this = number
            threading.Thread(target=forward, args=(far, near, lambda n, this=this: cut(this, n)), daemon=True).start()
            number += 1

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        listening.close()


def with_shutdown(end: socket.socket) -> None:
    try:
        end.shutdown(socket.SHUT_RDWR)
    except OSError:
        end.close()


def test_a_lost_answer_to_a_submission_is_asked_for_again_and_gives_one_job(
    url: str, secret: str, store: Store
) -> None:
    lost: set[int] = set()

    def lose(connection: int, _: int) -> bool:
        """Lose what comes by the connection of the first submission, not by the one of the question before it."""
        if submitting.is_set() and not lost:
            lost.add(connection)
        return connection in lost

    submitting = threading.Event()
    with proxy(url, lose) as lossy, Client(lossy, secret) as client:
        client.kinds()  # a service that has answered is waited for, however long its first check takes
        submitting.set()
        job = client.submit(TRAIN)
    assert lost
    assert [found.id for found in store.jobs.list().items] == [job.id]


@pytest.fixture
def ref(store: Store, worker: Worker) -> AttemptRef:
    """An attempt that the worker has begun."""
    return worker.start(store.jobs.submit(_spec(), "admin")[0].id)


def test_following_over_broken_connections_sees_every_event_once(
    url: str, secret: str, ref: AttemptRef, worker: Worker
) -> None:
    worker.emit(ref, [{"type": "metric", "step": step, "values": {"loss": 0.5}} for step in range(300)])
    worker.end(ref)
    cuts: set[int] = set()

    def cut(connection: int, size: int) -> bool:
        if connection < 4 and size > 9000:
            cuts.add(connection)
            return True
        return False

    with proxy(url, cut) as lossy, Client(lossy, secret) as client:
        events = list(client.follow(ref.job_id))
    assert [event["step"] for event in events if event["type"] == "metric"] == list(range(300))
    assert [event["state"] for event in events if event["type"] == "state"] == [
        "queued", "starting", "running", "succeeded",
    ]  # fmt: skip
    assert len(cuts) >= 2


@pytest.mark.slow
def test_following_over_a_restarted_service_goes_on(
    cli_settings: Settings, secret: str, store: Store, ref: AttemptRef, worker: Worker
) -> None:
    with serving(cli_settings, store) as first:
        port = int(first.rpartition(":")[2])
        client = Client(first, secret)
        events = client.follow(ref.job_id)
        assert [next(events)["type"] for _ in range(3)] == ["state"] * 3
    with serving(cli_settings, store, port):
        worker.emit(ref, [{"type": "metric", "step": 1, "values": {"loss": 0.5}}])
        worker.end(ref)
        assert [event["type"] for event in events] == ["metric", "state"]
    client.close()


@pytest.mark.slow
def test_a_service_that_said_goodbye_may_stay_away_for_a_while(
    cli_settings: Settings, secret: str, store: Store, ref: AttemptRef, worker: Worker
) -> None:
    pauses: list[float] = []
    with ExitStack() as again:

        def pause(seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) == 3:  # after two connections that were refused
                again.enter_context(serving(cli_settings, store, port))
                worker.end(ref)

        with serving(cli_settings, store) as first:
            port = int(first.rpartition(":")[2])
            connection = Connection(first, secret)
            events = follow(connection, f"/v1/jobs/{ref.job_id}/events", {}, sleep=pause)
            assert [next(events)["type"] for _ in range(3)] == ["state"] * 3
        assert [event["type"] for event in events] == ["state"]
        connection.close()


def test_a_service_that_stays_away_is_given_up_on(url: str, secret: str) -> None:
    pauses: list[float] = []
    gone = Connection("http://127.0.0.1:9", secret)
    with pytest.raises(Unreachable):
        list(follow(gone, "/v1/events", {}, give_up_after_s=-1, sleep=pauses.append))
    with pytest.raises(Refused) as refused:
        list(follow(Connection(url, "tvt_a_b"), "/v1/events", {}, sleep=pauses.append))
    assert refused.value.status == 401
    assert pauses == []


def test_a_client_waits_longer_than_a_silent_service_takes_to_ping(monkeypatch: pytest.MonkeyPatch) -> None:
    connection, timeouts = Connection("http://127.0.0.1:9", "tvt_a_b"), list[httpx2.Timeout]()
    stream = connection.stream

    def recording(path: str, **options: Any) -> Any:
        timeouts.append(options["timeout"])
        return stream(path, **options)

    monkeypatch.setattr(connection, "stream", recording)
    with pytest.raises(Unreachable):
        list(follow(connection, "/v1/events", {}, give_up_after_s=-1))
    connection.close()
    (timeout,) = timeouts
    assert timeout.read is not None
    assert HubSettings(max_streams=1, max_streams_per_key=1).ping_s == STREAM_PING_S < timeout.read


def test_lists_go_over_all_pages(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trivet.connection.PAGE", 2)
    assert list(client.jobs()) == []
    assert client.job_page()  # a page is there, also without jobs
    submitted = client.submit_many([{**TRAIN, "name": f"job {index}"} for index in range(5)])
    assert [(job.name, job.state) for job in submitted] == [(f"job {index}", "queued") for index in range(5)]
    ids = [job.id for job in submitted]
    assert [job.id for job in client.jobs(kind="train")] == ids[::-1]
    assert [job.id for job in client.job_page(limit=1)] == ids[-1:]
    assert {line.job for line in client.queue()} == set(ids)


def test_one_name_is_a_name_a_time_says_its_zone_and_no_state_is_not_every_state(client: Client) -> None:
    assert _joined("loss") == "loss"
    with pytest.raises(ValueError, match="no time zone"):
        client.delete_matching(ended_before=datetime(2026, 1, 1))  # noqa: DTZ001 - as people write it
    with pytest.raises(ValueError, match="got no state"):
        client.delete_matching(state=[], label="paper")


def test_a_number_that_is_not_finite_is_not_checked_as_a_missing_one(client: Client) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        client.check({**TRAIN, "timeout_s": float("nan")})


def test_waiting_gives_up_in_time(client: Client) -> None:
    job = client.submit(TRAIN)
    with pytest.raises(TimeoutError, match="queued"):
        client.wait(job.id, timeout_s=0.2)
    client.cancel(job.id)
    assert client.wait(job.id).state == "cancelled"


def test_a_download_that_breaks_off_leaves_no_file(client: Client, tmp_path: Path) -> None:
    job = client.submit(TRAIN)
    with pytest.raises(Refused):
        client.download(job.id, "nothing", tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


def test_an_upload_is_addressed_by_its_content(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"onnx" * 100_000)
    stored = client.upload(path)
    assert stored.id == f"file_{stored.sha256}"
    assert stored.bytes == 400_000
    assert client.upload(path) == stored
    back = tmp_path / "back.onnx"
    assert client.download_file(stored.id, back) == 400_000
    assert back.read_bytes() == path.read_bytes()


def test_paths_may_be_strings(client: Client, tmp_path: Path) -> None:
    path, back = tmp_path / "model.onnx", tmp_path / "back.onnx"
    path.write_bytes(b"onnx")
    stored = client.upload(str(path))
    assert client.download_file(stored.id, str(back)) == 4
    assert back.read_bytes() == b"onnx"
    with pytest.raises(Refused, match="nothing"):
        client.download(client.submit(TRAIN).id, "nothing", str(back))


def test_a_file_that_was_never_uploaded_is_refused(client: Client, tmp_path: Path) -> None:
    with pytest.raises(Refused, match="there is no file") as refused:
        client.download_file(f"file_{'0' * 64}", tmp_path / "file")
    assert refused.value.status == 404
    assert list(tmp_path.iterdir()) == []


def test_a_refusal_carries_its_fields(client: Client) -> None:
    with pytest.raises(Refused, match="steps") as refused:
        client.submit({**TRAIN, "steps": 0})
    assert refused.value.status == 422
    assert refused.value.errors[0]["path"] == "steps"


def _spec() -> TrainSpec:
    return TrainSpec.model_validate(TRAIN)
