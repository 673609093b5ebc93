"""Measures the service's capacity: submissions, reads, lists, live events, its shutdown, and its memory at rest.

Broker, API (`trivet up`), worker and this client share the cores of one machine; run it with ``taskset -c 0,1`` where
there are more than two. No job runs: the worker has no slots, and one job is held by a host that this script plays, so
that all others wait and events can be told of one. Requests go over 16 connections that are kept open. Placement with
many pending jobs is measured by ``placement.py 3000 300 512 8``.

With ``--prefect PYTHON``, an interpreter that has Prefect, the same requests are sent to a Prefect server first, alone:
runs of a deployment that no worker takes, in its own database (SQLite). If it refuses at 16 connections,
``--prefect-connections`` gives it fewer.

    python benchmarks/load.py [--requests 2000] [--jobs 10000] [--readers 100] [--events 20000] [--events-per-s 1000]
        [--processes 1] [--prefect PYTHON] [--prefect-connections 16]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from chaos_service import Service
from load_client import CONNECTIONS, Api, Rate, answer_of, measured_rate, memory
from load_peer import prefect_peer
from small_jobs import small_job

from service.jobs.events import Event, MetricEvent
from service.jobs.files import DataLayout
from service.jobs.host.embedded_broker import EmbeddedBroker
from service.jobs.records import AttemptRef
from service.jobs.store import HostReport, Store, StoreLimits
from service.jobs.store.listing import JobFilter

BATCH = 1000
LONG_S = 3600.0
HOST = "played"
LARGEST_TOLD, TELLING_PAUSE_S = 256, 0.01
LIMITS = StoreLimits(lease_s=LONG_S, starting_lease_s=LONG_S, heartbeat_s=LONG_S)
SPEC = small_job(1)


@dataclass
class Readers:
    """Streams of one job's events that are read by a thread of its own."""

    api: Api
    job_id: str
    count: int
    left: int = 0
    delays: list[float] = field(default_factory=list)
    """Of each read, that of the oldest event in it."""
    connected: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)

    async def read(self) -> None:
        """Read what the streams bring until they end."""
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
                self.delays.append(now - float(times[0]))
                self.left -= len(times)
                if self.left <= 0:
                    self.done.set()

    def told(self, store: Store, ref: AttemptRef, events: int, a_second: int | None) -> Rate:
        """Report events like a supervisor, at once or so many a second, and wait until all streams have them."""
        self.left, self.delays = self.count * events, []
        self.done.clear()
        began, told = time.perf_counter(), 0
        while told < events:
            due = events if a_second is None else int((time.perf_counter() - began) * a_second)
            if more := range(told, min(events, due, told + LARGEST_TOLD)):
                store.attempts.emit(ref, [_metric(step) for step in more])
                told = more.stop
            else:
                time.sleep(TELLING_PAUSE_S)
        self.done.wait()
        spent, delays = time.perf_counter() - began, sorted(self.delays)
        p50, p99 = (1000 * delays[int(share * (len(delays) - 1))] for share in (0.5, 0.99))
        what = "at once" if a_second is None else f"{a_second * self.count:,} a second offered"
        rate = Rate(f"events to {self.count} readers, {what}", self.count * events / spent, p50, p99)
        print(rate.row, file=sys.stderr, flush=True)
        return rate


def _metric(step: int) -> Event:
    return MetricEvent(type="metric", time=time.time(), rank=0, step=step, values={"loss": 0.5})


def connected_readers(api: Api, job_id: str, count: int) -> Readers:
    reading = Readers(api, job_id, count)
    threading.Thread(target=lambda: asyncio.run(reading.read()), daemon=True).start()
    reading.connected.wait()
    return reading


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
    options = _read_options()
    if options.prefect:
        peer = prefect_peer(options.prefect, options.requests // 4, options.prefect_connections, options.settle)
        print(asyncio.run(peer))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    with tempfile.TemporaryDirectory() as folder, EmbeddedBroker.start(Path(folder) / "broker") as broker:
        service = Service(Path(folder) / "data", _settings(broker.url, options))
        service.start()
        time.sleep(options.settle)
        assert service.process is not None
        at_rest = memory(service.process.pid, broker.process.pid)
        store = Store.connect(broker.url, DataLayout(service.data), LIMITS)
        found, streams = _measure(service, store, options)
        began = time.perf_counter()
        service.process.send_signal(signal.SIGTERM)
        service.process.wait()
        stopped_s = time.perf_counter() - began
        store.close()
    machine, cores = platform.processor() or platform.machine(), len(os.sched_getaffinity(0))
    print(f"{machine}, {cores} cores, commit {commit.stdout.strip()}\n")
    print("| what | per second | p50 ms | p99 ms |\n|---|--:|--:|--:|")
    print("\n".join(each.row for each in found))
    print(f"\nStopped with {streams} open streams in {stopped_s:.2f} s. Memory at rest, MiB:")
    print(", ".join(f"{name} {size:.0f}" for name, size in sorted(at_rest.items())))


def _read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--readers", type=int, default=100)
    parser.add_argument("--events", type=int, default=20_000)
    parser.add_argument(
        "--events-per-s", type=int, default=1000, help="told in the first round; all at once in the second"
    )
    parser.add_argument("--processes", type=int, default=1, help="of the API (TRIVET_API_PROCESSES)")
    parser.add_argument("--settle", type=float, default=30.0, help="seconds before memory is read")
    parser.add_argument("--prefect-connections", type=int, default=CONNECTIONS, help="open at a time to that peer")
    parser.add_argument("--prefect", metavar="PYTHON", help="interpreter of the peer, which is measured first")
    return parser.parse_args()


def _settings(broker: str, options: argparse.Namespace) -> dict[str, str]:
    return {
        "TRIVET_REDIS_URL": broker,
        "TRIVET_CPU_SLOTS": "0",
        "TRIVET_API_PROCESSES": str(options.processes),
        "TRIVET_LEASE_S": str(LONG_S),
        "TRIVET_STARTING_LEASE_S": str(LONG_S),
        "TRIVET_HEARTBEAT_S": str(LONG_S),
        "TRIVET_MAX_STREAMS_PER_KEY": str(2 * options.readers),
    }


def _measure(service: Service, store: Store, options: argparse.Namespace) -> tuple[list[Rate], int]:
    """Return the rates of calls and of told events, and how many streams are still open."""
    store.hosts.beat(HostReport(HOST, "127.0.0.1", cpu_slots=1))
    api = Api(service.port, service.key_file.read_text().strip())
    found = asyncio.run(rates(api, options))
    ref = next(AttemptRef(job_id, 1, HOST) for job_id in _placed(store))
    store.attempts.claim(ref, "benchmark")
    reading = connected_readers(api, ref.job_id, options.readers)
    for a_second in (options.events_per_s, None):
        found.append(reading.told(store, ref, options.events, a_second))
    return found, reading.count


def _placed(store: Store) -> list[str]:
    """Return the job that the played host holds: whoever placed it, there is room for one."""
    store.attempts.place()
    return [job.id for job in store.jobs.list(JobFilter(states=("starting",)), limit=1).items]


if __name__ == "__main__":
    main()
