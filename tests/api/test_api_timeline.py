"""A pipeline's planned schedule, and what every rank measured of a step."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from api_world import TRAIN, VERIFY, Worker, submit
from fastapi.testclient import TestClient

from api.routes import timeline
from service.jobs.records import AttemptRef, PartOutcome
from service.jobs.store import Store
from service.schedules import GENERATORS

DEEP = {"family": "mlp", "in_features": 64, "hidden": [16] * 8, "out_features": 10}


def span(name: str, step: int, start: float, rank: int = 0, **detail: Any) -> dict[str, Any]:
    inside = {"step": step, **detail}
    return {"type": "span", "name": name, "start": start, "end": start + 0.5, "rank": rank, "detail": inside}


def schedule(client: TestClient, name: str, pp: int, micro_batches: int) -> dict[str, Any]:
    pipeline = {"schedule": name, "micro_batches": micro_batches}
    job_id = submit(client, model=DEEP, parallel={"pp": pp}, pipeline=pipeline)
    answer = client.get(f"/v1/jobs/{job_id}/schedule")
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


@pytest.mark.parametrize("name", sorted(GENERATORS))
def test_a_plan_has_every_computation_once_and_in_time(client: TestClient, name: str) -> None:
    plan = schedule(client, name, pp=2, micro_batches=8)
    cells = [cell for row in plan["rows"] for cell in row["cells"]]
    forwards = {(cell["stage"], cell["micro_batch"]): cell for cell in cells if cell["op"] == "forward"}
    assert set(forwards) == {(stage, each) for stage in range(plan["stages"]) for each in range(8)}
    assert all(forwards[stage, each]["start"] >= forwards[stage - 1, each]["end"] for stage, each in forwards if stage)
    for row in plan["rows"]:
        own = row["cells"]
        assert {cell["stage"] for cell in own} == set(row["stages"])
        assert all(one["end"] <= other["start"] for one, other in pairwise(own))
        assert row["peak_activations"] > 0
    busy = sum(cell["end"] - cell["start"] for cell in cells)
    assert plan["bubble"] == pytest.approx(1 - busy / (2 * plan["duration"]))


def test_the_bubble_of_1f1b_is_the_textbooks(client: TestClient) -> None:
    plan = schedule(client, "1f1b", pp=4, micro_batches=8)
    assert plan["bubble"] == pytest.approx(3 / 11)
    assert [row["peak_activations"] for row in plan["rows"]] == [4, 3, 2, 1]


@pytest.mark.parametrize(("spec", "said"), [(TRAIN, "parallel.pp is 1"), (VERIFY, "a verify job")])
def test_jobs_without_a_pipeline_have_no_schedule(client: TestClient, spec: dict[str, Any], said: str) -> None:
    answer = client.get(f"/v1/jobs/{submit(client, spec)}/schedule")
    assert answer.status_code == 404
    assert said in answer.json()["detail"]


def test_a_spec_that_is_no_longer_known_has_no_schedule(
    client: TestClient, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = store.jobs.get(submit(client))
    gone = job.model_copy(update={"spec": {**job.spec, "model": {"family": "gone"}}})
    monkeypatch.setattr(type(store.jobs), "get", lambda *_: gone)
    answer = client.get(f"/v1/jobs/{job.id}/schedule")
    assert answer.status_code == 409
    assert f"the spec of job {job.id} cannot be read: Input tag 'gone'" in answer.json()["detail"]


def test_a_step_has_the_spans_of_all_ranks(client: TestClient, worker: Worker) -> None:
    job_id = submit(client)
    ref = worker.start(job_id)
    worker.emit(ref, [span("data", step, step + 0.1 * rank, rank) for step in (1, 2, 50) for rank in (1, 0)])
    worker.emit(ref, [span("forward", 2, 2.6, 1, op="forward", stage=1, micro_batch=0)])
    worker.emit(ref, [{"type": "span", "name": "warmup", "start": 0.0, "end": 1.0}])
    worker.emit(ref, [span("checkpoint", 60, 61.0)])
    newest = client.get(f"/v1/jobs/{job_id}/timeline").json()
    assert (newest["steps"], newest["step"]) == ([1, 2, 50, 60], 50)
    assert [span["name"] for span in newest["apart"]] == ["warmup"]
    second = client.get(f"/v1/jobs/{job_id}/timeline", params={"step": 2}).json()
    assert [(span["rank"], span["name"]) for span in second["spans"]] == [(0, "data"), (1, "data"), (1, "forward")]
    assert second["spans"][2]["detail"] == {"step": 2, "op": "forward", "stage": 1, "micro_batch": 0}
    missing = client.get(f"/v1/jobs/{job_id}/timeline", params={"step": 3})
    assert missing.status_code == 404
    assert "steps 1 to 60" in missing.json()["detail"]


def test_of_more_spans_than_anybody_looks_at_the_first_are_shown(
    client: TestClient, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert timeline.MOST_SPANS == 200_000
    monkeypatch.setattr(timeline, "MOST_SPANS", 3)
    job_id = submit(client)
    worker.emit(worker.start(job_id), [span("data", step, step) for step in range(1, 6)])
    found = client.get(f"/v1/jobs/{job_id}/timeline").json()
    assert (found["steps"], found["step"]) == ([1, 2, 3], 3)


def test_a_step_that_a_later_attempt_repeats_is_shown_as_that_attempt_ran_it(
    client: TestClient, worker: Worker
) -> None:
    job_id = submit(client, retries=1)
    for attempt in (1, 2):
        ref: AttemptRef = worker.start(job_id)
        worker.emit(ref, [span(name, 7, attempt * 10.0 + at) for at, name in enumerate(("data", "optimizer"))])
        worker.store.attempts.finish(ref, PartOutcome("failed"))
    found = client.get(f"/v1/jobs/{job_id}/timeline").json()
    assert [(span["name"], span["start"]) for span in found["spans"]] == [("data", 20.0), ("optimizer", 21.0)]


def test_before_the_first_span_there_is_an_empty_timeline(client: TestClient) -> None:
    job_id = submit(client)
    assert client.get(f"/v1/jobs/{job_id}/timeline").json() == {"steps": [], "step": None, "spans": [], "apart": []}
    assert client.get("/v1/jobs/job_00000000000000000000/timeline").status_code == 404
