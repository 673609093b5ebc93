"""Each answer names its request, and so do the problem and the log."""

from __future__ import annotations

import logging

import pytest
from api_world import TRAIN
from fastapi import FastAPI
from fastapi.testclient import TestClient
from otlp_receiver import otlp_receiver

from api.main import create_app
from service.jobs.settings import Settings
from service.jobs.store import Store
from service.jobs.text.logs import JsonFormatter

ID = "X-Request-ID"


def test_a_plain_request_id_is_taken_up_and_given_back(client: TestClient) -> None:
    assert client.get("/v1/jobs", headers={ID: "from-proxy.1"}).headers[ID] == "from-proxy.1"
    problem = client.get("/v1/jobs/job_0123456789abcdefghij", headers={ID: "from-proxy.2"})
    assert problem.headers[ID] == problem.json()["request_id"] == "from-proxy.2"


@pytest.mark.parametrize("given", ["", "a b", "x" * 65, "a\tb", '"}{', "é".encode().decode("latin-1")])
def test_an_odd_request_id_is_replaced(client: TestClient, given: str) -> None:
    answer = client.get("/v1/nothing", headers={ID: given.encode("latin-1")})  # type: ignore[dict-item]
    assert answer.headers[ID] != given
    assert len(answer.headers[ID]) == 16
    assert answer.json()["request_id"] == answer.headers[ID]


def test_requests_have_different_ids(client: TestClient) -> None:
    assert client.get("/healthz").headers[ID] != client.get("/healthz").headers[ID]


def test_an_unexpected_error_is_found_in_the_log_by_its_request(
    app: FastAPI, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []

    class Collecting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(JsonFormatter({}).format(record))

    def explode(*_: object, **__: object) -> None:
        raise KeyError("odd")

    monkeypatch.setattr(type(app.state.context.store.listing), "newest", explode)
    handler = Collecting()
    logging.getLogger("api.front.errors").addHandler(handler)
    try:
        answer = client.get("/v1/jobs", headers={ID: "find-me"})
    finally:
        logging.getLogger("api.front.errors").removeHandler(handler)
    assert answer.status_code == 500
    assert answer.headers[ID] == answer.json()["request_id"] == "find-me"
    assert any('"request_id": "find-me"' in line and "KeyError" in line for line in lines)


def test_a_clients_trace_is_kept_with_its_job(client: TestClient, store: Store) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    traced = client.post("/v1/jobs", json=TRAIN, headers={"traceparent": parent}).json()["id"]
    assert store.jobs.traceparent(traced) == parent
    odd = client.post("/v1/jobs", json=TRAIN, headers={"traceparent": "00-odd"}).json()["id"]
    assert store.jobs.traceparent(odd) is None


def test_a_request_is_a_span_below_its_clients(
    settings: Settings, client: TestClient, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with otlp_receiver() as receiver:
        for name, value in receiver.variables.items():
            monkeypatch.setenv(name, value)
        with TestClient(create_app(settings)) as traced:
            traced.headers.update(client.headers)
            job_id = traced.post("/v1/jobs", json=TRAIN, headers={"traceparent": parent}).json()["id"]
        (span,) = receiver.named("POST /v1/jobs")
    assert (span.trace, span.parent) == tuple(parent.split("-")[1:3])
    assert store.jobs.traceparent(job_id) == f"00-{span.trace}-{span.id}-01"
