"""Runs a ``trivet up`` for a chaos run: finds processes by role, sends signals, and makes typed calls through
outages.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

import psutil
from api_process import free_port
from ending import end_by_signals

from trivet import Client, Refused, Unreachable
from workers.agent.launching import PROGRAM
from workers.supervisor.program import FORK_SERVER

Role = Literal[
    "up", "api", "agent", "broker", "supervisor", "fork server", "keeper", "launcher", "rank",
    "allocated host", "slurmctld", "slurmd", "raylet", "gcs_server", "ray job", "ray bundle",
]  # fmt: skip
Group = tuple[str, int]
"""Job id and attempt."""
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Processes:
    """The service's live processes at one moment. ``groups`` has those of each attempt by role."""

    by_role: Mapping[Role, list[psutil.Process]]
    groups: Mapping[Group, Mapping[Role, list[psutil.Process]]]


@dataclass
class Service:
    """Starts and ends ``trivet up`` on a data folder; ``settings`` are environment variables of it."""

    data: Path
    settings: Mapping[str, str]
    role_in_cluster: Callable[[psutil.Process], Role | None] = lambda _: None
    """Tells which part of the cluster that gives devices a process is."""
    threads: str | None = "1"
    """``OMP_NUM_THREADS`` of the ranks; the service's own choice with ``None``."""
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start, and return when it is ready. Raises ``RuntimeError`` when it does not get there.

        A signal that ends this process then raises ``SystemExit``, so that it can be stopped; until it is ready, it
        stops by itself.
        """
        end_by_signals()
        self.data.mkdir(parents=True, exist_ok=True)
        outer = {name: value for name, value in os.environ.items() if not name.startswith("TRIVET_")}
        own = {"TRIVET_DATA": str(self.data), "TRIVET_PORT": str(self.port)}
        outer.pop("OMP_NUM_THREADS", None)
        if self.threads is not None:
            own["OMP_NUM_THREADS"] = self.threads
        with (self.data / "up.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "trivet", "up"],
                env={**outer, **self.settings, **own},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise

    def _wait_until_ready(self) -> None:
        assert self.process is not None
        deadline = time.monotonic() + 120
        while not (self.key_file.exists() and self.client().is_ready()):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"trivet up did not start:\n{(self.data / 'up.log').read_text()}")
            time.sleep(0.2)

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(120)
            except subprocess.TimeoutExpired:
                self.process.kill()

    @property
    def key_file(self) -> Path:
        return self.data / "admin.key"

    def client(self) -> Client:
        return Client(f"http://127.0.0.1:{self.port}", self.key_file.read_text().strip(), timeout_s=10.0)

    def processes(self) -> Processes:
        """Find the service's processes: children of ``trivet up``, and by their environment those that outlive a
        parent.
        """
        assert self.process is not None
        by_role: dict[Role, list[psutil.Process]] = defaultdict(list)
        groups: dict[Group, dict[Role, list[psutil.Process]]] = {}
        with contextlib.suppress(psutil.NoSuchProcess):
            if self.process.poll() is None:
                by_role["up"].append(psutil.Process(self.process.pid))
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE and (role := self._role(process)) is not None:
                    by_role[role].append(process)
        for rank in by_role["rank"]:
            with contextlib.suppress(psutil.Error, KeyError):
                _enter(groups, rank)
        for agent in by_role["agent"]:
            with contextlib.suppress(psutil.Error):
                by_role["fork server"] += [each for each in agent.children() if FORK_SERVER in each.cmdline()]
        return Processes(by_role, groups)

    def _role(self, process: psutil.Process) -> Role | None:
        words = process.cmdline()
        role: Role | None = None
        if process.name() in ("valkey-server", "redis-server"):
            return "broker" if any(str(self.data) in word for word in words) else None
        if (part := self.role_in_cluster(process)) is not None:
            return part
        if words[1:3] == ["-m", "api"]:
            role = "api"
        elif words[1:] == ["-m", "workers"]:
            role = "agent"
        elif PROGRAM in words and "srun" not in words:  # its settings are in a file of the data folder
            return "allocated host" if any(word.startswith(str(self.data)) for word in words) else None
        elif "workers.rank" in words and "workers.launcher" not in words:
            role = "rank"
        return role if role is not None and process.environ().get("TRIVET_DATA") == str(self.data) else None


def _enter(groups: dict[Group, dict[Role, list[psutil.Process]]], rank: psutil.Process) -> None:
    """Put a rank, and the launcher, keeper and supervisor above it, into its group."""
    environment = rank.environ()
    group = groups.setdefault((environment["TRIVET_JOB"], int(environment["TRIVET_ATTEMPT"])), defaultdict(list))
    group["rank"].append(rank)
    for parent in rank.parents():
        words = parent.cmdline()
        role: Role | None = None
        if any(word.endswith("keeper.py") for word in words):
            role = "keeper"
        elif "workers.launcher" in words:
            role = "launcher"
        elif "workers.supervisor" in words and FORK_SERVER not in words:
            role = "supervisor"
        if role is not None and parent not in group[role]:
            group[role].append(parent)


def retry_until_answered(call: Callable[[], Answer]) -> Answer:
    """Call until there is an answer other than an outage. A refusal with a status below 500 is one, and is raised."""
    deadline = time.monotonic() + 180.0
    while True:
        try:
            return call()
        except (Unreachable, Refused) as error:
            if isinstance(error, Refused) and error.status < 500 and error.status != 429:
                raise
            if time.monotonic() > deadline:
                raise
        time.sleep(0.3)
