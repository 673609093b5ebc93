"""How long a job takes to start: from submission to the first event of a rank, through the whole service.

The peer is torchrun alone: ``python -m torch.distributed.run … -m workers.rank``, the same rank program with the same
tiny training spec, whose events this script reads. Both columns start where a user would wait: the service's when
``submit`` is called (then placement, outbox, Celery, supervisor, keeper, torchrun), torchrun's when its process is
started. *first event* is sent by rank 0 when it has imported its job kind, torch included; *first step* when it has
trained one step.

The service is an embedded broker and one ``python -m workers``, started here, with a warm spare supervisor and, in a
second run, without. Repetitions of all three alternate, so that a busy machine disturbs them alike.

    python benchmarks/launch.py [REPETITIONS [RANKS [cpu|cuda]]]

With ``isolation`` in front, the price of keeping ranks apart: two such services with a warm spare, whose
``TRIVET_JOB_ISOLATION`` is ``auto`` and ``none``, take turns; and how many status reads a second one client gets from
an API process of each, one after the other, while nothing else runs.
"""

from __future__ import annotations

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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from service.jobs.embedded import EmbeddedBroker
from service.jobs.event_files import rank_file
from service.jobs.layout import DataLayout
from service.jobs.runtime import GATE_ARTIFACTS
from service.jobs.spec.train import TrainSpec
from service.jobs.store import Store

SPARE_READY_S = 10.0
"""After a start the next spare is begun 5 s later; the rest is for its import of torch."""
PATIENCE_S = 120.0


@dataclass(frozen=True)
class Start:
    """Seconds from the beginning to rank 0's first event and to its first training step."""

    first_event: float
    first_step: float


def tiny_spec(ranks: int, device: str) -> TrainSpec:
    return TrainSpec.model_validate(
        {
            "model": {"family": "mlp", "in_features": 64, "hidden": [16], "out_features": 10},
            "data": {"source": "digits"},
            "steps": 1,
            "batch": {"global": 8},
            "parallel": {"dp_shard": ranks},
            "device": device,
        }
    )


def through_service(store: Store, ranks: int, device: str) -> Start:
    began = time.time()
    job, _ = store.jobs.submit(tiny_spec(ranks, device), "benchmark")
    moments = _moments(lambda: [item.event for item in store.events.page(job.id, after="0-0", limit=1000).items])
    while store.jobs.get(job.id).ended_at is None:
        time.sleep(0.05)
    return Start(moments[0] - began, moments[1] - began)


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
            "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // ranks)),
        }
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        began = time.time()
        process = subprocess.Popen(
            [*torchrun, "-m", "workers.rank"], env=environment, stderr=subprocess.DEVNULL, cwd=folder
        )
        threading.Thread(target=_accept, args=(listening,), daemon=True).start()
        if process.wait() != 0:
            raise SystemExit("torchrun alone did not succeed")
    moments = _moments(lambda: _written(rank_file(folder, 0)))
    return Start(moments[0] - began, moments[1] - began)


def _accept(listening: socket.socket) -> None:
    """Be the supervisor that ranks call: take what they print, and keep it from nobody."""
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


def _moments(look: Callable[[], list[dict[str, Any]]]) -> tuple[float, float]:
    """When rank 0 sent its first span and its first metric, by its own clock, which is this machine's."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        events = [event for event in look() if event["rank"] == 0]
        spans = [event["time"] for event in events if event["type"] == "span"]
        metrics = [event["time"] for event in events if event["type"] == "metric"]
        if spans and metrics:
            return spans[0], metrics[0]
        time.sleep(0.05)
    raise SystemExit("the job did not report")


@contextlib.contextmanager
def service(folder: Path, spares: int, slots: int, isolation: str = "auto") -> Iterator[Store]:
    data = DataLayout(folder / "data")
    with EmbeddedBroker.start(folder / "broker") as broker:
        store = Store.connect(broker.url, data)
        environment = os.environ | {
            "TRIVET_DATA": str(data.root),
            "TRIVET_REDIS_URL": broker.url,
            "TRIVET_CPU_SLOTS": str(slots),
            "TRIVET_WARM_SUPERVISORS": str(spares),
            "TRIVET_JOB_ISOLATION": isolation,
        }
        with (folder / "worker.log").open("wb") as log:
            worker = subprocess.Popen([sys.executable, "-m", "workers"], env=environment, stdout=log, stderr=log)
        try:
            while not store.hosts.list():
                time.sleep(0.05)
            yield store
        finally:
            worker.terminate()
            worker.wait()
            store.close()


def row(name: str, starts: list[Start], peer: list[Start]) -> str:
    cells = [name]
    for moment in ("first_event", "first_step"):
        values, others = ([float(getattr(start, moment)) for start in group] for group in (starts, peer))
        median = statistics.median(values)
        cells.append(f"{median:.2f} ({min(values):.2f}–{max(values):.2f})")
        cells.append(f"{median / statistics.median(others):.2f}")
    return f"| {' | '.join(cells)} |"


READS_S = 4.0
"""How long status reads are counted."""


def reads_per_second(store: Store, isolation: str) -> float:
    """Count what one client reads, one request after the other, from an API process of its own."""
    job = store.jobs.list().items[0]
    secret = store.keys.create("reader", ["read"])[1]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert store.files.data is not None
    environment = os.environ | {
        "TRIVET_DATA": str(store.files.data.root),
        "TRIVET_REDIS_URL": store.url,
        "TRIVET_JOB_ISOLATION": isolation,
    }
    api = subprocess.Popen(
        [sys.executable, "-m", "api", "--port", str(port)], env=environment, stderr=subprocess.DEVNULL
    )
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        deadline = time.monotonic() + PATIENCE_S
        while True:
            with contextlib.suppress(ConnectionRefusedError):
                connection.connect()
                break
            if time.monotonic() > deadline:
                raise SystemExit("the API did not start")
            time.sleep(0.1)
        count, ends = 0, time.monotonic() + READS_S
        while time.monotonic() < ends:
            connection.request("GET", f"/v1/jobs/{job.id}", headers={"Authorization": f"Bearer {secret}"})
            if connection.getresponse().read() == b"":
                raise SystemExit("the API did not answer")
            count += 1
        return count / READS_S
    finally:
        api.terminate()
        api.wait()


def price_of_isolation(repetitions: int, ranks: int, device: str) -> None:
    starts: dict[str, list[Start]] = {"auto": [], "none": []}
    rates: dict[str, list[float]] = {"auto": [], "none": []}
    with contextlib.ExitStack() as held:
        stores = {}
        for mode in starts:
            folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
            stores[mode] = held.enter_context(service(folder, 1, ranks, mode))
        held_parts = ", ".join(sorted(stores["auto"].hosts.list()[0].isolation))
        for _ in range(repetitions):
            time.sleep(SPARE_READY_S)
            for mode, store in stores.items():
                starts[mode].append(through_service(store, ranks, device))
        for _ in range(3):
            for mode, store in stores.items():
                rates[mode].append(reads_per_second(store, mode))
    print(f"### The price of isolation: {ranks} ranks on {device}, {repetitions} repetitions\n")
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}; auto holds {held_parts}.")
    print(f"Load average at the end {os.getloadavg()[0]:.1f}. Seconds and reads a second: median (least–most).\n")
    print("| isolation | first event | ratio | first step | ratio | status reads/s |\n|---|---|---|---|---|---|")
    for mode, found in starts.items():
        least, median, most = min(rates[mode]), statistics.median(rates[mode]), max(rates[mode])
        print(f"{row(mode, found, starts['none'])} {median:.0f} ({least:.0f}–{most:.0f}) |")


def main() -> None:
    given = sys.argv[1:]
    if given[:1] == ["isolation"]:
        count, size, device = (*given[1:], *("5", "2", "cpu")[len(given) - 1 :])
        price_of_isolation(int(count), int(size), device)
        return
    count, size, device = (*given, *("7", "2", "cpu")[len(given) :])
    repetitions, ranks = int(count), int(size)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    alone: list[Start] = []
    warm: list[Start] = []
    cold: list[Start] = []
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        plain = DataLayout(Path(first) / "plain")
        with service(Path(first), 1, ranks) as with_spare, service(Path(second), 0, ranks) as without:
            for number in range(repetitions):
                time.sleep(SPARE_READY_S)
                warm.append(through_service(with_spare, ranks, device))
                cold.append(through_service(without, ranks, device))
                alone.append(through_torchrun(plain, ranks, device, number))
                print(number, warm[-1], cold[-1], alone[-1], file=sys.stderr)
    print(f"### Start of a job: {ranks} ranks on {device}, {repetitions} repetitions\n")
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()},")
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"commit {commit.stdout.strip()}, load average at the end {load}. Seconds: median (least–most).\n")
    print("| start | first event | ratio | first step | ratio |\n|---|---|---|---|---|")
    print(row("service, warm spare", warm, alone))
    print(row("service, no spare", cold, alone))
    print(row("torchrun alone", alone, alone))


if __name__ == "__main__":
    main()
