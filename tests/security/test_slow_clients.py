"""Clients of the API's open socket that are slow on purpose, or send without end."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import httpx2
import pytest
import redis as redis_py
import uvicorn
from digits import digits_job
from pydantic import SecretStr
from sockets import received
from waiting import LIMIT_S, eventually

from api.main import create_app
from api.server.serving import LEAST_BODY, LEAST_READ, LONGEST_HEAD, ApiServer, limited
from api.streams import Hub
from service.jobs.settings import Settings
from service.jobs.spec.train import TrainSpec
from service.jobs.store import Store
from service.jobs.store.keyspace import JOB_EVENTS

HEAD_S, BODY_S, READ_S = 1.0, 4.0, 16.0
"""The server's limits, in seconds of :class:`Clock`."""
TRAINING = TrainSpec.model_validate(digits_job())
HALF = b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Le"


@dataclass
class Timer:
    """A call that a connection has asked for."""

    due: float
    call: Callable[[], None]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


@dataclass
class Clock:
    """The time by which connections of the server are ended: it passes only in :meth:`advance`, so that no test depends
    on how long anything takes. Counts what the server has read, too.
    """

    seconds: float = 0.0
    timers: list[Timer] = field(default_factory=list)
    loop: Any = None
    received: int = 0
    transport: Any = None
    """That of the newest connection."""

    def waiting(self) -> int:
        """Return how many bytes wait for the newest connection's client."""
        return int(self.transport.get_write_buffer_size())

    def call_later(self, delay: float, call: Callable[..., None], *arguments: Any) -> Timer:
        """Stand in for the event loop's method of this name."""
        timer = Timer(self.seconds + delay, lambda: call(*arguments))
        self.timers.append(timer)
        return timer

    def advance(self, seconds: float) -> None:
        """Let time pass on the server's thread, with every call that falls due in it."""
        passed = threading.Event()

        def run() -> None:
            until = self.seconds + seconds
            while due := [timer for timer in self.timers if not timer.cancelled and timer.due <= until]:
                timer = min(due, key=lambda timer: timer.due)
                self.timers.remove(timer)
                self.seconds = timer.due
                timer.call()
            self.seconds = until
            self.timers = [timer for timer in self.timers if not timer.cancelled]
            passed.set()

        self.loop.call_soon_threadsafe(run)
        assert passed.wait(LIMIT_S)

    def protocol(self) -> type[Any]:
        """Return the server's protocol, its timers by this clock."""
        clock, base = self, limited(HEAD_S, BODY_S, READ_S)

        class ClockedLoop:
            """The event loop, but for its clock."""

            call_later = staticmethod(clock.call_later)

            def __getattr__(self, name: str) -> Any:
                return getattr(clock.loop, name)

        class ClockedProtocol(base):  # type: ignore[misc, valid-type]
            def __init__(self, *arguments: Any, **named: Any) -> None:
                super().__init__(*arguments, **named)
                clock.loop, self.loop = self.loop, ClockedLoop()

            def connection_made(self, transport: Any) -> None:
                super().connection_made(transport)
                clock.transport = transport

            def data_received(self, data: bytes) -> None:
                super().data_received(data)
                clock.received += len(data)

        return ClockedProtocol


@dataclass(frozen=True)
class Api:
    """The API on a socket, and the clock of its limits."""

    address: tuple[str, int]
    store: Store
    clock: Clock
    hub: Hub

    def connect(self) -> socket.socket:
        connection = socket.create_connection(self.address)
        connection.settimeout(LIMIT_S)
        return connection

    def send(self, *messages: tuple[socket.socket, bytes]) -> None:
        """Return once the server has read them all."""
        before = self.clock.received
        for connection, content in messages:
            connection.sendall(content)
        eventually(lambda: self.clock.received == before + sum(len(content) for _, content in messages))

    def upload(self, length: int) -> bytes:
        """The head of an upload of so many bytes."""
        secret = self.store.keys.create("ann", ["submit"])[1]
        return (
            f"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {secret}\r\nConnection: close\r\n"
            f"Content-Type: application/octet-stream\r\nContent-Length: {length}\r\n\r\n"
        ).encode()


@pytest.fixture(scope="module")
def api(broker: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """The API as it is served."""
    clock = Clock()
    settings = Settings(data=tmp_path_factory.mktemp("slow"), redis_url=SecretStr(broker))
    store = Store.connect(settings.broker_url, settings.layout)
    app = create_app(settings, store)
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", http=clock.protocol(), ws="none")
    server, listening = ApiServer(config), config.bind_socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 10)  # its connections have the same
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    eventually(lambda: server.started)
    yield Api(listening.getsockname()[:2], store, clock, app.state.context.hub)
    app.state.context.hub.close_soon()
    server.end()
    thread.join(300)
    store.close()


@pytest.mark.slow
def test_two_hundred_half_open_requests_do_not_stop_the_api_and_are_ended(api: Api) -> None:
    url = f"http://127.0.0.1:{api.address[1]}/healthz"
    with ExitStack() as held:
        half_open = [held.enter_context(api.connect()) for _ in range(200)]
        api.send(*((client, HALF) for client in half_open[:150]))
        assert httpx2.get(url, timeout=300).status_code == 200
        api.clock.advance(HEAD_S)
        answers = [received(client) for client in half_open]
    assert all(answer.startswith(b"HTTP/1.1 408 ") for answer in answers[:150])
    assert answers[150:] == [b""] * 50, "those that sent nothing are told nothing"
    assert httpx2.get(url, timeout=300).status_code == 200


def test_a_head_that_comes_byte_by_byte_has_the_same_time(api: Api) -> None:
    with api.connect() as client:
        for byte in HALF[:8]:
            api.send((client, bytes([byte])))
            api.clock.advance(HEAD_S / 8)
        assert received(client).startswith(b"HTTP/1.1 408 ")


def test_a_head_without_end_is_refused(api: Api) -> None:
    with api.connect() as client:
        client.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n")
        try:
            for index in range(2 * LONGEST_HEAD // 1000):
                client.sendall(b"X-%d: %b\r\n" % (index, b"x" * 990))
        except OSError:
            pass
        answer = received(client)
    assert answer.startswith(b"HTTP/1.1 431 ") or answer == b""


def test_a_body_that_stops_ends_its_connection(api: Api, redis: redis_py.Redis) -> None:
    with api.connect() as client:
        api.send((client, api.upload(10 * LEAST_BODY) + b"x" * 100))
        api.clock.advance(BODY_S)
        assert received(client) == b""
    files = list(api.store.files.data.files.rglob("*"))
    eventually(lambda: not [path for path in files if path.is_file() and path.exists()])


def test_a_body_that_keeps_coming_may_take_its_time(api: Api, redis: redis_py.Redis) -> None:
    pieces = 10
    with api.connect() as client:
        api.send((client, api.upload(pieces * 2 * LEAST_BODY)))
        for _ in range(pieces - 1):
            api.send((client, b"x" * 2 * LEAST_BODY))
            api.clock.advance(BODY_S)
        api.send((client, b"x" * 2 * LEAST_BODY))
        assert received(client).startswith(b"HTTP/1.1 201 ")


def test_a_connection_serves_several_requests_and_may_rest_between_them(api: Api) -> None:
    with api.connect() as client:
        for _ in range(3):
            client.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = b""
            while not answer.endswith(b"}"):
                answer += client.recv(4096)
            assert answer.startswith(b"HTTP/1.1 200 ")
            api.clock.advance(HEAD_S * 1.5)
        api.send((client, b"GET /healthz HTTP/1.1\r\nHo"))
        api.clock.advance(HEAD_S)
        assert received(client).startswith(b"HTTP/1.1 408 ")


def test_a_stream_outlives_the_limits_on_requests(api: Api, redis: redis_py.Redis) -> None:
    secret = api.store.keys.create("ann", ["read"])[1]
    headers = {"Authorization": f"Bearer {secret}", "Accept": "text/event-stream"}
    url = f"http://127.0.0.1:{api.address[1]}/v1/events"
    with httpx2.stream("GET", url, headers=headers, timeout=300) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("retry")
        api.clock.advance(2 * (HEAD_S + BODY_S))
        api.store.client.call("PING")
        started = threading.Thread(target=lambda: [api.store.keys.revoke(key.id) for key in api.store.keys.list()])
        started.start()
        assert "event: bye" in list(lines)
        started.join()


EVENTS, EVENT_BYTES = 600, 4096
"""More than what sockets hold of it."""


def reported(api: Api, redis: redis_py.Redis) -> str:
    """A job with a long history."""
    job, _ = api.store.jobs.submit(TRAINING, "ann")
    event = json.dumps({"type": "log", "stream": "stdout", "line": "x" * EVENT_BYTES})
    with redis.pipeline(transaction=False) as pipeline:
        for _ in range(EVENTS):
            pipeline.xadd(JOB_EVENTS(job.id), {"t": "log", "d": event})
        pipeline.execute()
    return job.id


def following(api: Api, job_id: str, secret: str) -> socket.socket:
    """A client that follows a job and reads little by itself."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(LIMIT_S)
    connection.connect(api.address)
    connection.sendall(
        f"GET /v1/jobs/{job_id}/events HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {secret}\r\n"
        "Accept: text/event-stream\r\n\r\n".encode()
    )
    return connection


def wait_until_unread(api: Api) -> None:
    """Return once the server waits for the one reader that there is."""
    eventually(lambda: api.hub.open_streams == 1 and api.clock.waiting() > LEAST_READ)
    eventually(lambda: any(timer.due == api.clock.seconds + READ_S for timer in list(api.clock.timers)))


def test_a_stream_that_is_never_read_is_cut_off_and_resumes_where_it_was(api: Api, redis: redis_py.Redis) -> None:
    job_id, secret = reported(api, redis), api.store.keys.create("ann", ["read"])[1]
    with following(api, job_id, secret) as client:
        wait_until_unread(api)
        api.clock.advance(READ_S)
        eventually(lambda: api.hub.open_streams == 0)
        content = b""
        with contextlib.suppress(ConnectionResetError):
            while chunk := client.recv(1 << 20):
                content += chunk
    seen = re.findall(rb"id: (\S+)\nevent: \w+\ndata: .*\n\n", content)
    ids = [item.id for item in api.store.events.page(job_id, limit=EVENTS + 10).items]
    assert [each.decode() for each in seen] == ids[: len(seen)]
    assert len(seen) < len(ids)
    headers = {"Authorization": f"Bearer {secret}", "Accept": "text/event-stream", "Last-Event-ID": seen[-1].decode()}
    url = f"http://127.0.0.1:{api.address[1]}/v1/jobs/{job_id}/events"
    with httpx2.stream("GET", url, headers=headers, timeout=300) as response:
        first = next(line for line in response.iter_lines() if line.startswith("id: "))
    assert first == f"id: {ids[len(seen)]}"


def test_a_stream_that_is_read_slowly_goes_on(api: Api, redis: redis_py.Redis) -> None:
    job_id, secret = reported(api, redis), api.store.keys.create("ann", ["read"])[1]
    with following(api, job_id, secret) as client:
        for _ in range(3):
            wait_until_unread(api)
            before = api.clock.waiting()
            while api.clock.waiting() > before - LEAST_READ:
                assert client.recv(LEAST_READ)
            api.clock.advance(READ_S)
        assert api.hub.open_streams == 1
        api.clock.advance(READ_S)
        eventually(lambda: api.hub.open_streams == 0)
