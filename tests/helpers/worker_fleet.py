"""A fleet of one host against a real broker, for tests whose ranks are real torchrun groups."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis as redis_py
from digits import digits_job
from launching import RankServers
from supervising import Supervisor, start_supervisor
from waiting import LIMIT_S, eventually

from service.jobs.files import DataLayout
from service.jobs.host import SupervisorRegistry
from service.jobs.host.embedded_broker import EmbeddedBroker
from service.jobs.plugins import CommonSpec
from service.jobs.records import AttemptRef, Job
from service.jobs.spec.train import TrainSpec
from service.jobs.store import HostReport, Store, StoreLimits
from service.jobs.store.keyspace import LEASES
from workers.supervisor.job_policy import JobPolicy
from workers.supervisor.settings import SupervisorOrder

SUPERVISOR = (sys.executable, str(Path(__file__).with_name("fake_supervisor.py")))
REAL_SUPERVISOR = (sys.executable, "-m", "workers.supervisor")
"""Its ranks do what the job's kind says."""
HOST = "alpha"


def train_spec(name: str, ranks: int = 1, **fields: Any) -> TrainSpec:
    return TrainSpec.model_validate({**digits_job(64, name=name, parallel={"dp_shard": ranks}, device="cpu"), **fields})


class Worker:
    """An agent process that can be ended and started again."""

    def __init__(self, fleet: Fleet, log: Path, **variables: str) -> None:
        """``variables`` are further ones of its environment."""
        self._log = log
        self._environment = os.environ | {
            "TRIVET_DATA": str(fleet.data.root),
            "TRIVET_REDIS_URL": fleet.url,
            "TRIVET_WORKER_NAME": HOST,
            "TRIVET_CPU_SLOTS": "4",
            "CUDA_VISIBLE_DEVICES": "",
            "TRIVET_LEASE_S": str(fleet.limits.lease_s),
            "TRIVET_HEARTBEAT_S": "2",
            "TRIVET_WARM_SUPERVISORS": "0",  # imports take more than the few jobs of a test
            **variables,
        }
        self.start()

    def start(self) -> None:
        program = str(Path(__file__).with_name("fake_agent.py"))
        with self._log.open("ab") as log:
            self.process = subprocess.Popen([sys.executable, program], env=self._environment, stdout=log, stderr=log)

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(LIMIT_S)

    def said(self) -> str:
        return self._log.read_text()


@dataclass
class Fleet:
    """What a test needs: a store, a host with room, and supervisors started by hand."""

    store: Store
    data: DataLayout
    url: str
    limits: StoreLimits
    servers: RankServers
    slots: int = 4
    """CPU slots of each host."""
    processes: list[Supervisor] = field(default_factory=list)

    def close(self) -> None:
        """End what a failed test left, and clear away the scratch folders of supervisors that were killed."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        registry = SupervisorRegistry(self.data.host(HOST))
        eventually(lambda: registry.live() == ())
        self.store.close()

    def beat(self, host: str = HOST, live: tuple[str, ...] = ()) -> tuple[AttemptRef, ...]:
        return self.store.hosts.beat(HostReport(host, "127.0.0.1", cpu_slots=self.slots, live=live)).kill

    def submit(self, name: str, ranks: int = 1, **fields: Any) -> AttemptRef:
        """A job that is placed here."""
        return self.place(train_spec(name, ranks, **fields))

    def place(self, spec: CommonSpec) -> AttemptRef:
        """A job of any kind that is placed here."""
        self.beat()
        job, _ = self.store.jobs.submit(spec, "tester")
        assert self.store.attempts.place() == [job.id]
        return AttemptRef(job.id, 1, HOST)

    def supervise(
        self,
        ref: AttemptRef,
        grace_s: float = 10.0,
        command: Sequence[str] = SUPERVISOR,
        address: str = "127.0.0.1",
        policy: JobPolicy | None = None,
    ) -> Supervisor:
        process = start_supervisor(command, self.servers)
        self.processes.append(process)
        assert process.stdin is not None
        with process.stdin as pipe:
            pipe.write(self.order(ref, grace_s, address, policy).to_line())
        return process

    def order(
        self, ref: AttemptRef, grace_s: float = 10.0, address: str = "127.0.0.1", policy: JobPolicy | None = None
    ) -> SupervisorOrder:
        """What a worker would tell a supervisor of the part."""
        return SupervisorOrder(
            job_id=ref.job_id,
            attempt=ref.attempt,
            host=ref.host,
            address=address,
            broker_url=self.url,
            data=str(self.data.root),
            stop_grace_s=grace_s,
            limits=self.limits,
            policy=policy or JobPolicy(),
        )

    def expire_lease(self, ref: AttemptRef) -> None:
        """End the lease of a claimed part at the store, now."""
        self.store.client.call("ZADD", LEASES(), "XX", 1, f"{ref.job_id}:{ref.attempt}:{ref.host}")

    def job(self, ref: AttemptRef) -> Job:
        return self.store.jobs.get(ref.job_id)

    def ended(self, ref: AttemptRef) -> Job:
        """The job, once it is terminal."""
        return eventually(lambda: job if (job := self.job(ref)).ended_at is not None else None)

    def expect_every_step(self, ref: AttemptRef) -> None:
        """The job succeeds in its first attempt, and each of its steps has been told."""
        job = self.ended(ref)
        assert (job.state, job.attempt) == ("succeeded", 1)
        assert job.result is not None
        assert {event["step"] for event in self.events(ref, "metric")} == set(range(1, job.result["steps"] + 1))

    def events(self, ref: AttemptRef, *types: str) -> list[dict[str, Any]]:
        page = self.store.events.page(ref.job_id, after="0-0", types=set(types) or None, limit=10_000)
        return [item.event for item in page.items]

    def printed(self, ref: AttemptRef, text: str) -> bool:
        return any(text in event["line"] for event in self.events(ref, "log"))


SHORT_LEASES = StoreLimits(lease_s=20.0)
"""For tests that wait for the end of a lease, which no supervisor loses before for want of a core, or for its renewal,
by which a supervisor learns of an order."""


@pytest.fixture
def limits() -> StoreLimits:
    """Leases that no supervisor loses for want of a core."""
    return StoreLimits(lease_s=60.0)


@pytest.fixture
def fleet(
    broker: str, redis: redis_py.Redis, data: DataLayout, limits: StoreLimits, rank_servers: RankServers
) -> Iterator[Fleet]:
    fleet = Fleet(Store.connect(broker, data, limits), data, broker, limits, rank_servers)
    yield fleet
    fleet.close()


class MortalBroker:
    """A broker of this test's own, at the same address after every start."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.server = EmbeddedBroker.start(folder)

    def down(self) -> None:
        self.server.stop()

    def up(self) -> None:
        self.server = EmbeddedBroker.start(self._folder)

    def restart(self) -> None:
        """Kill it, and start it again with what it has on disk."""
        self.server.process.kill()
        self.server.process.wait(LIMIT_S)
        self.server.restart()

    @contextmanager
    def away(self) -> Iterator[None]:
        """It is down meanwhile."""
        self.down()
        try:
            yield
        finally:
            self.up()

    @contextmanager
    def hanging(self) -> Iterator[None]:
        """It takes connections meanwhile, and answers none."""
        self.server.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.server.process.send_signal(signal.SIGCONT)


@pytest.fixture
def mortal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MortalBroker]:
    broker = MortalBroker(tmp_path_factory.mktemp("mortal"))
    yield broker
    broker.down()


@pytest.fixture
def outage(mortal: MortalBroker, data: DataLayout, limits: StoreLimits, rank_servers: RankServers) -> Iterator[Fleet]:
    store = Store.connect(mortal.server.url, data, limits)
    fleet = Fleet(store, data, mortal.server.url, limits, rank_servers)
    yield fleet
    fleet.close()


def supervisors_on_host(fleet: Fleet) -> list[psutil.Process]:
    """Those that are entered on the fleet's host and run."""
    found = []
    for _, entry in SupervisorRegistry(fleet.data.host(HOST))._entries():
        with contextlib.suppress(psutil.NoSuchProcess):
            if entry.supervisor.alive:
                found.append(psutil.Process(entry.supervisor.pid))
    return found


def rank_process(ref: AttemptRef, rank: int) -> psutil.Process:
    """The process of a rank, once it is there."""

    def look() -> psutil.Process | None:
        for process in processes_of(ref):
            with contextlib.suppress(psutil.NoSuchProcess):
                parent = process.parent()
                if process.environ().get("RANK") == str(rank) and parent and "RANK" not in parent.environ():
                    return process
        return None

    return eventually(look)


def processes_of(ref: AttemptRef) -> list[psutil.Process]:
    """Every process that was born with the job's id in its environment: ranks, and all that they started."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != "zombie" and process.environ().get("TRIVET_JOB") == ref.job_id:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def family(process: Supervisor) -> list[psutil.Process]:
    """A supervisor's keeper, launcher, ranks and what they started, as of now; none once it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(process.pid).children(recursive=True)
    return []


def is_gone(process: psutil.Process) -> bool:
    """Whether it has ended, its parent's notice aside."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def all_gone(processes: list[psutil.Process]) -> bool:
    return all(map(is_gone, processes))


def is_called(process: psutil.Process, name: str) -> bool:
    """Whether the process, if it still is one, runs a program of this name."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.name() == name
    return False
