"""What hosts do for the fleet beside their jobs: chores, and heartbeats of allocations."""

from __future__ import annotations

import contextlib

import pytest
import redis as redis_py
from pydantic import SecretStr

from service.jobs.files import DataLayout
from service.jobs.records import AllocatedDevices
from service.jobs.settings import Settings
from service.jobs.store import HostReport, Store
from workers.agent.agent import Agent, AgentSettings


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
