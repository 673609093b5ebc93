"""The chaos driver: each of its checks can fail, and a short run finds what was planted and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from service.jobs.records import Artifact, Holding, Host, Job
from trivet.errors import Unreachable

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import chaos_checks

    return chaos_checks


TRAINED: dict[str, Any] = {
    "id": "job_1", "kind": "train", "name": "", "labels": {}, "owner": "me", "state": "succeeded", "attempt": 1,
    "priority": 0, "created_at": datetime.now(UTC), "spec": {"steps": 2}, "result": {"steps": 2},
}  # fmt: skip


def state(name: str, attempt: int = 1) -> dict[str, Any]:
    return {"type": "state", "state": name, "attempt": attempt, "reason": None}


def metric(step: int) -> dict[str, Any]:
    return {"type": "metric", "step": step, "values": {"loss": 1.0}}


WHOLE = (state("queued", 0), state("starting"), state("running"), metric(1), metric(2), state("succeeded"))


def numbered(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**event, "id": f"{number}-0"} for number, event in enumerate(events, 1)]


def test_a_whole_history_breaks_no_promise(checks: Any) -> None:
    accepted = checks.Accepted("short", {}, "key", followed=[f"{number}-0" for number in range(1, len(WHOLE) + 1)])
    assert checks.check_job(Job(**TRAINED), numbered(WHOLE), accepted) == []


BROKEN: dict[str, Callable[[], dict[str, Any]]] = {
    "events in order": lambda: {"events": numbered(WHOLE)[::-1]},
    "states follow each other": lambda: {"events": numbered((state("queued", 0), WHOLE[5]))},
    "attempts count up": lambda: {"events": numbered((*WHOLE[:2], state("queued", 2), *WHOLE[1:]))},
    "nothing after the end": lambda: {"events": numbered((*WHOLE, metric(3)))},
    "record equals events": lambda: {"job": {"state": "running"}},
    "one terminal state": lambda: {"accepted": {"retries": 1}},
    "cancelled when asked": lambda: {
        "job": {"state": "cancelled"},
        "events": numbered((state("queued", 0), state("cancelled", 0))),
    },
    "each event once": lambda: {"events": numbered((*WHOLE[:5], metric(2), WHOLE[5]))},
    "success is complete": lambda: {"job": {"result": {"steps": 1}}},
    "history is whole": lambda: {"events": numbered((*WHOLE[:3], *WHOLE[4:]))},
    "a stream loses nothing": lambda: {"accepted": {"followed": ["1-0"]}},
}


@pytest.mark.parametrize("promise", BROKEN)
def test_each_broken_promise_is_noticed(checks: Any, promise: str) -> None:
    broken = BROKEN[promise]()
    accepted = checks.Accepted("short", {}, "key", **broken.get("accepted", {}))
    job = Job(**{**TRAINED, **broken.get("job", {})})
    found = checks.check_job(job, broken.get("events", numbered(WHOLE)), accepted)
    assert promise in {violation.promise for violation in found}


def test_an_attempt_that_comes_back_breaks_no_promise(checks: Any) -> None:
    lost, back = state("queued", 1), {**state("running"), "reason": "attempt 1 goes on: its supervisor is back"}
    events = numbered((*WHOLE[:4], lost, state("starting", 2), back, *WHOLE[4:]))
    assert checks.check_job(Job(**TRAINED), events, checks.Accepted("short", {}, "key")) == []
    without_reason = numbered((*WHOLE[:4], lost, state("starting", 2), *WHOLE[2:3], *WHOLE[4:]))
    assert checks.check_job(Job(**TRAINED), without_reason, checks.Accepted("short", {}, "key"))


def test_a_verification_with_rows_missing_is_no_success(checks: Any) -> None:
    spec = {"property": {"robustness": {"count": 2}}}
    job = Job(**{**TRAINED, "kind": "verify", "spec": spec, "result": {"verdicts": {"verified": 1}}})
    events = numbered((*WHOLE[:3], {"type": "bound", "instance": 0}, WHOLE[5]))
    found = checks.check_job(job, events, checks.Accepted("verify", {}, "key"))
    assert [violation.promise for violation in found] == ["success is complete"]


def test_bytes_that_differ_from_the_manifest_are_noticed(checks: Any) -> None:
    digest = "9834876dcfb05cb167a5c24953eba58c4ac89b1adf57f28f2f9d09af107ee8f0"  # of b"aaa"
    artifact = Artifact(name="a", bytes=3, sha256=digest, media_type="text/plain", created_at=datetime.now(UTC))
    assert checks.check_artifact("job_1", artifact, b"aaa") == []
    assert [violation.promise for violation in checks.check_artifact("job_1", artifact, b"aab")] == [
        "manifest equals bytes"
    ]


@pytest.mark.parametrize("free", [(0,), (1,)])
def test_a_device_held_twice_or_also_free_is_noticed(checks: Any, free: tuple[int, ...]) -> None:
    parts = tuple(Holding(job=f"job_{number}", attempt=1, pool="cpu", devices=(number,)) for number in range(2))
    twice = (*parts, Holding(job="job_9", attempt=1, pool="cpu", devices=(1,)))
    host = Host(
        name="here", alive=True, draining=False, address="127.0.0.1", cuda=(), cpu_slots=3, free={"cpu": (2,)},
        running=(), held=parts, seen_at=datetime.now(UTC), versions={},
    )  # fmt: skip
    assert checks.check_devices([host]) == []
    assert checks.check_devices([host.model_copy(update={"held": twice})])
    assert checks.check_devices([host.model_copy(update={"free": {"cpu": free}})])


def test_a_service_that_stays_away_is_a_violation_and_no_crash(checks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import chaos
    from chaos_load import Load

    class Away:
        """A client of a service that nobody reaches any more."""

        def jobs(self, **_: object) -> None:
            raise Unreachable("unix:///nowhere", "gone")

    load = Load(Away(), seed=1, backlog=1)  # type: ignore[arg-type]
    monkeypatch.setattr(load, "_submit", load.client.jobs)
    load.run()
    assert [violation.promise for violation in load.violations] == ["the service answers"]

    options = chaos.Options(seed=1, seconds=1, lease_s=1, gap_s=(1, 1), quiet_s=1, backlog=1, plant=False)
    driver = chaos.Chaos(options, None, Away(), load)  # type: ignore[arg-type]
    monkeypatch.setattr(driver, "_run", driver.client.jobs)
    assert driver.run() == []
    assert {violation.promise for violation in driver.violations} == {"the service answers"}


@pytest.mark.slow(50)
@pytest.mark.distributed
def test_a_short_run_keeps_every_promise_and_catches_the_planted_violation(tmp_path: Path) -> None:
    """Stopped processes are left to longer runs: each costs a lease of waiting."""
    only = "api:SIGKILL,agent:SIGTERM,supervisor:SIGKILL,rank:SIGKILL,rank:SIGTERM,keeper:SIGKILL,broker:SIGKILL"
    only += ",up:SIGUSR1"
    out = tmp_path / "report.json"
    command = [sys.executable, str(BENCHMARKS / "chaos.py"), "--seconds", "12", "--backlog", "2", "--plant"]
    command += ["--gap-s", "1", "3", "--only", only, "--out", str(out)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert out.exists(), ran.stdout + ran.stderr
    report = json.loads(out.read_text())
    assert report["faults"], ran.stdout
    assert report["states"]["succeeded"], ran.stdout
    assert [violation.partition(":")[0] for violation in report["violations"]] == ["manifest equals bytes"], ran.stdout
    assert ran.returncode == 1
