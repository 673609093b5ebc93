"""A service that has been up for a while: its jobs are forks of a process that waits for work. Each may generate code,
none runs what was imported before a package of the operator's changed; and a real training makes room for a more
important job, goes on from its checkpoint, and ends as if it had not.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from digits import digits_job
from running_service import LIMIT_S, Service, can_fork, start, stop
from waiting import eventually

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

DECLARED = """
from typing import Literal
from service.jobs.plugins import CommonSpec, JobKind

class {name}Spec(CommonSpec):
    kind: Literal["{name}"] = "{name}"

KIND = JobKind({name}Spec, "{name}_runner:run", preloads=("{name}_runner",))
"""
RUNS = """
import os, sys, threading
{first}
VALUE = {value}
PROCESS = os.getpid()

def run(spec, context):
    found = {{"value": VALUE, "forked": "service.training.job" in sys.modules, "own": PROCESS == os.getpid()}}
    return {{**found, "threads": threading.active_count(), "completed": {{"done": 1, "total": 1, "unit": "runs"}}}}
"""
STARTS_A_THREAD = "threading.Thread(target=threading.Event().wait, daemon=True).start()"


def write(folder: Path, name: str, value: int, first: str = "") -> None:
    (folder / f"{name}_declared.py").write_text(DECLARED.format(name=name))
    (folder / f"{name}_runner.py").write_text(RUNS.format(value=value, first=first))


CHECK = {
    "kind": "compile",
    "model": {"family": "mlp", "in_features": 8, "hidden": [8], "out_features": 2},
    "modes": ["eager", "inductor"],
    "phases": ["inference"],
    "shapes": [4],
}


TRAIN = digits_job(256, 256, batch={"global": 128}, steps=1000, preemptible=True)


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("operators") / "packages"
    folder.mkdir()
    write(folder, "steady", 1)
    write(folder, "restless", 1, STARTS_A_THREAD)
    information = folder / "operators-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: operators\nVersion: 1.0\n")
    points = "".join(f"{name} = {name}_declared:KIND\n" for name in ("steady", "restless"))
    (information / "entry_points.txt").write_text(f"[trivet.kinds]\n{points}")
    return folder


@pytest.fixture(scope="module")
def service(packages: Path) -> Iterator[Service]:
    """With room for one rank; it asks for room at once and renews leases often."""
    path = os.pathsep.join(filter(None, [str(packages), os.environ.get("PYTHONPATH", "")]))
    running = start(
        packages.parent / "data",
        PYTHONPATH=path,
        TRIVET_WARM_SUPERVISORS="1",
        TRIVET_CPU_SLOTS="1",
        TRIVET_PREEMPTION_MIN_RUN_S="0",
        TRIVET_LEASE_S="10",
    )
    yield running
    stop(running)


def result_of(service: Service, kind: str) -> dict[str, Any]:
    job = service.wait(service.submit({"kind": kind})["id"])
    assert job["state"] == "succeeded", job["error"]
    return dict(job["result"])


def forked(service: Service, kind: str) -> dict[str, Any]:
    """The result of the first job that is run by a fork of a process that had imported every kind."""

    def found() -> dict[str, Any] | None:
        return result if can_fork(service) and (result := result_of(service, kind))["forked"] else None

    return eventually(found, LIMIT_S)


def test_every_job_may_generate_code_not_only_the_first(service: Service) -> None:
    eventually(lambda: can_fork(service))
    for _ in range(2):
        job = service.wait(service.submit(CHECK)["id"])
        assert job["state"] == "succeeded", job
        assert job["result"]["verdicts"] == {"pass": 2}, job["result"]


def test_a_preempted_training_resumes_and_ends_the_same(service: Service) -> None:
    preempted = service.submit(TRAIN)["id"]
    service.wait(preempted, lambda job: job["state"] == "running" and (job["progress"] or {}).get("done", 0) > 0)
    urgent = service.submit({**TRAIN, "steps": 1, "priority": 10, "preemptible": False})["id"]
    assert service.wait(urgent)["state"] == "succeeded"
    assert service.job(preempted)["state"] != "succeeded"
    ended = service.wait(preempted)
    assert (ended["state"], ended["attempt"]) == ("succeeded", 2), ended
    events = service.http.get(f"/v1/jobs/{preempted}/events", params={"types": "state"}).json()["items"]
    reasons = [event.get("reason") for event in events]
    assert f"attempt 1: preempted by job {urgent}; queued again" in reasons
    undisturbed = service.wait(service.submit({**TRAIN, "name": "undisturbed"})["id"])
    assert undisturbed["attempt"] == 1
    assert ended["result"]["eval_loss"] == undisturbed["result"]["eval_loss"]


def test_a_job_after_a_change_runs_what_is_there_now(service: Service, packages: Path) -> None:
    assert forked(service, "steady")["value"] == 1
    write(packages, "steady", 2)
    assert result_of(service, "steady")["value"] == 2
    assert forked(service, "steady")["value"] == 2


def test_a_plugin_that_starts_a_thread_when_it_is_imported_disturbs_no_job(service: Service) -> None:
    """Its own ranks import it themselves, and have its thread; those of others have none of it."""
    others = forked(service, "steady")
    own = forked(service, "restless")
    assert (others["own"], others["threads"]) == (False, own["threads"] - 1)
    assert own["own"], "its ranks imported it themselves"
    (log,) = service.data.rglob("supervisors.log")
    assert "job kind 'restless' change threads" in log.read_text()
