"""What ``/metrics`` exports: all that is declared, the same from each of several API processes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from api_world import Worker, bearer, submit
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from api.main import create_app
from service.jobs.monitoring.alerts import ALERTS
from service.jobs.monitoring.catalogue import METRICS
from service.jobs.monitoring.conditions import Moment
from service.jobs.monitoring.numbers import Series
from service.jobs.settings import Settings
from service.jobs.store import Store
from service.jobs.store.keyspace import HOST

DOCUMENT = Path(__file__).parents[2] / "docs" / "run" / "monitoring.md"
Sample = tuple[str, tuple[tuple[str, str], ...]]


def scrape(client: TestClient) -> dict[Sample, float]:
    families = text_string_to_metric_families(client.get("/metrics").text)
    return {
        (sample.name, tuple(sample.labels.items())): sample.value for family in families for sample in family.samples
    }


def total(samples: dict[Sample, float], name: str, **labels: str) -> float:
    return sum(
        value for (each, found), value in samples.items() if each == name and labels.items() <= dict(found).items()
    )


@pytest.mark.slow
def test_two_processes_export_the_sums_of_both(settings: Settings, client: TestClient) -> None:
    route = {"route": "/v1/jobs", "status": "200"}
    before = total(scrape(client), "trivet_request_seconds_count", **route)
    with TestClient(create_app(settings), raise_server_exceptions=False) as other:
        other.headers.update(client.headers)
        for _ in range(3):
            assert other.get("/v1/jobs").status_code == 200
        assert client.get("/v1/jobs").status_code == 200
        seen_there = scrape(other)
        seen_here = scrape(client)
    assert total(seen_there, "trivet_request_seconds_count", **route) >= before + 3
    assert total(seen_here, "trivet_request_seconds_count", **route) == before + 4
    after = scrape(client)
    assert total(after, "trivet_request_seconds_count", **route) == before + 4, "an ended process takes nothing with it"


def test_requests_are_counted_by_template_whatever_was_asked_for(client: TestClient) -> None:
    counted = "trivet_request_seconds_count"
    routes = [("/v1/jobs/{job_id}", "200"), ("/v1/jobs/{job_id}", "404"), ("other", "404")]
    before = scrape(client)
    job_id = submit(client)
    client.get(f"/v1/jobs/{job_id}")
    client.get("/v1/jobs/job_0123456789abcdefghij")
    client.get("/nothing/here")
    client.request("BREW", "/v1/jobs")
    samples = scrape(client)
    assert [
        total(samples, counted, route=route, status=status) - total(before, counted, route=route, status=status)
        for route, status in routes
    ] == [1, 1, 1]
    methods = {dict(labels)["method"] for name, labels in samples if name == counted}
    assert "other" in methods
    assert "BREW" not in methods
    assert job_id not in client.get("/metrics").text


def test_refused_sign_ins_are_counted(anonymous: TestClient) -> None:
    before = total(scrape(anonymous), "trivet_sign_ins_refused_total")
    anonymous.post("/login", data={"key": "tvt_no_no"}, headers={"X-Trivet": "1"})
    assert total(scrape(anonymous), "trivet_sign_ins_refused_total") == before + 1


def test_everything_declared_is_exported_and_nothing_else(client: TestClient, worker: Worker) -> None:
    worker.succeed(worker.start(submit(client)))
    submit(client, parallel={"tp": 4})
    families = {family.name: family for family in text_string_to_metric_families(client.get("/metrics").text)}
    declared = {metric.name.removesuffix("_total"): metric for metric in METRICS}
    assert set(families) == set(declared)
    for name, metric in declared.items():
        labels = {label for sample in families[name].samples for label in sample.labels} - {"le"}
        assert labels == set(metric.labels), name
        assert families[name].documentation == metric.meaning


def test_the_document_lists_what_is_exported() -> None:
    rows = re.findall(r"^\| `(trivet_\w+)` \| (\w+) \| ([^|]*) \| ([^|]*) \|$", DOCUMENT.read_text(), re.MULTILINE)
    listed = {name: (kind, labels.replace("`", "").strip(), meaning.strip()) for name, kind, labels, meaning in rows}
    assert listed == {metric.name: (metric.kind, ", ".join(metric.labels), metric.meaning) for metric in METRICS}


def test_no_key_is_needed_and_none_is_told(anonymous: TestClient, store: Store) -> None:
    key, secret = store.keys.create("ada", ("read",))
    anonymous.get("/v1/jobs", headers=bearer(secret))
    text = anonymous.get("/metrics").text
    assert secret not in text
    assert key.id not in text


def firing(client: TestClient) -> list[dict[str, object]]:
    return [alert for alert in client.get("/v1/alerts").json()["items"] if alert["state"] == "firing"]


def test_alerts_tell_of_a_host_that_does_not_start_jobs(client: TestClient, store: Store, worker: Worker) -> None:
    worker.beat()
    assert firing(client) == []
    everything = client.get("/v1/alerts", params={"all": True}).json()["items"]
    assert {alert["name"] for alert in everything} == {alert.name for alert in ALERTS}
    store.client.call("HSET", HOST("fake"), "failing_since", 1, "failing_reason", "no torch", "failed_starts", 2)
    store.client.call("HSET", HOST("fake"), "retry_at", 1)
    (alert,) = firing(client)
    assert (alert["name"], alert["state"], alert["labels"]) == ("TrivetHostFailing", "firing", {"host": "fake"})
    assert alert["severity"] == "critical"
    assert "trivet hosts resume" in str(alert["action"])
    assert "trivet_host_failing" in str(alert["expression"])


def test_alerts_are_for_operators(anonymous: TestClient, store: Store) -> None:
    assert anonymous.get("/v1/alerts").status_code == 401
    _, secret = store.keys.create("ada", ("submit",))
    assert anonymous.get("/v1/alerts", headers=bearer(secret)).status_code == 403


def test_samples_are_taken_by_one_process_and_the_oldest_goes(store: Store) -> None:
    assert [store.samples.is_due() for _ in range(3)] == [True, False, False]
    numbers = {Series("trivet_host_failing", (("host", "a"),)): 1.0, Series("trivet_jobs", (("state", "queued"),)): 3.0}
    for at in range(200):
        store.samples.record(Moment(float(at), numbers))
    remembered = store.samples.history()
    assert len(remembered) == 90
    assert remembered[-1] == Moment(199.0, {Series("trivet_host_failing", (("host", "a"),)): 1.0})
