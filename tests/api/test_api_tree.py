"""The trees that searches split are read from the record of their job."""

from __future__ import annotations

import json
from typing import Any

from api_world import VERIFY, Worker, submit
from fastapi.testclient import TestClient
from split_trees import tree_event, tree_of

from service.jobs.store import Store


def recorded(client: TestClient, worker: Worker, store: Store, *events: dict[str, Any]) -> str:
    """A verify job with these events on record; its ``/tree``."""
    job_id = submit(client, VERIFY)
    worker.start(job_id)
    folder = store.artifacts.data.job(job_id).attempt(1)
    folder.mkdir(parents=True)
    (folder / "events.rank-0.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return f"/v1/jobs/{job_id}/tree"


def test_the_newest_tree_of_an_instance_is_answered_and_without_one_the_largest(
    client: TestClient, worker: Worker
) -> None:
    early, late, other = (tree_event(3, tree_of(1)), tree_event(3, tree_of(3), domains=15), tree_event(8, tree_of(2)))
    path = recorded(client, worker, worker.store, early, late, other)
    answer = client.get(path).json()
    assert (answer["instance"], answer["instances"], answer["domains"]) == (3, [3, 8], 15)
    assert answer["searches"] == late["searches"]
    assert client.get(path, params={"instance": 8}).json()["searches"] == other["searches"]
    assert client.get(path, params={"instance": 5}).json()["searches"] == []


def test_no_tree_is_answered_where_nothing_was_split_or_a_rank_wrote_something_else(
    client: TestClient, worker: Worker
) -> None:
    assert client.get(recorded(client, worker, worker.store)).json()["instance"] is None
    path = recorded(client, worker, worker.store, tree_event(0, tree_of(1)) | {"searches": [{"technique": 5}]})
    assert client.get(path).json()["searches"] == []


def test_only_verify_jobs_have_trees(client: TestClient) -> None:
    answer = client.get(f"/v1/jobs/{submit(client)}/tree")
    assert answer.status_code == 422
    assert "verify job" in answer.json()["errors"][0]["expected"]
