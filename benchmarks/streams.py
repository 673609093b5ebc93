"""Measures how quickly the API answers beside many open event streams, some of which are never read.

Starts a broker and one API process, without hosts, so that jobs wait and nothing else computes. All of it, and the
clients of this script, are pinned to two cores. Then, in phases of some seconds each: nothing else; submissions; open
streams over all jobs, the first of which are never read; both; and both while half of a request's head lies on many
connections. In each phase a status read and ``/readyz`` are timed, one after the other, some thirty times a second.
Submissions come at a given rate, as do events of running jobs. At the end ten streams must have had every event.

    python benchmarks/streams.py [--streams 1000] [--unread 100] [--half-open 1500] [--rate 20] [--seconds 12]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import multiprocessing
import os
import platform
import resource
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from api_process import api_with_broker
from small_jobs import small_job

from service.jobs.store import Store
from service.jobs.store.keyspace import JOB_EVENTS

PER_KEY = 100
EVENTS_PER_S = 100
PROBE_EVERY_S = 0.03
WATCHED = 10
"""Streams that are read event by event, to check that nothing is missing."""
SPEC = small_job(1)


@dataclass(frozen=True)
class Api:
    port: int
    admin: str
    readers: list[str]
    store: Store
    process: subprocess.Popen[bytes]

    def call(self, connection: http.client.HTTPConnection, method: str, path: str, body: Any = None) -> Any:
        headers = {"Authorization": f"Bearer {self.admin}", "Content-Type": "application/json"}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        content = answer.read()
        if answer.status >= 400:
            raise RuntimeError(f"{method} {path}: {answer.status} {content[:200]!r}")
        return json.loads(content)

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)


@contextlib.contextmanager
def serving(streams: int) -> Iterator[Api]:
    with api_with_broker({"TRIVET_MAX_STREAMS": str(streams)}) as (store, _, opened):
        admin = store.keys.create("bench", ["admin"])[1]
        readers = [store.keys.create(f"reader{n}", ["read"])[1] for n in range(-(-streams // PER_KEY))]
        opened.start()
        assert opened.process is not None
        yield Api(opened.port, admin, readers, store, opened.process)


@dataclass
class Load:
    """Submits jobs and reports events of them, at a steady rate, while :attr:`on` is set."""

    api: Api
    rate: float
    on: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    submitted: int = 0
    events: int = 0
    late_s: float = 0.0

    def run(self) -> None:
        connection = self.api.connect()
        reporting: list[str] = []
        due = time.monotonic()
        while not self.ended.is_set():
            if not self.on.is_set():
                self.on.wait(0.1)
                connection, due = self.api.connect(), time.monotonic()
                continue
            reporting = [*reporting[-9:], self.api.call(connection, "POST", "/v1/jobs", SPEC)["id"]]
            self.submitted += 1
            for number in range(round(EVENTS_PER_S / self.rate)):
                self._report(reporting[number % len(reporting)])
            due += 1 / self.rate
            self.late_s = max(self.late_s, time.monotonic() - due)
            time.sleep(max(0.0, due - time.monotonic()))

    def _report(self, job_id: str) -> None:
        event = {"type": "metric", "time": time.time(), "rank": 0, "step": self.events, "values": {"loss": 0.5}}
        self.api.store.client.call("XADD", JOB_EVENTS(job_id), "*", "t", "metric", "d", json.dumps(event))
        self.events += 1


class _Reader(asyncio.Protocol):
    """Follows everything; reads all, or nothing after the head."""

    def __init__(self, secret: str, *, reads: bool, counts: bool) -> None:
        self._head = (
            f"GET /v1/events HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {secret}\r\n"
            "Accept: text/event-stream\r\n\r\n"
        ).encode()
        self._reads, self._counts, self._rest = reads, counts, b""
        self.opened = self.lost = False
        self.events = self.received = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._head)

    def data_received(self, data: bytes) -> None:
        self.opened = True
        self.received += len(data)
        if not self._reads:
            self._transport.pause_reading()
        if self._counts:
            content = self._rest + data
            self.events += content.count(b"\nevent: state") + content.count(b"\nevent: metric")
            self._rest = content[-12:] if not content.endswith((b"state", b"metric")) else content[-5:]

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True


def follow(port: int, readers: list[str], streams: int, unread: int, pipe: Connection) -> None:
    """Run the followers' process: open all streams, say so, and report at the end what they received."""
    asyncio.run(_follow(port, readers, streams, unread, pipe))


async def _follow(port: int, readers: list[str], streams: int, unread: int, pipe: Connection) -> None:
    loop = asyncio.get_running_loop()
    opened: list[_Reader] = []
    for number in range(streams):
        connection = socket.socket()
        if number < unread:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        await loop.sock_connect(connection, ("127.0.0.1", port))
        counts = unread <= number < unread + WATCHED

        def made(number: int = number, counts: bool = counts) -> _Reader:
            return _Reader(readers[number // PER_KEY], reads=number >= unread, counts=counts)

        opened.append((await loop.create_connection(made, sock=connection))[1])
        if number % 20 == 0:
            await asyncio.sleep(0.02)
    while not all(reader.opened for reader in opened):
        await asyncio.sleep(0.05)
    pipe.send("open")
    while not await asyncio.to_thread(pipe.poll, 0.2):
        pass
    read = opened[unread:]
    pipe.send(
        {
            "events": [reader.events for reader in read[:WATCHED]],
            "lost": sum(reader.lost for reader in read),
            "megabytes": sum(reader.received for reader in read) / 1e6,
        }
    )


@dataclass
class Times:
    """Seconds that requests took."""

    status: list[float] = field(default_factory=list)
    ready: list[float] = field(default_factory=list)

    def row(self, name: str) -> str:
        cells = [name, str(len(self.status))]
        for values in (self.status, self.ready):
            ranked = sorted(values)
            cells += [f"{1000 * ranked[int(share * (len(ranked) - 1))]:.1f}" for share in (0.5, 0.99, 1.0)]
        return f"| {' | '.join(cells)} |"


def probe(api: Api, job_id: str, seconds: float) -> Times:
    times, connection, ends = Times(), api.connect(), time.monotonic() + seconds
    while time.monotonic() < ends:
        for path, taken in ((f"/v1/jobs/{job_id}", times.status), ("/readyz", times.ready)):
            began = time.monotonic()
            connection.request("GET", path, headers={"Authorization": f"Bearer {api.admin}"})
            connection.getresponse().read()
            taken.append(time.monotonic() - began)
        time.sleep(PROBE_EVERY_S)
    return times


@contextlib.contextmanager
def half_open(api: Api, count: int) -> Iterator[None]:
    with contextlib.ExitStack() as held:
        for _ in range(count):
            connection = held.enter_context(socket.create_connection(("127.0.0.1", api.port)))
            connection.sendall(b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Le")
        yield


@contextlib.contextmanager
def following(api: Api, streams: int, unread: int) -> Iterator[Connection]:
    ours, theirs = multiprocessing.Pipe()
    arguments = (api.port, api.reads.readers, streams, unread, theirs)
    process = multiprocessing.get_context("spawn").Process(target=follow, args=arguments)
    process.start()
    if ours.recv() != "open":
        raise SystemExit("the streams did not open")
    try:
        yield ours
    finally:
        process.join(30)


def measure(api: Api, options: argparse.Namespace) -> None:
    job_id = api.call(api.connect(), "POST", "/v1/jobs", SPEC)["id"]
    load = Load(api, options.rate)
    thread = threading.Thread(target=load.run)
    thread.start()
    seconds = options.seconds
    print("| | requests | status p50 | p99 | most | readyz p50 | p99 | most |\n|---|--:|--:|--:|--:|--:|--:|--:|")
    try:
        print(probe(api, job_id, seconds).row("nothing else"), flush=True)
        load.on.set()
        print(probe(api, job_id, seconds).row("submissions"), flush=True)
        load.on.clear()
        time.sleep(1)
        before = load.submitted + load.events
        with following(api, options.streams, options.unread) as pipe:
            time.sleep(2)
            print(probe(api, job_id, seconds).row("streams"), flush=True)
            load.on.set()
            load.late_s, began, cpu = 0.0, time.monotonic(), _cpu_s(api.process.pid)
            print(probe(api, job_id, 2 * seconds).row("streams, submissions"), flush=True)
            busy = (_cpu_s(api.process.pid) - cpu) / (time.monotonic() - began)
            with half_open(api, options.half_open):
                print(probe(api, job_id, seconds).row("and half-open requests"), flush=True)
            load.on.clear()
            time.sleep(3)
            pipe.send("end")
            got = pipe.recv()
    finally:
        load.ended.set()
        thread.join()
    expected = load.submitted + load.events - before
    print(
        f"\nMilliseconds. {load.submitted} jobs submitted, never later than {1000 * load.late_s:.0f} ms; the API used"
    )
    print(f"{busy:.2f} of a core; {got['megabytes']:.0f} MB were read, {got['lost']} streams that read were lost;")
    print(f"of {expected} events the watched streams had {min(got['events'])} to {max(got['events'])}.")
    if set(got["events"]) != {expected} or got["lost"]:
        raise SystemExit("streams are not whole")


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--unread", type=int, default=100, help="of the streams, how many are never read")
    parser.add_argument("--half-open", type=int, default=1500)
    parser.add_argument("--rate", type=float, default=20, help="submissions per second")
    parser.add_argument("--seconds", type=float, default=12, help="of each phase")
    options = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    resource.setrlimit(resource.RLIMIT_NOFILE, (8192, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    print(f"{options.streams} streams, {options.unread} never read, {options.half_open} half-open requests,")
    print(f"{options.rate:g} submissions and {EVENTS_PER_S} events a second; two cores of {platform.machine()},")
    print(f"Python {platform.python_version()}, commit {commit.stdout.strip()},")
    print(f"load average before {os.getloadavg()[0]:.1f}.\n")
    with serving(options.streams) as api:
        measure(api, options)


if __name__ == "__main__":
    main()
