"""What hosts do for the fleet beside their jobs: chores, and heartbeats of allocations."""

from __future__ import annotations

import contextlib
import subprocess
import threading

import pytest
import redis as redis_py
from pydantic import SecretStr
from waiting import eventually

from service.jobs.files import DataLayout
from service.jobs.host import SupervisorRegistry
from service.jobs.records import AllocatedDevices
from service.jobs.settings import Settings
from service.jobs.store import HostReport, Store
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
