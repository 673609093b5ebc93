"""How much the service takes: submissions, reads, lists, live events, its end, and its memory at rest.

Broker, API (`trivet up`), worker and this client share the cores of one machine; run it with ``taskset -c 0,1`` where
there are more than two. No job runs: the worker has no slots, and one job is held by a host that this script plays, so
that all others wait and events can be told of one. Requests go over 16 connections that are kept open. Placement with
many pending jobs is measured by ``placement.py 3000 300 512 8``.

With ``--prefect PYTHON``, an interpreter that has Prefect, the same requests are sent to a Prefect server first, alone:
runs of a deployment that no worker takes, in its own database (SQLite). Where it refuses at 16 connections,
``--prefect-connections`` gives it fewer.

    python benchmarks/load.py [--requests 2000] [--jobs 10000] [--readers 100] [--events 20000] [--processes 1]
        [--prefect PYTHON] [--prefect-connections 16]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil
from api_process import free_port
from chaos_service import Service

from service.jobs.embedded import EmbeddedBroker
from service.jobs.events import Event, MetricEvent
from service.jobs.layout import DataLayout
from service.jobs.records import AttemptRef
from service.jobs.store import HostReport, Store, StoreLimits
from service.jobs.store.listing import JobFilter

CONNECTIONS = 16
BUSY_PAUSE_S = 0.1
BATCH = 1000
LONG_S = 3600.0
HOST = "played"
_PARTS = {
    "--fork-server": "fork server", "-server": "broker", "trivet up": "up", "-m workers": "worker", "-m api": "API"
}  # fmt: skip
"""What processes are called, by what is in their command line."""
LIMITS = StoreLimits(lease_s=LONG_S, starting_lease_s=LONG_S, heartbeat_s=LONG_S)
SPEC = {
    "kind": "train",
    "model": {"family": "mlp", "in_features": 64, "hidden": [16], "out_features": 10},
    "data": {"source": "digits"},
    "steps": 1,
    "device": "cpu",
}


@dataclass(frozen=True)
class Rate:
    """Things done in a second, and what one request took, in milliseconds."""

    what: str
    per_s: float
    p50_ms: float
    p99_ms: float

    @property
    def row(self) -> str:
        return f"| {self.what} | {self.per_s:,.0f} | {self.p50_ms:.1f} | {self.p99_ms:.1f} |"


@dataclass
class Api:
    """Calls the API with a key that may do everything."""

    port: int
    key: str

    def request(self, method: str, path: str, body: object = None, accept: str = "application/json") -> bytes:
        """Return the bytes of one request."""
        content = b"" if body is None else json.dumps(body).encode()
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\nAuthorization: Bearer {self.key}\r\n"
            f"Accept: {accept}\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        return head.encode() + content


class BusyError(RuntimeError):
    """The server takes no requests for the moment (503)."""


async def measured_rate(
    port: int,
    what: str,
    requests: Sequence[bytes],
    each: int = 1,
    *,
    connections: int = CONNECTIONS,
    may_be_busy: bool = False,
) -> Rate:
    """Send all, over several connections; each does so many things. Where the server ``may_be_busy``, what it refuses
    for the moment, or hangs up on, is sent again after a pause, over a new connection, and counted.
    """
    waiting, took, refused = list(reversed(requests)), list[float](), list[bytes]()

    async def work() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
        while waiting:
            began, request = time.perf_counter(), waiting.pop()
            while True:
                writer.write(request)
                try:
                    await answer_of(reader)
                    break
                except (BusyError, asyncio.IncompleteReadError, ConnectionError):
                    if not may_be_busy:
                        raise
                    refused.append(request)
                    writer.close()
                    await asyncio.sleep(BUSY_PAUSE_S)
                    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
            took.append(time.perf_counter() - began)
        writer.close()

    began = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(min(connections, len(requests)))))
    spent = time.perf_counter() - began
    took.sort()
    p99 = took[min(len(took) - 1, int(0.99 * len(took)))]
    what = f"{what} ({len(refused)} times refused or hung up on)" if refused else what
    found = Rate(what, each * len(requests) / spent, 1000 * statistics.median(took), 1000 * p99)
    print(found.row, file=sys.stderr, flush=True)
    return found


async def answer_of(reader: asyncio.StreamReader) -> bytes:
    """Read one answer and return its content. Raises ``RuntimeError`` for a refusal."""
    head = await reader.readuntil(b"\r\n\r\n")
    found = re.search(rb"(?i)content-length: (\d+)", head)
    content = await reader.readexactly(int(found[1]) if found else 0)
    if not head.startswith(b"HTTP/1.1 2"):
        refusal = BusyError if head.startswith(b"HTTP/1.1 503") else RuntimeError
        raise refusal((head + content[:500]).decode(errors="replace"))
    return content


async def _answered(port: int, request: bytes) -> bytes:
    """Return the content of one answer, for which a server that is busy is asked again."""
    while True:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
        try:
            writer.write(request)
            return await answer_of(reader)
        except (BusyError, asyncio.IncompleteReadError, ConnectionError):
            await asyncio.sleep(BUSY_PAUSE_S)
        finally:
            writer.close()


@dataclass
class Readers:
    """Streams of one job's events that are read by a thread of its own."""

    api: Api
    job_id: str
    count: int
    events: int
    received: int = 0
    delays: list[float] = field(default_factory=list)
    connected: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)

    async def read(self) -> None:
        """Read until every stream has brought every event, then hold the streams open until they end."""
        opened = [await asyncio.open_connection("127.0.0.1", self.api.port, limit=1 << 24) for _ in range(self.count)]
        for _, writer in opened:
            writer.write(self.api.request("GET", f"/v1/jobs/{self.job_id}/events", accept="text/event-stream"))
        for reader, _ in opened:
            await reader.readuntil(b"\r\n\r\n")
        self.connected.set()
        await asyncio.gather(*(self._follow(reader) for reader, _ in opened))

    async def _follow(self, reader: asyncio.StreamReader) -> None:
        rest = b""
        while chunk := await reader.read(1 << 20):
            now = time.time()
            whole, _, rest = (rest + chunk).rpartition(b"\n\n")  # a read may end within an event
            times = re.findall(rb'"type":"metric","time":([0-9.]+)', whole)
            if times:
                self.delays.append(now - float(times[-1]))
                self.received += len(times)
                if self.received >= self.count * self.events:
                    self.done.set()


def events_to_readers(store: Store, api: Api, ref: AttemptRef, readers: int, events: int) -> tuple[Rate, Readers]:
    """Tell of many events at once, as a supervisor does, and wait until all readers have them."""
    reading = Readers(api, ref.job_id, readers, events)
    threading.Thread(target=lambda: asyncio.run(reading.read()), daemon=True).start()
    reading.connected.wait()
    began = time.perf_counter()
    for first in range(0, events, 256):
        steps = range(first, min(first + 256, events))
        told: list[Event] = [
            MetricEvent(type="metric", time=time.time(), rank=0, step=step, values={"loss": 0.5}) for step in steps
        ]
        store.attempts.emit(ref, told)
    reading.done.wait()
    spent = time.perf_counter() - began
    delays = sorted(reading.delays)
    p50, p99 = (1000 * delays[int(share * (len(delays) - 1))] for share in (0.5, 0.99))
    return Rate(f"events to {readers} readers", readers * events / spent, p50, p99), reading


def memory(*pids: int) -> dict[str, float]:
    """Return the MiB of each part of these processes and all below them: what it has alone, and its share of what it
    has with others.
    """
    found: dict[str, float] = defaultdict(float)
    tops = [psutil.Process(pid) for pid in pids]
    for process in [each for top in tops for each in (top, *top.children(recursive=True))]:
        with contextlib.suppress(psutil.ZombieProcess, psutil.NoSuchProcess):
            words = " ".join(process.cmdline())
            name = next((name for word, name in _PARTS.items() if word in words), "others")
            found[name] += process.memory_full_info().pss / (1 << 20)
    return dict(found)


async def rates(api: Api, options: argparse.Namespace) -> list[Rate]:
    submit = api.request("POST", "/v1/jobs", SPEC)
    batch = api.request("POST", "/v1/jobs:batch", {"jobs": [SPEC] * BATCH})
    batches = max(1, (options.jobs - options.requests) // BATCH)
    found = [await measured_rate(api.port, "submissions", [submit] * options.requests)]
    found.append(await measured_rate(api.port, f"submissions in batches of {BATCH}", [batch] * batches, BATCH))
    listed = [api.request("GET", "/v1/jobs?limit=50")]
    reader, writer = await asyncio.open_connection("127.0.0.1", api.port, limit=1 << 24)
    writer.write(listed[0])
    ids = [job["id"] for job in json.loads(await answer_of(reader))["items"]]
    writer.close()
    reads = [api.request("GET", f"/v1/jobs/{ids[number % len(ids)]}") for number in range(4 * options.requests)]
    found.append(await measured_rate(api.port, "reads of a job", reads))
    total = options.requests + batches * BATCH
    found.append(await measured_rate(api.port, f"lists of 50 among {total:,}", listed * (options.requests // 2)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--readers", type=int, default=100)
    parser.add_argument("--events", type=int, default=20_000)
    parser.add_argument("--processes", type=int, default=1, help="of the API (TRIVET_API_PROCESSES)")
    parser.add_argument("--settle", type=float, default=30.0, help="seconds before memory is read")
    parser.add_argument("--prefect-connections", type=int, default=CONNECTIONS, help="open at a time to that peer")
    parser.add_argument("--prefect", metavar="PYTHON", help="interpreter of the peer, which is measured first")
    options = parser.parse_args()
    if options.prefect:
        print(
            asyncio.run(
                prefect_peer(options.prefect, options.requests // 4, options.prefect_connections, options.settle)
            )
        )
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    with tempfile.TemporaryDirectory() as folder, EmbeddedBroker.start(Path(folder) / "broker") as broker:
        settings = {
            "TRIVET_REDIS_URL": broker.url,
            "TRIVET_CPU_SLOTS": "0",
            "TRIVET_API_PROCESSES": str(options.processes),
            "TRIVET_LEASE_S": str(LONG_S),
            "TRIVET_STARTING_LEASE_S": str(LONG_S),
            "TRIVET_HEARTBEAT_S": str(LONG_S),
            "TRIVET_MAX_STREAMS_PER_KEY": str(2 * options.readers),
        }
        service = Service(Path(folder) / "data", settings)
        service.start()
        time.sleep(options.settle)
        assert service.process is not None
        at_rest = memory(service.process.pid, broker.process.pid)
        store = Store.connect(broker.url, DataLayout(service.data), LIMITS)
        store.hosts.beat(HostReport(HOST, "127.0.0.1", cpu_slots=1))
        api = Api(service.port, service.key_file.read_text().strip())
        found = asyncio.run(rates(api, options))
        ref = next(AttemptRef(job_id, 1, HOST) for job_id in _placed(store))
        store.attempts.claim(ref, "benchmark")
        rate, reading = events_to_readers(store, api, ref, options.readers, options.events)
        began = time.perf_counter()
        service.process.send_signal(signal.SIGTERM)
        service.process.wait()
        stopped_s = time.perf_counter() - began
        store.close()
    found += [rate]
    machine, cores = platform.processor() or platform.machine(), len(os.sched_getaffinity(0))
    print(f"{machine}, {cores} cores, commit {commit.stdout.strip()}\n")
    print("| what | per second | p50 ms | p99 ms |\n|---|--:|--:|--:|")
    print("\n".join(each.row for each in found))
    print(f"\nStopped with {reading.count} open streams in {stopped_s:.2f} s. Memory at rest, MiB:")
    print(", ".join(f"{name} {size:.0f}" for name, size in sorted(at_rest.items())))


PREFECT = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_LOGGING_SERVER_LEVEL": "ERROR",
    "PREFECT_SERVER_UI_ENABLED": "false",
    "DO_NOT_TRACK": "1",
}


async def prefect_peer(python: str, requests: int, connections: int, settle_s: float) -> str:
    """Return the table of a Prefect server under the same requests, as many as it takes in some seconds."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, **PREFECT, "PREFECT_HOME": folder}
        command = [python, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
        with (Path(folder) / "server.log").open("wb") as log:
            server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            reader, writer = await _opened_when_ready(port, server)
            version = (await _asked(reader, writer, "GET", "/api/admin/version")).decode()
            flow = json.loads(await _asked(reader, writer, "POST", "/api/flows/", {"name": "load"}))["id"]
            deployed = {"name": "load", "flow_id": flow}
            deployment = json.loads(await _asked(reader, writer, "POST", "/api/deployments/", deployed))["id"]
            await asyncio.sleep(settle_s)
            at_rest = sum(memory(server.pid).values())
            submit = _request("POST", f"/api/deployments/{deployment}/create_flow_run", {})
            rate = partial(measured_rate, port, connections=connections, may_be_busy=True)
            found = [await rate("submissions", [submit] * requests)]
            listed = _request("POST", "/api/flow_runs/filter", {"limit": 50, "sort": "EXPECTED_START_TIME_DESC"})
            writer.close()
            ids = [run["id"] for run in json.loads(await _answered(port, listed))]
            reads = [_request("GET", f"/api/flow_runs/{ids[number % len(ids)]}") for number in range(2 * requests)]
            found.append(await rate("reads of a job", reads))
            found.append(await rate(f"lists of 50 among {requests:,}", [listed] * (requests // 2)))
            began = time.perf_counter()
        finally:
            server.send_signal(signal.SIGINT)
            server.wait()
        stopped_s = time.perf_counter() - began
    head = f"Prefect {version}, its server alone: {at_rest:.0f} MiB at rest, stopped in {stopped_s:.2f} s\n\n"
    return (
        head
        + "| what | per second | p50 ms | p99 ms |\n|---|--:|--:|--:|\n"
        + "\n".join(one.row for one in found)
        + "\n"
    )


async def _opened_when_ready(
    port: int, server: subprocess.Popen[bytes]
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    for _ in range(1200):
        if server.poll() is not None:
            break
        with contextlib.suppress(OSError):
            return await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
        await asyncio.sleep(0.1)
    raise SystemExit("the peer did not start")


async def _asked(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, method: str, path: str, body: object = None
) -> bytes:
    writer.write(_request(method, path, body))
    return await answer_of(reader)


def _request(method: str, path: str, body: object = None) -> bytes:
    content = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def _placed(store: Store) -> list[str]:
    """Return the job that the played host holds: whoever placed it, there is room for one."""
    store.attempts.place()
    return [job.id for job in store.jobs.list(JobFilter(states=("starting",)), limit=1).items]


if __name__ == "__main__":
    main()
