"""How attempts end: real supervisors, real torchrun groups on gloo."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path

import pytest
from waiting import LIMIT_S, eventually
from worker_fleet import SHORT_LEASES, Fleet, all_gone, family, is_called, processes_of, rank_process

from service.jobs.events.packed import PACKED, open_record, record_sizes
from service.jobs.files import Folder
from service.jobs.store import StoreLimits
from service.jobs.store.keyspace import JOB
from workers.launcher.confinement import JobLimits
from workers.supervisor.job_policy import JobPolicy

pytestmark = pytest.mark.distributed

each_renewal_soon = pytest.mark.parametrize("limits", [SHORT_LEASES], ids=["renewed often"])
"""A supervisor learns of an order when it renews its lease."""


@pytest.mark.slow
def test_two_ranks_succeed(fleet: Fleet) -> None:
    ref = fleet.submit("succeed", ranks=2)
    fleet.supervise(ref)
    job = fleet.ended(ref)
    assert (job.state, job.error) == ("succeeded", None)
    assert job.result == {"total": 3.0}
    assert job.progress is not None
    assert job.progress.done == 1
    logs = {(event["rank"], event["stream"], event["line"]) for event in fleet.events(ref, "log")}
    assert {
        (0, "stdout", "rank 0 says hello"),
        (1, "stdout", "rank 1 says hello"),
        (1, "stderr", "and complains"),
    } <= logs
    assert {event["rank"] for event in fleet.events(ref, "metric")} == {0, 1}
    folder = fleet.data.job(ref.job_id).attempt(1)
    eventually((folder / PACKED).exists)  # after its end was reported
    with Folder.open(folder) as attempt:
        record = {name: open_record(attempt, name).read().decode() for name in record_sizes(attempt)}
    assert "rank 1 says hello" in record["log.rank-1.jsonl"]
    artifacts = {artifact.name: artifact for artifact in fleet.store.artifacts.list(ref.job_id)}
    assert artifacts["model.bin"].sha256 == hashlib.sha256(b"weights").hexdigest()
    assert (artifacts["checkpoints/step_1"].bytes, artifacts["checkpoints/step_1"].sha256) == (2, "")
    own, ranks = (
        {json.loads(line)["type"] for name in names for line in record[name].splitlines()}
        for names in (["events.jsonl"], ["events.rank-0.jsonl", "events.rank-1.jsonl"])
    )
    assert "artifact" in own
    assert ranks == {"metric", "progress", "phase", "span", "artifact"}
    assert [phase.name for phase in job.phases] == ["starting", "importing", "loading", "working", "ending"]
    assert job.ended_at is not None
    spent = [phase.seconds or 0.0 for phase in job.phases]
    assert sum(spent) == pytest.approx((job.ended_at - job.phases[0].began_at).total_seconds(), abs=0.05)
    assert fleet.store.hosts.list()[0].free["cpu"] == (0, 1, 2, 3)


def test_ranks_see_their_devices_and_no_secrets(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = {"TRIVET_REDIS_URL": "redis://:hush@nowhere", "MY_API_KEY": "hush", "HF_TOKEN": "hush"}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    ref = fleet.submit("environment")
    fleet.supervise(ref)
    result = fleet.ended(ref).result
    assert result is not None
    environment = result["environment"]
    assert "hush" not in json.dumps(environment)
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    assert int(environment["OMP_NUM_THREADS"]) >= 1
    assert result["folder"] == str(fleet.data.job(ref.job_id).work(1))


def test_ranks_on_cpu_slots_have_less_weight_than_the_service(fleet: Fleet) -> None:
    ref = fleet.submit("endless")
    supervisor = fleet.supervise(ref, policy=JobPolicy(limits=JobLimits(niceness=3)))
    rank = rank_process(ref, 0)
    expected = min(19, os.getpriority(os.PRIO_PROCESS, supervisor.pid) + 3)
    eventually(lambda: rank.nice() == expected)
    session = Path(f"/proc/{rank.pid}/autogroup")
    if session.exists() and session.read_text():
        eventually(lambda: session.read_text().endswith(f"nice {expected}\n"))
    fleet.store.jobs.cancel(ref.job_id)
    fleet.ended(ref)


def test_a_raising_rank_is_named_and_its_peers_are_gone(fleet: Fleet) -> None:
    ref = fleet.submit("raising", ranks=2)
    supervisor = fleet.supervise(ref)
    job = fleet.ended(ref)
    assert processes_of(ref) == []
    assert job.state == "failed"
    assert job.error is not None
    assert (job.error.type, job.error.message, job.error.rank) == ("ValueError", "the loss is not a number", 1)
    assert job.error.traceback_artifact == "errors/attempt-1-rank-1.txt"
    traceback = fleet.store.artifacts.read(ref.job_id, job.error.traceback_artifact, 1 << 20)
    assert b'raise ValueError("the loss is not a number")' in traceback
    assert next(event["error"] for event in fleet.events(ref, "error")) == "ValueError"
    assert supervisor.wait(LIMIT_S) == 0


def test_a_result_that_is_too_large_fails_the_rank_which_says_so(fleet: Fleet) -> None:
    ref = fleet.submit("overflowing")
    fleet.supervise(ref)
    job = fleet.ended(ref)
    assert job.error is not None
    assert (job.state, job.error.type, job.result) == ("failed", "ValueError", None)
    assert re.match(r"the result has 10486\d\d bytes, and a job's record holds 1048576", job.error.message)


@pytest.mark.parametrize("limits", [StoreLimits(lease_s=60.0, max_job_artifacts=2)])
def test_artifacts_that_are_too_many_are_not_taken_and_leave_nothing(fleet: Fleet) -> None:
    ref = fleet.submit("flooding")
    fleet.supervise(ref)
    assert fleet.ended(ref).state == "succeeded"
    kept = fleet.store.artifacts.list(ref.job_id)
    assert [artifact.name for artifact in kept] == ["0.txt", "1.txt"]
    assert {path.name for path in fleet.data.job(ref.job_id).published.iterdir()} == {each.sha256 for each in kept}
    first, last = (event["line"] for event in fleet.events(ref, "log"))
    assert re.match(r"artifact '2.txt' was not taken: the job has 2 artifacts, the most that are allowed", first)
    assert last.startswith("4 artifacts were not taken")


@pytest.mark.slow
def test_a_job_that_is_refused_by_its_rank_says_so_in_a_line(fleet: Fleet) -> None:
    ref = fleet.submit("refusing")
    supervisor = fleet.supervise(ref)
    error = fleet.ended(ref).error
    assert error is not None
    assert (error.type, error.message) == ("RefusedError", "model.onnx: no rule for ONNX Det")
    assert error.traceback_artifact is None
    assert [event["line"] for event in fleet.events(ref, "log")] == ["refused: model.onnx: no rule for ONNX Det"]
    assert supervisor.wait(LIMIT_S) == 0


@pytest.mark.parametrize(
    ("behaviour", "rank", "how"),
    [("vanishing", 1, "exited with code 3"), pytest.param("leaving", 0, "ended before", marks=pytest.mark.slow)],
)
def test_a_rank_that_dies_without_a_word(fleet: Fleet, behaviour: str, rank: int, how: str) -> None:
    ref = fleet.submit(behaviour, ranks=2)
    fleet.supervise(ref)
    job = fleet.ended(ref)
    assert processes_of(ref) == []
    assert job.error is not None
    assert (job.state, job.error.type, job.error.rank) == ("failed", "RankDied", rank)
    assert how in job.error.message
    if behaviour != "leaving":
        assert f"rank {rank} met the others" in job.error.message


def test_the_time_limit(fleet: Fleet) -> None:
    ref = fleet.submit("stubborn", timeout_s=2.5)
    supervisor = fleet.supervise(ref, grace_s=0.5)
    job = fleet.ended(ref)
    assert job.error is not None
    assert (job.state, job.error.type) == ("failed", "TimeoutExceeded")
    assert "timeout_s = 2.5" in job.error.message
    assert processes_of(ref) == []
    assert supervisor.wait(LIMIT_S) == 0


@pytest.mark.slow
@each_renewal_soon
def test_cancel_lets_ranks_save_and_leaves_no_process(fleet: Fleet) -> None:
    ref = fleet.submit("endless", ranks=2)
    supervisor = fleet.supervise(ref)
    eventually(lambda: fleet.printed(ref, "working"))
    eventually(lambda: any(is_called(process, "sleep") for process in family(supervisor)))
    started = family(supervisor)
    fleet.store.jobs.cancel(ref.job_id)
    assert fleet.ended(ref).state == "cancelled"
    assert all_gone(started)
    names = {artifact.name for artifact in fleet.store.artifacts.list(ref.job_id)}
    assert names == {"checkpoint-0.txt", "checkpoint-1.txt"}
    assert supervisor.wait(LIMIT_S) == 0


@pytest.mark.slow
@each_renewal_soon
def test_cancel_before_the_ranks_are_up(fleet: Fleet) -> None:
    ref = fleet.submit("endless")
    supervisor = fleet.supervise(ref)
    eventually(lambda: fleet.job(ref).state == "running")
    started = family(supervisor)
    fleet.store.jobs.cancel(ref.job_id)
    assert fleet.ended(ref).state == "cancelled"
    assert all_gone(started)


def test_cancel_before_the_claim_leaves_nothing_to_do(fleet: Fleet) -> None:
    ref = fleet.submit("endless")
    fleet.store.jobs.cancel(ref.job_id)
    supervisor = fleet.supervise(ref)
    assert supervisor.wait(LIMIT_S) == 0
    assert fleet.job(ref).state == "cancelled"
    assert not fleet.data.job(ref.job_id).attempt(1).exists()


@pytest.mark.slow
def test_a_second_supervisor_of_the_same_part_steps_back(fleet: Fleet) -> None:
    ref = fleet.submit("until_told")
    first = fleet.supervise(ref)
    eventually(lambda: fleet.events(ref, "metric"))
    second = fleet.supervise(ref)
    assert second.wait(LIMIT_S) == 0
    assert first.poll() is None
    (fleet.data.job(ref.job_id).root / "go").touch()
    assert fleet.ended(ref).state == "succeeded"
    assert {event["attempt"] for event in fleet.events(ref, "state")} <= {0, 1}


@pytest.mark.slow
def test_a_spec_that_only_the_api_understands_fails_the_job_and_frees_its_devices(fleet: Fleet) -> None:
    ref = fleet.submit("succeed")
    family = '"family":"mlp"'
    spec = fleet.store.client.call("HGET", JOB(ref.job_id), "spec")
    assert family in spec
    fleet.store.client.call("HSET", JOB(ref.job_id), "spec", spec.replace(family, '"family":"gone"'))
    assert fleet.supervise(ref).wait(LIMIT_S) == 0
    job = fleet.ended(ref)
    assert job.error is not None
    assert (job.state, job.error.type) == ("failed", "UnknownSpec")
    assert "gone" in job.error.message
    assert "install the same packages" in job.error.message
    assert fleet.store.hosts.list()[0].free["cpu"] == (0, 1, 2, 3)


def test_a_gang_over_two_hosts(fleet: Fleet) -> None:
    fleet.slots = 1
    fleet.beat("beta")
    ref = fleet.submit("succeed", ranks=2, max_hosts=2)
    shares = fleet.job(ref).placement
    assert sorted(share.host for share in shares) == ["alpha", "beta"]
    for share in shares:
        fleet.supervise(type(ref)(ref.job_id, 1, share.host))
    job = fleet.ended(ref)
    assert (job.state, job.result) == ("succeeded", {"total": 3.0})
    assert {event["rank"] for event in fleet.events(ref, "metric")} == {0, 1}
