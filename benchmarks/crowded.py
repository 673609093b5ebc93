"""Measures how soon one user's status read is answered while another user takes all that the API gives.

Starts a broker and one API process, without hosts, so that nothing computes, with a few thousand jobs, one of
which has a long record and a sparse checkpoint. Everything is pinned to two cores. Then another key sends one load
after the other for some seconds, each over many connections that never pause, while the first key reads the status of a
job fifty times a second over one connection. The loads come from a process of the lowest priority: in earnest they come
from other machines. ``answers`` counts those of the load, ``refused`` those with 429.

    python benchmarks/crowded.py [--seconds 5] [--connections 12] [--jobs 3000] [--events 50000] [--only NAME …]
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
import re
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import MappingProxyType
from typing import Any

from api_process import api_with_broker
from load_client import Api

from service.jobs.events import log_file, rank_file
from service.jobs.files import FILES, META, WEIGHTS, DataLayout, JobPaths, signed
from service.jobs.records import AttemptRef
from service.jobs.store import HostReport, Store, StoreLimits
from service.jobs.store.listing import JobFilter

PROBE_EVERY_S = 0.02
PIECE = 1 << 16
STREAMS, WAITERS, TRICKLERS = 90, 90, 200
SPARSE = 64 << 30
BATCH = 500
MOST_BODY = 900_000
HOST = "played"
LONG_S = 3600.0
SPEC: Mapping[str, Any] = MappingProxyType(
    {
        "kind": "train",
        "model": {"family": "mlp", "in_features": 64, "hidden": [64] * 24, "out_features": 10},
        "data": {"source": "digits"},
        "steps": 10,
        "device": "cpu",
        "labels": {f"label-{number}": "x" * 60 for number in range(12)},
    }
)


@dataclass(frozen=True)
class Target:
    """What a load asks for: its own key at one API, and the ids of jobs there."""

    api: Api
    jobs: Sequence[str]
    long: str
    """A running job with many events and a large checkpoint."""


@dataclass(frozen=True)
class Load:
    """One way to ask for too much: a request that each connection repeats, or keeps open without reading."""

    request: Callable[[Target], bytes]
    connections: int | None = None
    """Those of the command line if absent."""
    keeps_open: bool = False
    trickles: bool = False


def _get(path: str, accept: str = "application/json") -> Callable[[Target], bytes]:
    return lambda target: target.api.request("GET", path.format(long=target.long), accept=accept)


def _post(path: str, body: Callable[[], bytes]) -> Callable[[Target], bytes]:
    def request(target: Target) -> bytes:
        content = body()
        head = target.api.request("POST", path).decode().replace("Content-Length: 0", f"Content-Length: {len(content)}")
        return head.encode() + content

    return request


def _compare(target: Target) -> bytes:
    ids = ",".join([target.long, *target.jobs[:99]])
    return target.api.request("GET", f"/v1/jobs:metrics?ids={ids}&names=loss&max_points=10000")


def _refused_sweep() -> bytes:
    sweep = {"seed": list(range(30)), "steps": list(range(30))}
    return json.dumps({**SPEC, "model": {**SPEC["model"], "in_features": 63}, "sweep": {"grid": sweep}}).encode()


def _refused_batch() -> bytes:
    jobs = [{**SPEC, "model": {**SPEC["model"], "in_features": 63}} for _ in range(BATCH)]
    return json.dumps({"jobs": jobs}).encode()[:MOST_BODY]


def _deep() -> bytes:
    return b'{"kind":"train","model":' + b"[" * MOST_BODY


LOADS: Mapping[str, Load] = {
    "nothing": Load(_get("/healthz"), connections=0),
    "lists with specs": Load(_get("/v1/jobs?limit=1000&include=spec")),
    "lists": Load(_get("/v1/jobs?limit=1000")),
    "lists in the queue's order": Load(_get("/v1/jobs?limit=1000&order=active")),
    "streams from the beginning": Load(_get("/v1/jobs/{long}/events", "text/event-stream"), STREAMS),
    "streams never read": Load(_get("/v1/jobs/{long}/events", "text/event-stream"), STREAMS, keeps_open=True),
    "pages of events": Load(_get("/v1/jobs/{long}/events?limit=1000")),
    "refused sweeps": Load(_post("/v1/jobs", _refused_sweep)),
    "refused batches": Load(_post("/v1/jobs:batch", _refused_batch)),
    "deep JSON": Load(_post("/v1/jobs", _deep)),
    "long polls": Load(_get("/v1/jobs/{long}?wait_s=60"), WAITERS),
    "trickling uploads": Load(_post("/v1/files", lambda: b"x" * MOST_BODY), TRICKLERS, trickles=True),
    "search": Load(_get("/v1/jobs?q=nowhere&limit=1000")),
    "counts": Load(_get("/v1/jobs:counts?q=nowhere")),
    "metrics": Load(_get("/v1/jobs/{long}/metrics?max_points=100000")),
    "CSV": Load(_get("/v1/jobs/{long}/metrics?max_points=100000&format=csv")),
    "compare": Load(_compare),
    "queue": Load(_get("/v1/queue?limit=1000")),
    "logs": Load(_get("/v1/jobs/{long}/logs")),
    "tar of a sparse checkpoint": Load(_get("/v1/jobs/{long}/artifacts/checkpoints/step_1")),
}


def send(target: Target, name: str, connections: int, pipe: Connection) -> None:
    """Send a load in a process of its own until the pipe says so; then tell how often it was answered, by status."""
    os.nice(19)
    load = LOADS[name]
    asyncio.run(_send(load, load.request(target), target, connections, pipe))


async def _send(load: Load, request: bytes, target: Target, connections: int, pipe: Connection) -> None:
    statuses = Counter[str]()
    count = connections if load.connections is None else load.connections
    pipe.send("begun")
    working = [asyncio.create_task(_repeat(load, request, target.api.port, statuses)) for _ in range(count)]
    await asyncio.to_thread(pipe.recv)
    for each in working:
        each.cancel()
    await asyncio.gather(*working, return_exceptions=True)
    pipe.send(dict(statuses))


async def _repeat(load: Load, request: bytes, port: int, statuses: Counter[str]) -> None:
    while True:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=PIECE)
            try:
                await _ask(load, request, reader, writer, statuses)
            finally:
                writer.close()
        await asyncio.sleep(0.05)


async def _ask(
    load: Load, request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, statuses: Counter[str]
) -> None:
    if load.trickles:
        head, _, body = request.partition(b"\r\n\r\n")
        writer.write(head + b"\r\n\r\n")
        for place in range(len(body)):
            writer.write(body[place : place + 1])
            await asyncio.sleep(0.05)
    while True:
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        statuses[head[9:12].decode()] += 1
        if load.keeps_open:
            await asyncio.sleep(LONG_S)
        await _skip_content(head, reader)
        if head[9:12] == b"429":
            await asyncio.sleep(0.5)


async def _skip_content(head: bytes, reader: asyncio.StreamReader) -> None:
    """Read an answer to its end, and keep nothing of it."""
    if (found := re.search(rb"(?i)content-length: (\d+)", head)) is not None:
        await _skip(int(found[1]), reader)
        return
    while length := int(await reader.readuntil(b"\r\n"), 16):
        await _skip(length + len(b"\r\n"), reader)
    await reader.readuntil(b"\r\n")


async def _skip(count: int, reader: asyncio.StreamReader) -> None:
    while count:
        if not (piece := await reader.read(min(count, PIECE))):
            raise asyncio.IncompleteReadError(b"", count)
        count -= len(piece)


def probe(port: int, key: str, job_id: str, seconds: float) -> list[float]:
    """Return the seconds of each of another key's status reads, sorted."""
    taken, connection, ends = [], http.client.HTTPConnection("127.0.0.1", port, timeout=120), time.monotonic() + seconds
    while time.monotonic() < ends:
        began = time.monotonic()
        connection.request("GET", f"/v1/jobs/{job_id}", headers={"Authorization": f"Bearer {key}"})
        answer = connection.getresponse()
        answer.read()
        if answer.status != 200:
            raise RuntimeError(f"the status read was answered {answer.status}")
        taken.append(time.monotonic() - began)
        time.sleep(max(0.0, PROBE_EVERY_S - taken[-1]))
    return sorted(taken)


def fill(store: Store, layout: DataLayout, target: Api, jobs: int, events: int) -> Target:
    """Make the jobs, and give one of them its history."""
    connection = http.client.HTTPConnection("127.0.0.1", target.port, timeout=120)
    headers = {"Authorization": f"Bearer {target.key}", "Content-Type": "application/json"}
    ids: list[str] = []
    while len(ids) < jobs:
        connection.request("POST", "/v1/jobs:batch", json.dumps({"jobs": [dict(SPEC)] * BATCH}), headers)
        ids += [job["id"] for job in json.loads(connection.getresponse().read())["items"]]
    store.hosts.beat(HostReport(HOST, "127.0.0.1", cpu_slots=1))
    store.attempts.place()
    (running,) = store.jobs.list(JobFilter(states=("starting",)), limit=1).items
    ref = AttemptRef(running.id, 1, HOST)
    store.attempts.claim(ref, "benchmark")
    reports = [_report(step) for step in range(events)]
    for first in range(0, events, 256):
        store.attempts.emit(ref, reports[first : first + 256])  # type: ignore[arg-type]  # they have the fields of events
    leave_files(layout.job(running.id), reports)
    return Target(target, ids, running.id)


def _report(step: int) -> dict[str, Any]:
    """Return one of a rank's reports: of metrics and lines by turns."""
    if step % 2:
        values = {"loss": 1 / step, "accuracy": 0.1}
        return {"type": "metric", "time": time.time(), "rank": 0, "step": step, "values": values}
    return {"type": "log", "time": time.time(), "rank": 0, "stream": "stdout", "line": f"step {step} of many " * 4}


def leave_files(paths: JobPaths, reports: Sequence[Mapping[str, Any]]) -> None:
    """Write what ranks leave: the record of all reports, and a checkpoint, most of which is a hole."""
    attempt = paths.attempt(1)
    attempt.mkdir(parents=True)
    for path, kind in ((rank_file(attempt, 0), "metric"), (log_file(attempt, 0), "log")):
        path.write_text("".join(f"{json.dumps(report)}\n" for report in reports if report["type"] == kind))
    step = paths.checkpoints / "step_1"
    step.mkdir(parents=True)
    with (step / WEIGHTS).open("wb") as file:
        file.truncate(SPARSE)
    (step / META).write_text(json.dumps(signed({"step": 1, FILES: {WEIGHTS: SPARSE}})))


def drain(target: Target) -> None:
    """Wait until what the load asked for is made: its key's reads come in their order."""
    connection = http.client.HTTPConnection("127.0.0.1", target.api.port, timeout=120)
    connection.request("GET", "/v1/queue?limit=1", headers={"Authorization": f"Bearer {target.api.key}"})
    connection.getresponse().read()


def measure(target: Target, name: str, reader: str, options: argparse.Namespace) -> str:
    """Return the row of one load."""
    ours, theirs = multiprocessing.Pipe()
    arguments = (target, name, options.connections, theirs)
    process = multiprocessing.get_context("spawn").Process(target=send, args=arguments)
    process.start()
    ours.recv()
    time.sleep(options.warm)
    taken = probe(target.api.port, reader, target.jobs[0], options.seconds)
    ours.send("end")
    statuses = Counter[str](ours.recv())
    process.join(30)
    drain(target)
    p50, p99, most = (1000 * taken[int(share * (len(taken) - 1))] for share in (0.5, 0.99, 1.0))
    others = {status: count for status, count in statuses.items() if status[0] in "45" and status != "429"}
    return (
        f"| {name} | {p50:.1f} | {p99:.1f} | {most:.1f} | {statuses.total()} | {statuses['429']} "
        f"| {' '.join(f'{count} times {status}' for status, count in sorted(others.items()))} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each load")
    parser.add_argument("--warm", type=float, default=2.0, help="seconds of each load that are not measured")
    parser.add_argument("--connections", type=int, default=12)
    parser.add_argument("--jobs", type=int, default=3000)
    parser.add_argument("--events", type=int, default=50_000, help="of the long job")
    parser.add_argument("--only", nargs="*", choices=list(LOADS), default=list(LOADS), metavar="NAME")
    options = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    print(f"two cores of {platform.machine()}, Python {platform.python_version()}, commit {commit.stdout.strip()},")
    print(f"load average before {os.getloadavg()[0]:.1f}; milliseconds of a status read\n")
    print("| beside | p50 | p99 | most | answers | refused | other answers |\n|---|--:|--:|--:|--:|--:|---|")
    limits = StoreLimits(lease_s=LONG_S, starting_lease_s=LONG_S, heartbeat_s=LONG_S)
    settings = {
        "TRIVET_LEASE_S": str(LONG_S),
        "TRIVET_STARTING_LEASE_S": str(LONG_S),
        "TRIVET_HEARTBEAT_S": str(LONG_S),
    }
    with api_with_broker(settings, limits) as (store, layout, opened):
        reader, attacker = (store.keys.create(name, ["admin"])[1] for name in ("reader", "attacker"))
        opened.start()
        target = fill(store, layout, Api(opened.port, attacker), options.jobs, options.events)
        for name in options.only:
            print(measure(target, name, reader, options), flush=True)


if __name__ == "__main__":
    main()
