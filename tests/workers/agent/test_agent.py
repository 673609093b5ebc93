"""The worker of a host: real Celery on a real broker, real supervisors."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from waiting import eventually
from worker_fleet import HOST, Fleet, Worker, processes_of, supervisors_on_host, train_spec

from service.jobs.records import AttemptRef
from service.jobs.spec.families.packaged import versions_here
from workers.agent.celery_app import Dispatcher, create_app

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture
def worker(fleet: Fleet, tmp_path: Path) -> Iterator[Worker]:
    worker = Worker(fleet, tmp_path / "agent.log")
    yield worker
    if worker.process.poll() is None:
        worker.end(signal.SIGKILL)


def submit(fleet: Fleet, name: str) -> AttemptRef:
    job, _ = fleet.store.jobs.submit(train_spec(name), "tester")
    return AttemptRef(job.id, 1, HOST)


def release(fleet: Fleet, ref: AttemptRef) -> None:
    (fleet.data.job(ref.job_id).root / "go").touch()


def test_restarting_the_worker_touches_no_running_job_and_c10_undoes_no_drain(fleet: Fleet, worker: Worker) -> None:
    """However it ended."""
    ref = submit(fleet, "until_told")
    eventually(lambda: fleet.events(ref, "metric"))
    fleet.store.hosts.drain(HOST)
    before = {process.pid for process in processes_of(ref)}
    for how in (signal.SIGKILL, signal.SIGTERM):
        worker.end(how)
        seen_at = fleet.store.hosts.list()[0].seen_at
        worker.start()
        host = eventually(
            lambda seen_at=seen_at: (now := fleet.store.hosts.list()[0]).alive and now.seen_at != seen_at and now
        )
        assert host.draining
        reached = max(event["step"] for event in fleet.events(ref, "metric"))
        eventually(lambda reached=reached: max(event["step"] for event in fleet.events(ref, "metric")) > reached + 10)
        assert {process.pid for process in processes_of(ref)} == before
    follower = submit(fleet, "nothing")
    assert fleet.store.attempts.place() == []
    release(fleet, ref)
    job = fleet.ended(ref)
    assert (job.state, job.attempt) == ("succeeded", 1)
    assert [event["state"] for event in fleet.events(ref, "state")] == ["queued", "starting", "running", "succeeded"]
    assert fleet.job(follower).state == "queued"
    fleet.store.hosts.resume(HOST)
    assert fleet.ended(follower).state == "succeeded"


def test_a_worker_that_stops_its_jobs_gives_them_back_to_the_queue(fleet: Fleet, tmp_path: Path) -> None:
    """As a container does, whose end would kill them: no retry and no lost attempt is used."""
    worker = Worker(fleet, tmp_path / "agent.log", TRIVET_STOP_JOBS="true", TRIVET_STOP_GRACE_S="3")
    ref = submit(fleet, "until_told")
    eventually(lambda: fleet.events(ref, "metric"))
    assert worker.end() == 0, worker.said()
    job = fleet.job(ref)
    assert job.state == "queued"
    assert "the service on its host stopped; queued again;" in (job.reason or ""), "a lost attempt says more of retries"
    assert processes_of(ref) == []
    assert fleet.store.hosts.list() == []
    worker.start()
    eventually(lambda: fleet.job(ref).state == "running")
    release(fleet, ref)
    assert (fleet.ended(ref).state, fleet.job(ref).attempt) == ("succeeded", 2)
    worker.end()


def test_a_worker_tells_what_its_host_has_ends_what_is_not_current_and_leaves_no_process(
    fleet: Fleet, tmp_path: Path
) -> None:
    """Nor the one from which it forks. A launch message that comes again changes nothing. A supervisor that is stopped
    cannot notice that it lost its lease: its worker ends it.
    """
    worker = Worker(fleet, tmp_path / "agent.log", TRIVET_WARM_SUPERVISORS="1")
    (host,) = eventually(fleet.store.hosts.list)
    assert (host.name, host.cpu_slots, host.free["cpu"]) == (HOST, 4, (0, 1, 2, 3))
    assert host.versions.keys() == {"trivet", "torch", "python", *versions_here()}
    ref = submit(fleet, "endless")
    eventually(lambda: fleet.printed(ref, "working"))
    (supervisor,) = supervisors_on_host(fleet)
    dispatcher = Dispatcher(create_app(fleet.url))
    for _ in range(3):
        dispatcher.send(ref)
    follower = submit(fleet, "nothing")
    assert fleet.ended(follower).state == "succeeded"
    assert [event["state"] for event in fleet.events(ref, "state")] == ["queued", "starting", "running"]
    eventually(lambda: supervisors_on_host(fleet) == [supervisor])
    supervisor.suspend()
    fleet.expire_lease(ref)
    eventually(lambda: fleet.job(ref).attempt == 2)
    fleet.store.jobs.cancel(ref.job_id)
    assert fleet.ended(ref).state == "cancelled"
    eventually(lambda: processes_of(ref) == [])
    eventually(lambda: fleet.store.hosts.list()[0].free["cpu"] == (0, 1, 2, 3))
    below = psutil.Process(worker.process.pid).children(recursive=True)
    assert worker.end() == 0, worker.said()
    eventually(lambda: not any(process.is_running() for process in below))
    assert fleet.store.hosts.list() == []
