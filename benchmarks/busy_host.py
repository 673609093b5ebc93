"""Measures what a host that is full of CPU jobs leaves to the service, to urgent jobs and to a GPU training.

Starts ``trivet up`` with a CPU slot for each core. First nothing else runs: status reads over 16 connections and lists
of 50 over 6; urgent CPU jobs, one after the other; and, if there is a GPU, a training of a transformer on it. Then
small CPU jobs of priority -100 are submitted, so many that all slots are busy and ``--waiting`` more wait until the
end, and all is measured again. *First line* is the first word of a rank, counted from the moment at which an ended job
freed a slot (idle: from the submission).

With ``--unweighed`` a full host is then measured as well, in a service without the weights and limits of threads by
which CPU jobs make way: ``TRIVET_CPU_NICENESS=0``, and ranks with as many threads as there are cores.

    python benchmarks/busy_host.py [--waiting 500] [--seconds 4] [--steps 60] [--unweighed]
    python benchmarks/busy_host.py --unweighed --spare 300 --seconds 2 --urgent 2 --steps 20    # the same in less time

Each figure is printed as soon as it is known; other lines begin with the seconds since the start.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaos_service import Service
from load_client import CONNECTIONS, Api, Rate, measured_rate

from service.jobs.records import Job
from trivet import Client
from workers.inventory import cuda_devices, usable_cores

LISTING = 6
LISTED, WARM = 60, 2
"""Jobs that a list has, and others that run before anything is measured."""
BATCH = 500
SETTLE_S = 5.0
PATIENCE_S = 300.0
SMALL = {
    "kind": "train",
    "model": {"family": "mlp", "in_features": 64, "hidden": [256, 256], "out_features": 10},
    "data": {"source": "digits"},
    "batch": {"global": 64},
    "device": "cpu",
}
ON_GPU = {
    "kind": "train",
    "model": {"family": "transformer", "vocab_size": 256, "dim": 512, "layers": 8, "heads": 8, "max_sequence": 256},
    "data": {"source": "tokens", "sequence": 256},
    "batch": {"global": 32},
    "device": "cuda",
}


BEGAN = time.monotonic()


def say(text: str) -> None:
    """Print a line, after the seconds since the start."""
    print(f"{time.monotonic() - BEGAN:6.1f} s: {text}", flush=True)


@dataclass(frozen=True)
class Figures:
    """What one service gave in one state of its host."""

    status: Rate
    lists: Rate
    first_line_s: list[float]
    training_s: float | None


@dataclass(frozen=True)
class Host:
    """A service, and how long each measurement lasts."""

    client: Client
    api: Api
    slots: int
    options: argparse.Namespace

    def figures(self, *, busy: bool) -> Figures:
        """Measure everything once."""
        state = "busy" if busy else "idle"
        job_id = self.client.job_page(limit=1).items[0].id
        status = self._rate(f"{state}: status reads", f"/v1/jobs/{job_id}", CONNECTIONS)
        lists = self._rate(f"{state}: lists of 50", "/v1/jobs?limit=50", LISTING)
        first = [self._first_line(busy=busy) for _ in range(self.options.urgent)]
        say(f"{state}: urgent jobs' first lines after {', '.join(f'{each:.2f}' for each in first)} s")
        training = self._training()
        say(f"{state}: training on the GPU, {'none' if training is None else f'{training:.1f} s'}")
        return Figures(status, lists, first, training)

    def _rate(self, what: str, path: str, connections: int) -> Rate:
        """Read for about the wanted time: as many times as a shorter trial lets expect."""
        request, trial = self.api.request("GET", path), 64
        began = time.perf_counter()
        asyncio.run(measured_rate(self.api.port, f"{what}, trial", [request] * trial, connections=connections))
        count = max(trial, int(trial * self.options.seconds / (time.perf_counter() - began)))
        return asyncio.run(measured_rate(self.api.port, what, [request] * count, connections=connections))

    def _first_line(self, *, busy: bool) -> float:
        """Return the seconds from the moment at which an urgent job could have started to its rank's first word."""
        ran = self._ended(SMALL | {"name": "urgent", "steps": 20, "priority": 100})
        line = next(phase.began_at for phase in ran.phases if phase.name == "importing")
        free = ran.created_at
        if busy:
            ended = [
                job.ended_at for job in self.client.job_page(state="succeeded", limit=100).items if job.id != ran.id
            ]
            free = min((at for at in ended if at is not None and at > ran.created_at), default=free)
        return (line - free).total_seconds()

    def _training(self) -> float | None:
        """Return the seconds from the first word of a training on the GPU to its end, imports included."""
        if not cuda_devices(os.environ):
            return None
        ran = self._ended(ON_GPU | {"name": "on the GPU", "steps": self.options.steps})
        assert ran.ended_at is not None
        return (ran.ended_at - ran.phases[0].began_at).total_seconds()

    def _ended(self, spec: Mapping[str, Any]) -> Job:
        began = time.monotonic()
        ran = self.client.wait(self.client.submit(spec).id, timeout_s=PATIENCE_S)
        say(f"  {ran.name}: {time.monotonic() - began:.1f} s from submission to end")
        if ran.state != "succeeded":
            raise RuntimeError(f"{ran.name} has {ran.state}: {ran.error}")
        return ran

    def fill(self) -> None:
        """Submit what keeps all slots busy to the end, and return when they are."""
        small = SMALL | {"name": "small", "steps": 100, "priority": -100}
        left = self.options.waiting + self.options.spare
        while left > 0:
            left -= len(self.client.submit_many([small] * min(BATCH, left)))
        deadline = time.monotonic() + PATIENCE_S
        while (busy := self._busy_slots()) < 0.75 * self.slots:  # a slot is free for a moment between two jobs
            if time.monotonic() > deadline:
                raise RuntimeError(f"only {busy} of {self.slots} slots were ever busy")
            time.sleep(0.2)
        say(f"{busy} of {self.slots} slots are busy")
        time.sleep(SETTLE_S)

    def _busy_slots(self) -> int:
        states = self.client.job_counts().states
        return states["starting"] + states["running"]

    def warm_up(self) -> None:
        """Run what makes the first jobs slow, and leave enough jobs to list, most of them cancelled."""
        (own,) = self.client.hosts()
        self.client.drain(own.name)
        for job in self.client.submit_many([SMALL | {"name": "listed", "steps": 20}] * LISTED):
            self.client.cancel(job.id)
        self.client.resume(own.name)
        for _ in range(WARM):
            self._ended(SMALL | {"name": "warm", "steps": 20})
        if cuda_devices(os.environ):
            self._ended(ON_GPU | {"name": "warm on the GPU", "steps": 2})


@contextmanager
def host(options: argparse.Namespace, *, weighed: bool) -> Iterator[Host]:
    """Start a service; ``weighed``: its CPU jobs make way, as by default."""
    slots = max(4, usable_cores())
    settings = {"TRIVET_CPU_SLOTS": str(slots), "TRIVET_LEASE_S": "120"}
    settings |= {} if weighed else {"TRIVET_CPU_NICENESS": "0"}
    with tempfile.TemporaryDirectory() as folder:
        service = Service(Path(folder) / "data", settings, threads=None if weighed else str(usable_cores()))
        service.start()
        say(f"service {'with' if weighed else 'without'} weights started")
        try:
            key = service.key_file.read_text().strip()
            with Client(f"http://127.0.0.1:{service.port}", key, timeout_s=PATIENCE_S) as client:
                yield Host(client, Api(service.port, key), slots, options)
        finally:
            service.stop()
            say("stopped")


def measured(options: argparse.Namespace, *, weighed: bool) -> tuple[Figures | None, Figures]:
    """Return the figures of an idle and of a busy host; of the latter alone in a service that is not ``weighed``."""
    with host(options, weighed=weighed) as here:
        here.warm_up()
        idle = here.figures(busy=False) if weighed else None
        here.fill()
        busy = here.figures(busy=True)
        say(f"{here.client.job_counts().states['queued']} still wait, load {os.getloadavg()[0]:.0f}")
        return idle, busy


def rows(idle: Figures, busy: Sequence[Figures]) -> Iterator[str]:
    """Yield the table: what an idle host gives, and each busy one with its part of that."""
    head = ["busy, not weighed", "busy"][-len(busy) :]
    yield f"| what | idle | {' | '.join(head)} |\n|---|--:|{'--:|' * len(busy)}"
    for what, figure in FIGURES.items():
        one = figure(idle)
        cells = [f"{figure(each):,.2f} ({figure(each) / one:.2f} ×)" for each in busy]
        yield f"| {what} | {one:,.2f} | {' | '.join(cells)} |"
    if idle.training_s is not None:
        times = [each.training_s or math.nan for each in busy]
        cells = [f"{each:.1f} ({each / idle.training_s:.2f} ×)" for each in times]
        yield f"| training on the GPU, s | {idle.training_s:.1f} | {' | '.join(cells)} |"


FIGURES: Mapping[str, Callable[[Figures], float]] = {
    "status reads a second": lambda each: each.status.per_s,
    "status read p99, ms": lambda each: each.status.p99_ms,
    "lists of 50 a second": lambda each: each.lists.per_s,
    "list p50, ms": lambda each: each.lists.p50_ms,
    "urgent job's first line, s": lambda each: statistics.median(each.first_line_s),
    "the same, worst": lambda each: max(each.first_line_s),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--waiting", type=int, default=500, help="jobs that still wait at the end")
    parser.add_argument("--spare", type=int, default=1000, help="further ones, which run meanwhile")
    parser.add_argument("--seconds", type=float, default=4.0, help="for which each kind of read is measured")
    parser.add_argument("--urgent", type=int, default=3, help="urgent jobs, one after the other")
    parser.add_argument("--steps", type=int, default=60, help="of the training on the GPU")
    parser.add_argument("--unweighed", action="store_true", help="measure then without weights and limits of threads")
    options = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    devices = ", ".join(cuda_devices(os.environ)) or "no GPU"
    print(f"{platform.machine()}, {usable_cores()} cores, {devices}, commit {commit.stdout.strip()}\n")
    idle, busy = measured(options, weighed=True)
    assert idle is not None
    print("\n".join(rows(idle, [busy])), flush=True)
    if options.unweighed:
        print("\n".join(rows(idle, [measured(options, weighed=False)[1], busy])), flush=True)


if __name__ == "__main__":
    main()
