"""A host that has a password of the broker, and means harm: what it writes there is no path for anybody else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import redis as redis_py
from network_broker import NetworkBroker, network_broker
from pydantic import SecretStr
from waiting import eventually
from worker_fleet import HOST, train_spec

from service.jobs.files import DataLayout
from service.jobs.records import Artifact, AttemptRef, NotFound
from service.jobs.settings import Settings
from service.jobs.store import Store
from service.jobs.store.artifacts import FOLDER
from service.jobs.store.keyspace import JOB, JOB_ARTIFACTS, JOBS_BY, SWEEP
from workers.agent.agent import Agent, AgentSettings

ELSEWHERE = "../../theirs"


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NetworkBroker]:
    with network_broker(tmp_path_factory.mktemp("deployed")) as running:
        yield running


@pytest.fixture
def hostile(deployed: NetworkBroker) -> Iterator[Any]:
    """A client with the password of one host, and nothing else."""
    deployed.admin.flushall()
    with redis_py.Redis.from_url(deployed.url("host-gpu.1"), decode_responses=True) as client:
        yield client


@pytest.fixture
def api(deployed: NetworkBroker, hostile: Any, data: DataLayout) -> Iterator[Store]:
    store = Store.connect(deployed.url("api"), data)
    yield store
    store.close()


@pytest.fixture
def theirs(data: DataLayout) -> Path:
    """A folder outside of the service's data, with a secret."""
    (data.root / "jobs").mkdir(parents=True)
    folder = data.root / "jobs" / ELSEWHERE
    folder.mkdir()
    (folder / "secret").write_text("x")
    return folder


def copy_record(hostile: Any, job_id: str, to: str, **fields: str) -> None:
    """Let there be a job of another id."""
    hostile.hset(JOB(to), mapping={**hostile.hgetall(JOB(job_id)), "id": to, **fields})


def test_the_api_serves_nothing_of_another_folder(hostile: Any, api: Store, theirs: Path) -> None:
    """Neither under an id that is a path, nor through a record that names one, nor by a manifest."""
    job, _ = api.jobs.submit(train_spec("mine"), "ada")
    entry = Artifact(name="theirs", bytes=1, sha256="", media_type=FOLDER, created_at=datetime.now(UTC))
    for job_id in ("../..", job.id):
        hostile.hset(JOB_ARTIFACTS(job_id), "theirs", entry.model_dump_json())
    copy_record(hostile, job.id, "../..")
    hostile.hset(JOB(job.id), "id", "../..")
    for job_id in ("../..", job.id):
        with pytest.raises(NotFound):
            api.jobs.get(job_id)
    with pytest.raises(NotFound):
        api.artifacts.open(job.id, "theirs")
    with pytest.raises(ValueError, match="is no job's id"):
        api.artifacts.open("../..", "theirs")


def test_nothing_is_deleted_but_folders_of_jobs(
    deployed: NetworkBroker, hostile: Any, api: Store, data: DataLayout, theirs: Path
) -> None:
    """Not by an agent that deletes what ended long ago, nor by the API with a sweep."""
    job, _ = api.jobs.submit(train_spec("mine"), "ada")
    ended = {"state": "failed", "ended_at": "0", "indexes": "[]"}
    copy_record(hostile, job.id, ELSEWHERE, **ended)
    hostile.zadd(JOBS_BY("state:failed"), {ELSEWHERE: 0})
    host = Store.connect(deployed.url("host"), data)
    assert host.jobs.expire(0.0) == ()
    hostile.hset(SWEEP(job.id), "total", 1)
    hostile.hset(JOB(job.id), mapping=ended)
    copy_record(hostile, job.id, ELSEWHERE, sweep=job.id)
    hostile.zadd(JOBS_BY(f"sweep:{job.id}"), {ELSEWHERE: 0})
    data.job(job.id).artifacts.mkdir(parents=True)
    api.jobs.delete(job.id)
    assert not hostile.exists(JOB(ELSEWHERE)), "the record is one of the sweep's, and goes with it"
    assert not data.job(job.id).root.exists()
    assert (theirs / "secret").exists()
    host.close()


@pytest.mark.parametrize(
    "ref",
    [AttemptRef(ELSEWHERE, 1, HOST), AttemptRef("job_" + "0" * 20, 1, ELSEWHERE), AttemptRef("job_1:2", 1, HOST)],
    ids=["a path for a job", "a path for a host", "no job"],
)
def test_a_message_starts_nothing_but_parts_of_jobs_on_its_host(
    deployed: NetworkBroker, hostile: Any, data: DataLayout, caplog: pytest.LogCaptureFixture, ref: AttemptRef
) -> None:
    settings = Settings(data=data.root, redis_url=SecretStr(deployed.url("host")), worker_name=HOST, warm_supervisors=0)
    agent = Agent(settings, AgentSettings(), ("/bin/cat",))  # which prints its orders
    agent.launch(ref)
    assert "which is not a part of a job on this host" in caplog.text
    agent.launch(AttemptRef("job_" + "0" * 20, 1, HOST))
    ordered = eventually((data.host(HOST) / "supervisors.log").read_text)
    assert [json.loads(order)["job_id"] for order in ordered.splitlines()] == ["job_" + "0" * 20]
