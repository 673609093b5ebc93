"""Sweeps that stop jobs early: what the store keeps of their metrics, whom it tells, and what becomes of these."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from api_world import TRAIN, VERIFY, Worker, submit
from fastapi.testclient import TestClient
from training_runs import Recording, train

from service.jobs.records import AttemptRef, EndEarly, PartOutcome
from service.jobs.spec.common import judge as judge_values
from service.jobs.store import Store, sweeps

HALVING = {"rule": "halving", "metric": "eval_loss", "mode": "min", "factor": 2, "first": 2}
SPEC = {**TRAIN, "evaluate": {"every": 2}, "steps": 10}
WHY = "stopped early by the sweep at step 2: eval_loss 2 of step 2 is number 2 of 2 so far, of which the best goes on"


def sweep(client: TestClient, stop: dict[str, Any] = HALVING, jobs: int = 3) -> tuple[str, list[str]]:
    wanted = {"grid": {"seed": list(range(jobs))}, "best": {"metric": "eval_loss", "mode": "min"}, "stop": stop}
    parent = submit(client, {**SPEC, "sweep": wanted})
    items = client.get("/v1/jobs", params={"sweep": parent}).json()["items"]
    return parent, [job["id"] for job in reversed(items)]


def evaluate(worker: Worker, ref: AttemptRef, **at: float) -> None:
    for step, value in at.items():
        worker.metrics(ref, [value], first=int(step[1:]), name="eval_loss")


def judge(store: Store) -> dict[str, str]:
    """Judge all there is; the reasons of the jobs that stop."""
    told: dict[str, str] = {}
    while (found := store.sweeps.stop_early()) is not None:
        told |= {each.job: each.reason for each in found[1]}
    return told


def test_the_worse_job_is_told_and_succeeds_with_what_it_has(client: TestClient, worker: Worker, store: Store) -> None:
    parent, (good, bad, third) = sweep(client)
    first, second = worker.start(good), worker.start(bad)
    worker.metrics(first, [9.0], first=2)  # another metric of the same step
    evaluate(worker, first, s2=1 / 3)
    evaluate(worker, second, s2=2.0)
    assert judge(store) == {bad: WHY}
    assert judge(store) == {}
    assert (store.attempts.renew(first), store.attempts.renew(second)) == ("run", EndEarly(WHY))
    assert client.get(f"/v1/jobs/{bad}").json()["reason"] == WHY
    worker.succeed(second, {"eval_loss": 2.0, "ended_early": WHY})
    worker.succeed(first, {"eval_loss": 0.25})
    worker.succeed(worker.start(third), {"eval_loss": 0.5})
    over = client.get(f"/v1/jobs/{bad}").json()
    assert (over["state"], over["reason"], over["error"]) == ("succeeded", WHY, None)
    whole = client.get(f"/v1/jobs/{parent}").json()
    assert (whole["state"], whole["children"]["best"]) == ("succeeded", {"job": good, "value": 0.25})
    assert set(whole["children"]) >= {"total", "best"}
    assert client.delete(f"/v1/jobs/{parent}").status_code == 204


def test_one_that_has_done_all_when_it_is_told_says_nothing_of_it(client: TestClient, worker: Worker) -> None:
    _, (good, bad, _) = sweep(client)
    evaluate(worker, worker.start(good), s2=1.0)
    ref = worker.start(bad)
    evaluate(worker, ref, s2=2.0)
    judge(worker.store)
    worker.succeed(ref, {"eval_loss": 1.5})
    assert client.get(f"/v1/jobs/{bad}").json()["reason"] is None


def test_a_judgement_outlives_the_attempt_and_a_repeated_step_counts_once(client: TestClient, worker: Worker) -> None:
    _, (good, bad, third) = sweep(client)
    first, second = worker.start(good), worker.start(bad)
    evaluate(worker, first, s2=1.0)
    evaluate(worker, second, s2=2.0)
    worker.store.attempts.finish(second, PartOutcome("interrupted"))
    assert judge(worker.store) == {bad: WHY}
    again = worker.start(bad)
    assert (again.attempt, worker.store.attempts.renew(again)) == (2, EndEarly(WHY))
    evaluate(worker, again, s2=0.5)
    assert worker.store.sweeps.stop_early() is None
    evaluate(worker, worker.start(third), s2=1.5)
    assert "number 2 of 3" in judge(worker.store)[third]
    client.post(f"/v1/jobs/{bad}/cancel")
    assert worker.store.attempts.renew(again) == "stop"
    worker.store.attempts.finish(again, PartOutcome("stopped"))
    client.post(f"/v1/jobs/{bad}/retry")
    retried = worker.start(bad)
    assert worker.store.attempts.renew(retried) == "run"
    evaluate(worker, retried, s2=0.5, s4=3.0)
    judge(worker.store)


def test_a_failed_job_is_no_competitor(client: TestClient, worker: Worker, store: Store) -> None:
    _, (failed, other, _) = sweep(client)
    ref = worker.start(failed)
    evaluate(worker, ref, s2=1.0)
    worker.fail(ref)
    evaluate(worker, worker.start(other), s2=2.0)
    assert judge(store) == {}


def test_the_other_of_two_judges_at_once_changes_nothing(
    client: TestClient, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, (good, bad, _) = sweep(client)
    refs = [worker.start(good), worker.start(bad)]
    for ref, loss in zip(refs, (1.0, 2.0), strict=True):
        evaluate(worker, ref, s2=loss)
    found: list[Any] = []
    whole = worker.store.sweeps.stop_early
    plan = judge_values

    def late(*arguments: Any) -> Any:
        monkeypatch.setattr(sweeps, "judge", plan)
        found.append(whole())
        return plan(*arguments)

    monkeypatch.setattr(sweeps, "judge", late)
    late_answer = whole()
    assert [[each.job for each in told[1]] for told in (*found, late_answer)] == [[bad], []]


class Relay(Recording):
    """Sends on what a training reports of its evaluations, and has that judged at once."""

    def __init__(self, worker: Worker, ref: AttemptRef) -> None:
        super().__init__()
        self.worker, self.ref = worker, ref

    def metric(self, step: int, values: Mapping[str, float]) -> None:
        if "eval_loss" in values:
            self.worker.emit(self.ref, [{"type": "metric", "step": step, "values": dict(values)}])
            self.worker.store.sweeps.stop_early()

    def ends_early(self) -> str | None:
        directive = self.worker.store.attempts.renew(self.ref)
        return directive.reason if isinstance(directive, EndEarly) else None


def test_a_real_training_with_a_bad_learning_rate_is_stopped_early(
    client: TestClient, worker: Worker, tmp_path: Path
) -> None:
    wanted = {"list": [{"optimizer.lr": 0.01}, {"optimizer.lr": 1e-9}], "stop": {**HALVING, "first": 4}}
    wanted["best"] = {"metric": "eval_loss", "mode": "min"}
    parent = submit(client, {**SPEC, "steps": 12, "sweep": wanted})
    for job in reversed(client.get("/v1/jobs", params={"sweep": parent, "include": "spec"}).json()["items"]):
        relay = Relay(worker, worker.start(job["id"]))
        found = train(tmp_path, job["spec"], job_id=job["id"], report=relay, ends_early=relay.ends_early)
        worker.succeed(relay.ref, found["result"])
    jobs = client.get("/v1/jobs", params={"sweep": parent}).json()["items"]
    bad, good = (client.get(f"/v1/jobs/{job['id']}").json() for job in jobs)
    assert [(job["state"], job["result"]["steps"]) for job in (good, bad)] == [("succeeded", 12), ("succeeded", 5)]
    assert bad["reason"] == bad["result"]["ended_early"]
    assert bad["reason"].startswith("stopped early by the sweep at step 4: eval_loss 2.")
    assert client.get(f"/v1/jobs/{parent}").json()["children"]["best"]["job"] == good["id"]


@pytest.mark.parametrize(
    ("spec", "stop", "path", "said"),
    [
        (SPEC, {"metric": "eval_los"}, "sweep.stop.metric", "one of eval_loss, eval_accuracy"),
        (SPEC, {"mode": "max"}, "sweep.stop.mode", "the better eval_loss is the other one"),
        (SPEC, {"first": 10}, "sweep.stop.first", "the jobs end at step 10"),
        (SPEC, {"first": 1}, "evaluate.every", "a number of steps up to 1"),
        (TRAIN, {}, "evaluate.every", "a number of steps up to 2"),
        ({**SPEC, "steps": 40000}, {}, "evaluate.every", "at least 6"),
        (VERIFY, {}, "sweep.stop", "a job of kind verify reports no metrics by steps"),
    ],
)
def test_a_rule_that_cannot_follow_its_jobs_is_refused(
    client: TestClient, spec: dict[str, Any], stop: dict[str, Any], path: str, said: str
) -> None:
    wanted = {"grid": {"seed": [1, 2, 3]}, "stop": {**HALVING, **stop}}
    answer = client.post("/v1/jobs", json={**spec, "sweep": wanted})
    assert answer.status_code == 422, answer.text
    (error,) = answer.json()["errors"]
    assert error["path"] == path
    assert said in f"{error['message']}; expected {error['expected']}"
    assert client.get("/v1/jobs").json()["items"] == []
