"""Several jobs at once: those that are named, and their metrics on one axis."""

from __future__ import annotations

from typing import Any

import pytest
from api_world import VERIFY, Keys, Worker, bearer, submit
from fastapi.testclient import TestClient

from service.jobs.events import rank_file
from service.jobs.events.curves import CurveKeeper
from service.jobs.settings import Settings
from service.jobs.store import Store

ABSENT = "job_00000000000000000000"


def named(client: TestClient, *ids: str, **params: Any) -> list[str]:
    answer = client.get("/v1/jobs", params={"ids": ",".join(ids), **params})
    assert answer.status_code == 200, answer.text
    return [job["id"] for job in answer.json()["items"]]


def curves(client: TestClient, *ids: str, **params: Any) -> list[dict[str, Any]]:
    answer = client.get("/v1/jobs:metrics", params={"ids": ",".join(ids), **params})
    assert answer.status_code == 200, answer.text
    items: list[dict[str, Any]] = answer.json()["items"]
    return items


def test_jobs_that_are_named_come_in_that_order_and_page_by_page(client: TestClient) -> None:
    first, second, third = submit(client), submit(client, VERIFY), submit(client)
    assert named(client, third, first, ABSENT, second, third) == [third, first, second]
    assert named(client, third, second, first, kind="train") == [third, first]
    page = client.get("/v1/jobs", params={"ids": f"{third},{first},{second}", "limit": 2, "include": "spec"}).json()
    assert [job["spec"]["kind"] for job in page["items"]] == ["train", "train"]
    assert named(client, third, first, second, limit=2, cursor=page["next_cursor"]) == [second]


def test_metrics_of_jobs_are_thinned_and_say_what_else_there_is(client: TestClient, worker: Worker) -> None:
    long, short, silent = submit(client), submit(client), submit(client)
    worker.metrics(worker.start(long), [float(-step) for step in range(500)])
    worker.metrics(worker.start(short), [3.0, 2.0])
    worker.metrics(worker.start(silent), [0.5], name="lr")
    found = curves(client, short, ABSENT, long, silent, names="loss", max_points=10)
    assert [(one["job"], one["names"]) for one in found] == [(short, ["loss"]), (long, ["loss"]), (silent, ["lr"])]
    assert found[0]["series"]["loss"]["value"] == [3.0, 2.0]
    assert len(found[1]["series"]["loss"]["value"]) <= 10
    assert (found[1]["series"]["loss"]["step"][-1], min(found[1]["series"]["loss"]["value"])) == (500, -499.0)
    assert found[2]["series"] == {}


def test_what_a_job_reports_after_it_was_asked_for_is_told_too(client: TestClient, worker: Worker) -> None:
    job = submit(client)
    ref = worker.start(job)
    worker.metrics(ref, [3.0])
    assert curves(client, job, names="loss")[0]["series"]["loss"]["value"] == [3.0]
    worker.metrics(ref, [2.0], first=2)
    assert curves(client, job, names="loss")[0]["series"]["loss"]["value"] == [3.0, 2.0]
    worker.fail(ref)
    assert curves(client, job, names="loss")[0]["series"]["loss"]["value"] == [3.0, 2.0]
    client.post(f"/v1/jobs/{job}/retry")
    worker.metrics(worker.start(job), [1.0], first=2)
    assert curves(client, job, names="loss")[0]["series"]["loss"]["value"] == [3.0, 1.0]


def test_jobs_of_other_projects_are_as_good_as_absent(client: TestClient, keys: Keys, store: Store) -> None:
    own, other = keys.of("vision", "submit"), keys.of("audio", "submit")
    client.headers.update(bearer(own))
    job = submit(client)
    assert (named(client, job), len(curves(client, job))) == ([job], 1)
    client.headers.update(bearer(other))
    assert (named(client, job), curves(client, job)) == ([], [])


@pytest.mark.parametrize("ids", ["", "x", f"{ABSENT},", ",".join([ABSENT] * 101)])
def test_what_is_no_list_of_ids_is_refused(client: TestClient, ids: str) -> None:
    for path in ("/v1/jobs", "/v1/jobs:metrics"):
        answer = client.get(path, params={"ids": ids})
        assert (answer.status_code, answer.json()["errors"][0]["path"]) == (422, "ids")


def test_what_supervisors_left_of_curves_is_told_in_place_of_the_record(
    client: TestClient, worker: Worker, settings: Settings
) -> None:
    job = submit(client)
    ref = worker.start(job)
    folder = settings.layout.job(job).attempt(1)
    folder.mkdir(parents=True)
    rank_file(folder, 0).write_bytes(b"\n")
    keeper = CurveKeeper()
    keeper.take({"step": 3, "time": 1.0, "values": {"loss": 0.25, "lr": 1.0}})
    keeper.write(folder, 0, {rank_file(folder, 0).name: 1})
    assert curves(client, job, names="loss")[0]["names"] == []
    worker.succeed(ref)
    assert curves(client, job, names="loss")[0] == {
        "job": job,
        "names": ["loss", "lr"],
        "series": {"loss": {"step": [3], "time": [1.0], "value": [0.25]}},
    }
    rank_file(folder, 0).write_bytes(b"\n\n")
    assert curves(client, job, names="loss")[0]["names"] == []
