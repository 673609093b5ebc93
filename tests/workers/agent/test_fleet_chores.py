"""What hosts do for the fleet beside their jobs: chores, and heartbeats of allocations."""

from __future__ import annotations

import contextlib
import subprocess
import threading
from functools import partialmethod

import pytest
import redis as redis_py
from digits import digits_job
from pydantic import SecretStr
from waiting import eventually

from service.jobs.files import DataLayout
from service.jobs.host import SupervisorRegistry
from service.jobs.records import AllocatedDevices
from service.jobs.settings import Settings
from service.jobs.spec.train import TrainSpec
from service.jobs.store import HostReport, Store
from service.jobs.store.jobs import Jobs
from service.jobs.store.keyspace import JOB
from workers.agent.agent import Agent, AgentSettings
from workers.agent.allocated_part import _HostOfAllocation
from workers.launchers import AllocatedHost


@pytest.fixture
def settings(broker: str, redis: redis_py.Redis, data: DataLayout) -> Settings:
    return Settings(data=data.root, redis_url=SecretStr(broker), worker_name="alpha", heartbeat_s=1, warm_supervisors=0)


def test_hosts_of_allocations_make_no_chore_rarer(settings: Settings) -> None:
    with contextlib.closing(Store.connect(settings.broker_url, settings.layout)) as store:
        agent = Agent(settings, AgentSettings())
        for index in range(3):
            part = AllocatedDevices(launcher="slurm", id="1", job="job_1", pool="cpu", devices=1)
            store.hosts.beat(HostReport(f"slurm-1-{index}", "b", allocation=part))
        agent._beat()
        assert len(store.hosts.list()) == 4
        assert agent._fleet == 1
        agent._store.close()


def test_all_jobs_that_ended_long_ago_are_deleted_at_once(
    settings: Settings, redis: redis_py.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many more end in a day than one script deletes."""
    monkeypatch.setattr(Jobs, "expire", partialmethod(Jobs.expire, most=1))
    agent = Agent(settings.model_copy(update={"keep_jobs_days": 1.0}), AgentSettings())
    for _ in range(3):
        job, _ = agent._store.jobs.submit(TrainSpec.model_validate(digits_job()), "ann")
        agent._store.jobs.cancel(job.id)
        redis.hset(JOB(job.id), mapping={"created_at": 0, "ended_at": 0})
    agent._expire()
    assert agent._store.jobs.list().items == ()
    agent._store.close()


def test_a_heartbeat_outlives_an_unexpected_error(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [OSError("no space"), ValueError("odd")]

    def live(_: SupervisorRegistry) -> tuple[str, ...]:
        if failures:
            raise failures.pop()
        return ()

    monkeypatch.setattr(SupervisorRegistry, "live", live)
    supervisor = subprocess.Popen(["true"])
    here = AllocatedHost(allocation="1", index=0, count=1, pool="cpu", devices=1)
    host = _HostOfAllocation("slurm", here, settings, "job_1", supervisor)
    beats = threading.Thread(target=host._beat_forever, daemon=True)
    beats.start()
    try:
        eventually(host._store.hosts.list, 10)
    finally:
        host._left.set()
        beats.join()
        supervisor.wait()
        host._store.close()
