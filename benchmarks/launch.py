"""Measures how long a job takes to start: from submission to the first line of its ranks, through the whole service.

Jobs are submitted one after the other, and several at once. The peer is torchrun alone:
``python -m torch.distributed.run … -m workers.rank``, the same rank program with the same tiny training spec, in
between the jobs of the series and as many at once. Both start where a user would wait: the service's when ``submit`` is
called (then placement, outbox, Celery, supervisor, keeper, torchrun), torchrun's when its process is started. *first
line* is the first of the rank program of the last rank to get there, *imported* the moment at which rank 0 has imported
its job kind, torch included, *first step* the one at which it has trained a step, *end* that at which the job has
ended.

The service is an embedded broker and one ``python -m workers``, started here, which has ``--settle`` seconds before the
first job, as a service has that has been up for a while.

    python benchmarks/launch.py [--series 20] [--at-once 8] [--torchrun 5] [--ranks 2] [--device cpu|cuda] [--settle 30]

With ``--isolation``, the price of keeping ranks apart instead: two such services, whose ``TRIVET_JOB_ISOLATION`` is
``auto`` and ``none``, run the series in turns; and how many status reads a second one client gets from an API process
of each, one after the other, while nothing else runs.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import platform
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from api_process import ApiProcess
from ending import end_by_signals
from small_jobs import small_job

from service.jobs.events import rank_file
from service.jobs.files import DataLayout
from service.jobs.host.embedded_broker import EmbeddedBroker
from service.jobs.runtime import GATE_ARTIFACTS
from service.jobs.spec.train import TrainSpec
from service.jobs.store import Store

MOMENTS = ("first_line", "imported", "first_step", "end")
PATIENCE_S = 120.0


@dataclass(frozen=True)
class Start:
    """Seconds from the beginning to each moment."""

    first_line: float
    imported: float
    first_step: float
    end: float


def tiny_spec(ranks: int, device: str) -> TrainSpec:
    return TrainSpec.model_validate(small_job(1, parallel={"dp_shard": ranks}, device=device))


def through_service(store: Store, jobs: int, ranks: int, device: str) -> list[Start]:
    """Submit so many jobs at once, and wait for their ends."""
    began = {}
    for _ in range(jobs):
        asked = time.time()
        began[store.jobs.submit(tiny_spec(ranks, device), "benchmark")[0].id] = asked
    waiting = set(began)
    while waiting:
        time.sleep(0.02 * len(waiting))
        waiting = {each for each in waiting if store.jobs.get(each).ended_at is None}
    return [_start_of(store, job_id, asked) for job_id, asked in began.items()]


def _start_of(store: Store, job_id: str, asked: float) -> Start:
    job = store.jobs.get(job_id)
    if job.state != "succeeded" or job.ended_at is None:
        raise SystemExit(f"{job_id} {job.state}: {job.error}")
    events = [item.event for item in store.events.page(job_id, after="0-0", limit=1000).items]
    return _moments(events, asked, job.ended_at.timestamp())


def through_torchrun(data: DataLayout, ranks: int, device: str, number: int) -> Start:
    job_id = f"job_{number:020d}"
    folder = data.job(job_id).attempt(1)
    data.job(job_id).work(1).mkdir(parents=True)
    data.job(job_id).artifacts.mkdir()
    (folder / "spec.json").write_text(tiny_spec(ranks, device).model_dump_json(by_alias=True))
    (folder / GATE_ARTIFACTS).write_text("{}")
    with tempfile.TemporaryDirectory() as scratch, socket.socket(socket.AF_UNIX) as listening:
        address = str(Path(scratch) / "events")
        listening.bind(address)
        listening.listen(64)
        environment = os.environ | {
            "TRIVET_JOB": job_id,
            "TRIVET_ATTEMPT": "1",
            "TRIVET_DATA": str(data.root),
            "TRIVET_EVENTS": address,
            "TRIVET_EVENTS_SECRET": "",
            "TRIVET_DEVICE": device,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // ranks))),
        }
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        began = time.time()
        process = subprocess.Popen(
            [*torchrun, "-m", "workers.rank"], env=environment, stderr=subprocess.DEVNULL, cwd=folder
        )
        threading.Thread(target=_accept, args=(listening,), daemon=True).start()
        if process.wait() != 0:
            raise SystemExit("torchrun alone did not succeed")
        ended = time.time()
    events = [event for rank in range(ranks) for event in _written(rank_file(folder, rank))]
    return _moments(events, began, ended)


def _accept(listening: socket.socket) -> None:
    """Be the supervisor that ranks call: take their output, and pass it on."""
    selector = selectors.DefaultSelector()
    selector.register(listening, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            peer = key.fileobj
            assert isinstance(peer, socket.socket)
            if peer is listening:
                selector.register(listening.accept()[0], selectors.EVENT_READ)
            elif not peer.recv(1 << 16):
                selector.unregister(peer)
                peer.close()


def _written(path: Path) -> list[dict[str, Any]]:
    """Return the events that a rank has in its file by now."""
    return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


def _moments(events: Sequence[dict[str, Any]], began: float, ended: float) -> Start:
    """When ranks began, and rank 0 sent its first metric, by their own clock, which is this machine's."""
    imports = [event for event in events if event["type"] == "span" and event["name"] == "import"]
    metric = next(event for event in events if event["type"] == "metric" and event["rank"] == 0)
    first_line = max(event["start"] for event in imports)
    imported = next(event["end"] for event in imports if event["rank"] == 0)
    return Start(*(moment - began for moment in (first_line, imported, metric["time"], ended)))


@contextlib.contextmanager
def service(folder: Path, slots: int, isolation: str = "auto") -> Iterator[Store]:
    """Yield the store of a broker and a worker, which end with their jobs, also if a signal ends this process."""
    end_by_signals()
    data = DataLayout(folder / "data")
    with EmbeddedBroker.start(folder / "broker") as broker:
        store = Store.connect(broker.url, data)
        environment = os.environ | {
            "TRIVET_DATA": str(data.root),
            "TRIVET_REDIS_URL": broker.url,
            "TRIVET_CPU_SLOTS": str(slots),
            "TRIVET_JOB_ISOLATION": isolation,
            "TRIVET_STOP_JOBS": "1",
        }
        with (folder / "worker.log").open("wb") as log:
            worker = subprocess.Popen(
                [sys.executable, "-m", "workers"], env=environment, stdout=log, stderr=log, start_new_session=True
            )
        try:
            while not store.hosts.list():
                time.sleep(0.05)
            yield store
        finally:
            worker.terminate()
            worker.wait()
            store.close()


def row(name: str, starts: Sequence[Start]) -> str:
    """Return median and most of each moment."""
    cells = [name, str(len(starts))]
    for moment in MOMENTS:
        values = [float(getattr(start, moment)) for start in starts]
        cells.append(f"{statistics.median(values):.2f} ({max(values):.2f})")
    return f"| {' | '.join(cells)} |"


READS_S = 4.0
"""How long status reads are counted."""


def reads_per_second(store: Store, isolation: str) -> float:
    """Count what one client reads, one request after the other, from an API process of its own."""
    job = store.jobs.list().items[0]
    secret = store.keys.create("reader", ["read"])[1]
    assert store.files.data is not None
    data = store.files.data.root
    own = {"TRIVET_DATA": str(data), "TRIVET_REDIS_URL": store.url, "TRIVET_JOB_ISOLATION": isolation}
    api = ApiProcess(own, data.with_suffix(".api.log"))
    api.start()
    try:
        connection = http.client.HTTPConnection("127.0.0.1", api.port, timeout=60)
        count, ends = 0, time.monotonic() + READS_S
        while time.monotonic() < ends:
            connection.request("GET", f"/v1/jobs/{job.id}", headers={"Authorization": f"Bearer {secret}"})
            if connection.getresponse().read() == b"":
                raise SystemExit("the API did not answer")
            count += 1
        return count / READS_S
    finally:
        api.stop()


def price_of_isolation(options: argparse.Namespace) -> None:
    """Print the costs of the modes: both services are up throughout, and take turns."""
    ranks, device = options.ranks, options.device
    starts: dict[str, list[Start]] = {"auto": [], "none": []}
    rates: dict[str, list[float]] = {"auto": [], "none": []}
    with contextlib.ExitStack() as held:
        stores = {}
        for mode in starts:
            folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
            stores[mode] = held.enter_context(service(folder, ranks, mode))
        held_parts = ", ".join(sorted(stores["auto"].hosts.list()[0].isolation))
        time.sleep(options.settle)
        for _ in range(options.series):
            for mode, store in stores.items():
                starts[mode] += through_service(store, 1, ranks, device)
        for _ in range(3):
            for mode, store in stores.items():
                rates[mode].append(reads_per_second(store, mode))
    print(f"### The price of isolation: {ranks} ranks on {device}\n")
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}; auto holds {held_parts}.")
    print(f"Load average at the end {os.getloadavg()[0]:.1f}. Seconds, and reads a second: median (most).\n")
    print("| isolation | jobs | first line | imported | first step | end | status reads/s |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for mode, found in starts.items():
        print(f"{row(mode, found)} {statistics.median(rates[mode]):.0f} ({max(rates[mode]):.0f}) |")


def measured(store: Store, plain: DataLayout, options: argparse.Namespace) -> dict[str, list[Start]]:
    """Return the starts of each row of the table."""
    ranks, device, number = options.ranks, options.device, 0
    series: list[Start] = []
    alone: list[Start] = []
    for each in range(options.series):
        series += through_service(store, 1, ranks, device)
        if each * options.torchrun // options.series < (each + 1) * options.torchrun // options.series:
            alone.append(through_torchrun(plain, ranks, device, number := number + 1))
        print(each, series[-1], file=sys.stderr)
    at_once = through_service(store, options.at_once, ranks, device)
    with ThreadPoolExecutor(options.at_once) as threads:
        numbers = range(number + 1, number + 1 + options.at_once)
        peers = list(threads.map(lambda each: through_torchrun(plain, ranks, device, each), numbers))
    return {
        "service, one after the other": series,
        "torchrun alone, in between": alone,
        f"service, {options.at_once} at once": at_once,
        f"torchrun alone, {options.at_once} at once": peers,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--series", type=int, default=20, help="jobs one after the other")
    parser.add_argument("--at-once", type=int, default=8, help="jobs submitted together")
    parser.add_argument("--torchrun", type=int, default=5, help="groups of torchrun alone in between")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--settle", type=float, default=30.0, help="seconds before the first job")
    parser.add_argument("--isolation", action="store_true", help="what keeping ranks apart costs, instead")
    options = parser.parse_args()
    if options.isolation:
        price_of_isolation(options)
        return
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    with tempfile.TemporaryDirectory() as folder, service(Path(folder), options.ranks * options.at_once) as store:
        time.sleep(options.settle)
        found = measured(store, DataLayout(Path(folder) / "plain"), options)
    print(f"### Start of a job: {options.ranks} ranks on {options.device}\n")
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()},")
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"commit {commit.stdout.strip()}, load average at the end {load}. Seconds: median (most).\n")
    print("| start | jobs | first line | imported | first step | end |\n|---|--:|--:|--:|--:|--:|")
    for name, starts in found.items():
        if starts:
            print(row(name, starts))


if __name__ == "__main__":
    main()
