"""The whole service as a user starts it (`trivet up`): broker, API, worker; jobs go in and come out over HTTP."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import psutil
from local_service import part_of
from waiting import eventually

from service.jobs.spec.common import TERMINAL
from workers.supervisor.program import FORK_SERVER

LIMIT_S = 600.0
"""Seconds that a start, or a job, takes only if something is broken, on however busy a machine."""


@dataclass(frozen=True)
class Service:
    """A running service and an HTTP client that holds its admin key."""

    url: str
    data: Path
    process: subprocess.Popen[bytes]
    http: httpx2.Client

    def submit(self, spec: dict[str, Any]) -> dict[str, Any]:
        answer = self.http.post("/v1/jobs", json=spec)
        assert answer.status_code == 201, answer.text
        return dict(answer.json())

    def job(self, job_id: str) -> dict[str, Any]:
        return dict(self.http.get(f"/v1/jobs/{job_id}").raise_for_status().json())

    def wait(self, job_id: str, until: Callable[[dict[str, Any]], bool] | None = None) -> dict[str, Any]:
        """The job once ``until`` holds, by default once it has ended."""
        holds = until or (lambda job: job["state"] in TERMINAL)
        return eventually(lambda: job if holds(job := self.job(job_id)) else None, LIMIT_S)


def can_fork(service: Service) -> bool:
    """Whether the worker has a process that has imported everything, from which it forks those of jobs: just before it
    says so, that process ignores the ends of its children."""
    for process in part_of(service.process, "workers").children():
        with contextlib.suppress(psutil.NoSuchProcess, OSError):
            if FORK_SERVER in process.cmdline():
                status = Path(f"/proc/{process.pid}/status").read_text()
                ignored = int(re.findall(r"SigIgn:\s*(\w+)", status)[0], 16)
                return bool(ignored >> (signal.SIGCHLD - 1) & 1)
    return False


def start(data: Path, **variables: str) -> Service:
    """Start ``trivet up`` on ``data``, with these environment variables, and return when it takes jobs."""
    environment = {**os.environ, "TRIVET_DATA": str(data), "TRIVET_PORT": "0", "TRIVET_CPU_SLOTS": "4"}
    # What jobs are forked from imports all that any kind needs, which is more than the few jobs of a test do.
    environment |= {"TRIVET_WARM_SUPERVISORS": "0", "CUDA_VISIBLE_DEVICES": "", **variables}  # the same on every host
    environment.pop("TRIVET_REDIS_URL", None)
    with (data.parent / "up.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "trivet", "up"], env=environment, stdout=log, stderr=log, start_new_session=True
        )

    def announced() -> str | None:
        assert process.poll() is None, f"trivet up ended: {said(data)}"
        return _announced(said(data), data)

    url = eventually(announced, LIMIT_S)
    key = (data / "admin.key").read_text().strip()
    http = httpx2.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=120.0)
    eventually(lambda: _has_host(http), LIMIT_S)
    return Service(url, data, process, http)


def said(data: Path) -> str:
    """All that ``trivet up`` on ``data`` has printed."""
    return (data.parent / "up.log").read_text(errors="replace")


def stop(service: Service) -> None:
    service.http.close()
    service.process.send_signal(signal.SIGTERM)
    try:
        service.process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(service.process.pid, signal.SIGKILL)
        raise


def _announced(text: str, data: Path) -> str | None:
    """The address, once it is said that the service takes requests."""
    found = re.search(r"http://\S+", text)
    return found[0] if found and "Ctrl-C" in text and (data / "admin.key").exists() else None


def _has_host(http: httpx2.Client) -> bool:
    """Whether a host is alive."""
    try:
        answer = http.get("/v1/hosts")
    except httpx2.TransportError:
        return False
    return answer.status_code == 200 and any(host["alive"] for host in answer.json()["items"])
