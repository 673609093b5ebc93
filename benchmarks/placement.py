"""Measures how long one placement occupies the broker, with many pending jobs of many shapes. The broker runs
one script at a time, so everything else waits for a placement. Pending jobs are
written by the service's own submit script, a tenth of them at a lower priority; the half of the shapes that has more
ranks lies at the head of the queue, in random order, the half with fewer behind it. Then, over and over, the oldest job
that holds devices is cancelled, and the next placement is timed: the processor time of the broker's main thread, which
other processes of the machine do not disturb, and the time that the client waited, which they do.

* *full*: nothing is free, nothing can be placed;
* *churn*: one job's devices have just come free;
* *overdue*: the same, and every pending job has waited past the bound, so that the first one that does not fit holds
  back everything behind it;
* *staircase*: the whole fleet is idle, and each pending job wants a few devices more than the hosts it may spread over
  ever hold: the shapes that are hardest to tell from ones that fit.

The pending jobs belong to as many projects as ``--projects`` says, one after the other. ``--beside CHECKOUT`` measures
another checkout of this repository in the same run, each size there first: a ratio of the two says more than either.

    python benchmarks/placement.py [--projects N] [--beside CHECKOUT] [JOBS SHAPES HOSTS DEVICES_PER_HOST] …
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from service.jobs.files import DataLayout
from service.jobs.host.embedded_broker import EmbeddedBroker
from service.jobs.store import HostReport, Store, StoreLimits, stubs
from service.jobs.store.keyspace import PLACEMENT_IDLE

ROUNDS = 300
DEFAULT = ("1000 100 2 8", "3000 300 512 8", "10000 1000 8 8", "100000 5000 8 8", "100000 5000 512 8")
NEVER = 10**6
LIMITS = StoreLimits(lease_s=NEVER, starting_lease_s=NEVER, heartbeat_s=NEVER, max_queue_bypass_s=NEVER)
DATA = DataLayout(Path("unused"))


@dataclass(frozen=True)
class Size:
    """``devices`` per host."""

    jobs: int
    shapes: int
    hosts: int
    devices: int
    projects: int

    def row(self, case: str, placed: int, times: list[Time]) -> str:
        broker = sorted(time.broker_ms for time in times)
        figures = (statistics.median(broker), broker[int(0.99 * len(broker))], broker[-1])
        waited = statistics.median(time.waited_ms for time in times)
        cells = (f"{self.jobs:,}", f"{self.shapes:,}", f"{self.hosts} × {self.devices}", case, str(placed))
        return f"| {' | '.join((*cells, *(f'{figure:.2f}' for figure in (*figures, waited))))} |"


@dataclass(frozen=True)
class Time:
    """The time of one placement."""

    broker_ms: float
    waited_ms: float


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--projects", type=int, default=1)
    parser.add_argument("--beside", type=Path)
    parser.add_argument("numbers", type=int, nargs="*")
    given = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}")
    print("| jobs | shapes | hosts × devices | case | placed | broker ms, median | 99 % | most | client ms, median |")
    print("|--:|--:|--:|---|--:|--:|--:|--:|--:|", flush=True)
    for size in _sizes(given.numbers, given.projects):
        if given.beside is not None:
            _measure_there(given.beside.resolve(), size)
        with (
            tempfile.TemporaryDirectory(prefix="trivet-") as folder,
            EmbeddedBroker.start(Path(folder), fsync="everysec") as broker,
        ):
            _measure(broker.url, size)
            _measure_staircase(broker.url, size)
    return 0


def _sizes(numbers: list[int], projects: int) -> Iterator[Size]:
    numbers = numbers or [int(word) for word in " ".join(DEFAULT).split()]
    for index in range(0, len(numbers), 4):
        yield Size(*numbers[index : index + 4], projects)


def _measure_there(checkout: Path, size: Size) -> None:
    """Print the rows of another checkout, by this very program."""
    numbers = (size.jobs, size.shapes, size.hosts, size.devices)
    command = [sys.executable, __file__, "--projects", str(size.projects), *map(str, numbers)]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    said = subprocess.run(command, env=environment, cwd=checkout, stdout=subprocess.PIPE, text=True, check=True).stdout
    for row in said.splitlines()[3:]:
        print(f"{row} there", flush=True)


def _measure(url: str, size: Size) -> None:
    store = _fleet(url, size.hosts, size.devices)
    draw = random.Random(0)
    project = itertools.cycle(f"project-{number}" if number else "default" for number in range(size.projects))
    for index in range(size.hosts * size.devices):
        _submit(store, 1 + index % size.devices, 1, 0, next(project))
    running = _place_all(store)
    large, small = _shapes(size.shapes, draw)
    for index in range(size.jobs):
        ranks, spread = draw.choice(large if index < size.jobs // 2 else small)
        _submit(store, ranks, spread, draw.choice([-1] + 9 * [0]), next(project))
    overdue = Store.connect(url, DATA, replace(LIMITS, max_queue_bypass_s=0.001))
    for name, placer, release in (("full", store, False), ("churn", store, True), ("overdue", overdue, True)):
        times, placed = _rounds(placer, running, release)
        print(size.row(name, placed, times), flush=True)
    store.close()
    overdue.close()


def _measure_staircase(url: str, size: Size) -> None:
    """Needs an empty broker."""
    store = _fleet(url, size.hosts, size.devices)
    project = itertools.cycle(f"project-{number}" if number else "default" for number in range(size.projects))
    for index in range(size.jobs):
        shape = index % size.shapes
        spread, excess = shape % size.hosts + 1, shape // size.hosts + 1
        _submit(store, size.devices * spread + excess, spread, 0, next(project))
    times = []
    for _ in range(ROUNDS):
        store.client.call("DEL", PLACEMENT_IDLE())
        times.append(_timed(store)[0])
    print(size.row("staircase", 0, times), flush=True)
    store.close()


def _fleet(url: str, hosts: int, devices: int) -> Store:
    store = Store.connect(url, DATA, LIMITS)
    store.client.call("FLUSHALL")
    for index in range(hosts):
        store.hosts.beat(HostReport(f"host-{index:04d}", "127.0.0.1", (), devices))
    return store


def _shapes(count: int, draw: random.Random) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(ranks, hosts): the half with more ranks, then the half with fewer."""
    widest = next(ranks for ranks in itertools.count(1) if ranks * (ranks + 1) // 2 >= count)
    shapes = [(ranks, spread) for ranks in range(1, widest + 1) for spread in range(1, ranks + 1)][:count]
    small, large = shapes[: count // 2], shapes[count // 2 :]
    draw.shuffle(small)
    draw.shuffle(large)
    return large, small


def _submit(store: Store, ranks: int, spread: int, priority: int, project: str) -> str:
    record = {
        "kind": "train", "name": "train", "labels": "{}", "owner": "benchmark", "project": project,
        "priority": str(priority), "retries": "0", "shape": f"cpu:{ranks}:{spread}", "after": "[]",
        "indexes": "[]", "spec": "{}",
    }  # fmt: skip
    suffix = f"{random.getrandbits(55):011x}"[:11]
    entry = {"idem": "", "body_hash": "", "suffix": suffix, "record": record, "indexes": [], "after": [], "files": []}
    outcomes = stubs.submit(store.client, limits=LIMITS.script_argument, entries=json.dumps([entry]))
    return outcomes[0][1]


def _place_all(store: Store) -> list[str]:
    placed: list[str] = []
    while some := store.attempts.place():
        placed += some
    return placed


def _rounds(store: Store, running: list[str], release: bool) -> tuple[list[Time], int]:
    times, placed = [], 0
    for _ in range(ROUNDS):
        if release and running:
            stubs.cancel(store.client, store.attempts.limits.script_argument, running.pop(0))
        store.client.call("DEL", PLACEMENT_IDLE())
        took, some = _timed(store)
        times.append(took)
        running += some
        placed += len(some)
    return times, placed


def _timed(store: Store) -> tuple[Time, list[str]]:
    """One placement: its time, and the jobs that it placed."""
    cpu_ms, began = _broker_ms(store), time.perf_counter()
    placed = store.attempts.place()
    waited_ms = (time.perf_counter() - began) * 1000
    return Time(_broker_ms(store) - cpu_ms, waited_ms), placed


def _broker_ms(store: Store) -> float:
    cpu = store.client.call("INFO", "cpu")
    return 1000 * sum(float(cpu[f"used_cpu_{mode}_main_thread"]) for mode in ("user", "sys"))


if __name__ == "__main__":
    sys.exit(main())
