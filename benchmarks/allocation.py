"""Measures how soon a job runs after Slurm's allocation: to the supervisor, its claim and the first step.

    python benchmarks/allocation.py [--jobs 10]

A service and a Slurm cluster of two idle nodes are started here, and jobs of one rank are submitted one by one.
*allocated* is when ``slurmctld`` writes to its log that the job has its node; *host*, *supervisor* are the starts of
these processes as the kernel has them, *running* is the claim of the supervisor, *first step* the first training step.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import psutil
from chaos_clusters import SlurmCluster
from chaos_service import Service
from small_jobs import small_job

from trivet import Client
from workers.agent.launching import PROGRAM

MOMENTS = ("host", "supervisor", "running", "first step")
PATIENCE_S = 240.0
SPEC = small_job(10**6)
T = TypeVar("T")


def until(found: Callable[[], T | None]) -> T:
    """Return the first result, within a limit that only a broken service reaches."""
    deadline = time.monotonic() + PATIENCE_S
    while (result := found()) is None:
        if time.monotonic() > deadline:
            raise TimeoutError("the job did not get there")
        time.sleep(0.1)
    return result


def started_at(process: psutil.Process) -> float:
    """Return when a process was started, in seconds of the epoch, to a tick of the kernel's."""
    ticks = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def allocated_at(log: Path, number: str) -> float:
    """Return when ``slurmctld`` gave a job its node, in seconds of the epoch."""
    line = re.search(rf"^\[(\S+)\] sched.*(?:Allocate|Started) JobId={number} ", log.read_text(), re.MULTILINE)
    assert line is not None, f"slurmctld says nothing of {number}"
    return datetime.fromisoformat(line[1]).astimezone().timestamp()


def host_of(job_id: str) -> psutil.Process:
    for process in psutil.process_iter(["cmdline"]):  # none of a process that has ended
        words = process.info["cmdline"] or []
        if PROGRAM in words and job_id in words and "srun" not in words:
            return process
    raise RuntimeError(f"no host of {job_id}")


def first(client: Client, job_id: str, **fields: Any) -> float | None:
    """Return the time of the first event with these fields, if there is one."""
    items = client.events(job_id, types=[fields["type"]], limit=100)["items"]
    return next((event["time"] for event in items if fields.items() <= event.items()), None)


def one(client: Client, log: Path) -> dict[str, float]:
    """Run a job to its first step; return the seconds from its allocation to each moment."""
    job = client.submit(SPEC)
    stepped = until(lambda: first(client, job.id, type="metric"))
    running = first(client, job.id, type="state", state="running")
    assert running is not None
    host = host_of(job.id)
    (supervisor,) = (child for child in host.children() if "workers.supervisor" in child.cmdline())
    number = host.environ()["SLURM_JOB_ID"]
    moments = zip(MOMENTS, (started_at(host), started_at(supervisor), running, stepped), strict=True)
    allocated = allocated_at(log, number)
    client.cancel(job.id)
    until(lambda: client.job(job.id).ended_at)
    return {name: at - allocated for name, at in moments}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=10)
    jobs = parser.parse_args().jobs
    with tempfile.TemporaryDirectory(prefix="trivet-slurm-") as name:
        cluster = SlurmCluster(Path(name).resolve())
        service = Service(Path(name).resolve() / "data", {"TRIVET_CPU_SLOTS": "0", **cluster.start()})
        try:
            service.start()
            found = [one(service.client(), cluster.folder / "slurmctld.log") for _ in range(jobs)]
        finally:
            service.stop()
            cluster.stop()
    print(f"{jobs} jobs, seconds from Slurm's allocation: median (least-most); load {os.getloadavg()[0]:.1f}")
    for moment in MOMENTS:
        seconds = [each[moment] for each in found]
        print(f"| {moment} | {statistics.median(seconds):.2f} ({min(seconds):.2f}-{max(seconds):.2f}) |")


if __name__ == "__main__":
    main()
