"""Every failure is a problem that says where, what, and what would be accepted."""

from __future__ import annotations

from typing import Any

import pytest
import redis as redis_py
from api_world import MLP, TRAIN, VERIFY, Keys
from fastapi import FastAPI
from fastapi.testclient import TestClient
from pydantic import SecretStr

from api.main import create_app
from service.jobs.settings import Settings

FAMILIES = "one of 'mlp', 'convnet', 'transformer', 'huggingface', 'timm', 'torchvision'"
MODEL_FORMS = "a model is {family: …}, {job: ID}, {safetensors: FILE, family: …} or {huggingface: FILE}"
SCHEDULES = "'gpipe', '1f1b', 'interleaved', 'zero_bubble' or 'zbv'"


def refused(client: TestClient, spec: Any) -> dict[str, dict[str, Any]]:
    """The refused fields of a spec, by path."""
    answer = client.post("/v1/jobs", json=spec)
    assert answer.status_code == 422, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    body = answer.json()
    assert (body["title"], body["status"]) == ("Unprocessable Entity", 422) or body["status"] == 422
    assert all(set(error) == {"path", "message", "got", "expected"} for error in body["errors"])
    assert all(error["expected"] for error in body["errors"])
    return {error["path"]: error for error in body["errors"]}


@pytest.mark.parametrize(
    ("change", "path", "got", "expected"),
    [
        ({"steps": 0}, "steps", 0, "at least 1"),
        ({"steps": "many"}, "steps", "many", "an integer"),
        ({"model": {**MLP, "hidden": [16, 0]}}, "model.hidden.1", 0, "at least 1"),
        ({"model": {**MLP, "family": "rnn"}}, "model.family", "rnn", FAMILIES),
        ({"model": {"job": "job_1"}}, "model.job", "job_1", "job_ and 20 letters or digits"),
        ({"model": 3}, "model", 3, MODEL_FORMS),
        ({"model": {**MLP, "job": "a"}}, "model", {**MLP, "job": "a"}, MODEL_FORMS),
        ({"data": {"source": "internet"}}, "data.source", "internet", "one of 'digits', 'tokens', 'synthetic', 'file'"),
        ({"parallel": {"tp": -1}}, "parallel.tp", -1, "at least 1"),
        ({"labels": {"a": 1}}, "labels.a", 1, "a string"),
        ({"optimizer": {"betas": [0.9]}}, "optimizer.betas.1", None, "a value"),
        ({"optimizer": {"betas": [0.9, 1.0]}}, "optimizer.betas.1", 1.0, "less than 1.0"),
        ({"optimizer": {"betas": [-0.1, 0.9]}}, "optimizer.betas.0", -0.1, "at least 0.0"),
        ({"priority": 101}, "priority", 101, "at most 100"),
        ({"device": "tpu"}, "device", "tpu", "'auto', 'cuda' or 'cpu'"),
        ({"batch": {"global": 1.5}}, "batch.global", 1.5, "an integer"),
        ({"objective": "magic"}, "objective.name", "magic", "one of 'cross_entropy', 'certified'"),
        ({"objective": {"name": "certified"}}, "objective.eps", None, "a value"),
        ({"pipeline": {"schedule": "snake"}}, "pipeline.schedule", "snake", SCHEDULES),
    ],
)
def test_a_bad_field_is_named_by_its_path(
    client: TestClient, change: dict[str, Any], path: str, got: Any, expected: str
) -> None:
    error = refused(client, {**TRAIN, **change})[path]
    assert error["got"] == got
    assert error["expected"] == expected


@pytest.mark.parametrize(
    ("change", "path", "got"),
    [
        ({"after": ["job_" + "0" * 20] * 2}, "after", ["job_" + "0" * 20] * 2),
        ({"pipeline": {"schedule": "zbv", "virtual_stages": 3}}, "pipeline.virtual_stages", 3),
        ({"compile": {"train": True}}, "compile.gate", None),
        ({"evaluate": {"every": True}}, "evaluate.every", True),
        ({"model": {**MLP, "hidden": [True]}}, "model.hidden", [True]),
        (
            {"model": {"family": "convnet", "height": 8, "width": 8, "channels": [4], "out_features": 10, "kernel": 4}},
            "model.kernel",
            4,
        ),
    ],
)
def test_fields_that_do_not_go_together_are_named(client: TestClient, change: Any, path: str, got: Any) -> None:
    found = refused(client, {**TRAIN, **change})
    assert [(each, error["got"]) for each, error in found.items()] == [(path, got)]


def test_every_bad_field_is_reported_at_once(client: TestClient) -> None:
    found = refused(client, {"kind": "train", "model": {"family": "mlp", "in_features": 0}, "steps": -1})
    assert set(found) == {"model.in_features", "model.out_features", "data", "steps"}
    assert found["data"]["message"] == "this field is required"


def test_members_of_a_union_are_reported_as_one_field(client: TestClient) -> None:
    error = refused(client, {**TRAIN, "model": {"job": "job_" + "a" * 20, "step": -1}})["model.step"]
    assert error["expected"] == "'latest', or at least 0"


@pytest.mark.parametrize(
    ("spec", "path", "close"),
    [
        ({**TRAIN, "stesp": 3}, "stesp", "steps"),
        ({**TRAIN, "model": {**MLP, "hiden": [3]}}, "model.hiden", "hidden"),
        ({**TRAIN, "batch": {"globl": 3}}, "batch.globl", "global"),
        ({**VERIFY, "property": {"robustness": {**VERIFY["property"]["robustness"], "epss": 3}}},
         "property.robustness.epss", "eps"),
    ],
)  # fmt: skip
def test_an_unknown_field_comes_with_a_suggestion(
    client: TestClient, spec: dict[str, Any], path: str, close: str
) -> None:
    error = refused(client, spec)[path]
    assert f"did you mean '{close}'?" in error["message"]
    assert close in error["expected"].split(", ")[0] + error["expected"]


@pytest.mark.parametrize(
    ("spec", "path", "close"),
    [
        ({**TRAIN, "model": {"jobb": "job_" + "a" * 20}}, "model", "job"),
        ({**TRAIN, "model": {"famly": "mlp", "in_features": 3}}, "model", "family"),
        ({**TRAIN, "data": {"sorce": "digits"}}, "data.source", "source"),
        ({**VERIFY, "property": {"vnlib": "file_" + "a" * 64}}, "property", "vnnlib"),
    ],
)
def test_a_field_that_would_tell_members_of_a_union_apart_comes_with_a_suggestion(
    client: TestClient, spec: dict[str, Any], path: str, close: str
) -> None:
    assert f"did you mean '{close}'?" in refused(client, spec)[path]["message"]


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"model": {"onnx": "net.onnx"}}, "model.onnx"),
        ({"model": {**MLP, "safetensors": "/tmp/w"}}, "model.safetensors"),
        ({"model": {"huggingface": 3}}, "model.huggingface"),
        ({"property": {"vnnlib": "/tmp/queries.zip"}}, "property.vnnlib"),
        ({"property": {"vnnlib": ["queries.zip"]}}, "property.vnnlib.0"),
        ({"property": {"instances": "file_1"}}, "property.instances"),
    ],
)
def test_what_is_no_files_id_is_told_how_to_get_one(client: TestClient, change: dict[str, Any], path: str) -> None:
    error = refused(client, {**VERIFY, **change})[path]
    assert error["message"] == "expected a file's id, as `trivet upload FILE` prints it"
    assert error["expected"] == "file_ and 64 hexadecimal digits"


def test_a_choice_that_is_not_known_is_not_listed_twice(client: TestClient) -> None:
    error = refused(client, {**TRAIN, "device": "tpu"})["device"]
    assert (error["message"], error["expected"]) == ("'tpu' is not known", "'auto', 'cuda' or 'cpu'")
    error = refused(client, {**TRAIN, "model": 3})["model"]
    assert (error["message"], error["expected"]) == ("this matches none of the accepted forms", MODEL_FORMS)


def test_who_reads_only_the_detail_knows_what_would_be_accepted(client: TestClient) -> None:
    detail = client.post("/v1/jobs", json={**TRAIN, "device": "tpu", "steps": 0}).json()["detail"]
    assert "device: 'tpu' is not known (expected 'auto', 'cuda' or 'cpu')" in detail
    assert "(expected at least 1)" in detail


@pytest.mark.parametrize(("body", "path"), [({}, "kind"), ({"kind": "cook"}, "kind"), ([], ""), ("train", "")])
def test_a_body_without_a_kind_is_refused(client: TestClient, body: Any, path: str) -> None:
    assert path in refused(client, body)


def test_a_body_that_is_not_json_is_refused(client: TestClient) -> None:
    answer = client.post("/v1/jobs", content=b'{"kind": "train",', headers={"Content-Type": "application/json"})
    assert answer.status_code == 422
    assert "not JSON" in answer.json()["detail"]
    missing = client.post("/v1/jobs", headers={"Content-Type": "application/json"})
    assert missing.status_code == 422


def test_json_under_another_media_type_is_not_taken(client: TestClient) -> None:
    answer = client.post("/v1/jobs", content=b'{"kind": "train"}', headers={"Content-Type": "text/plain"})
    assert answer.status_code == 415
    assert "application/json" in answer.json()["detail"]


def test_numbers_that_json_does_not_have_are_refused(client: TestClient) -> None:
    body = b'{"kind":"train","model":{"family":"mlp","in_features":1,"out_features":1},"data":{"source":"digits"},'
    answer = client.post(
        "/v1/jobs", content=body + b'"steps":1,"optimizer":{"lr":NaN}}', headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 422
    assert answer.json()["status"] == 422


def test_a_long_value_is_not_echoed_whole(client: TestClient) -> None:
    error = refused(client, {**TRAIN, "device": "x" * 5000})["device"]
    assert len(error["got"]) < 300


@pytest.mark.parametrize("path", ["/v1/nothing", "/nothing/at/all", "/v1/jobs/", "/v1"])
def test_an_unknown_address_is_not_found(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 404
    assert answer.headers["content-type"] == "application/problem+json"


def test_a_wrong_method_names_the_right_ones(client: TestClient) -> None:
    answer = client.put("/v1/jobs")
    assert answer.status_code == 405
    assert answer.headers["content-type"] == "application/problem+json"
    assert set(answer.headers["allow"].split(", ")) & {"GET", "POST"}


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_beyond_the_limit_is_refused(client: TestClient, settings: Settings, *, chunked: bool) -> None:
    body = b" " * (settings.max_body_bytes + 1)
    content = iter([body]) if chunked else body
    answer = client.post("/v1/jobs", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 413
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["status"] == 413
    assert answer.json()["detail"].endswith("(TRIVET_MAX_BODY_BYTES)")


def test_a_deeply_nested_body_is_refused_not_crashed_on(client: TestClient) -> None:
    nested = b"[" * 100_000 + b"]" * 100_000
    answer = client.post("/v1/jobs", content=nested, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/problem+json"


def test_without_a_broker_everything_says_so_and_health_still_answers(data: Any, keys: Keys) -> None:
    broker = SecretStr(f"unix://{data.root}/nobody.sock")
    settings = Settings(data=data.root, redis_url=broker, allowed_hosts="testserver", broker_wait_s=0.1)
    with TestClient(create_app(settings), raise_server_exceptions=False) as client:
        client.headers["Authorization"] = "Bearer tvt_x_y"
        for path in ("/v1/jobs", "/readyz", "/metrics", "/v1/events", "/v1/jobs/job_0123456789abcdefghij?wait_s=1"):
            answer = client.get(path)
            assert answer.status_code == 503, path
            assert answer.headers["content-type"] == "application/problem+json"
            assert answer.headers["retry-after"]
        assert client.get("/healthz").status_code == 200


def test_a_broker_without_room_is_told_from_one_that_is_away(client: TestClient, redis: redis_py.Redis) -> None:
    redis.config_set("maxmemory", 1)
    try:
        answer = client.post("/v1/jobs", json=TRAIN)
    finally:
        redis.config_set("maxmemory", 0)
    assert answer.status_code == 503
    assert answer.json()["detail"].startswith("the broker cannot take this now: ")
    assert "memory" in answer.json()["detail"]
    assert client.post("/v1/jobs", json=TRAIN).status_code in (200, 201, 202)


def test_an_unexpected_error_tells_the_client_nothing_of_the_code(
    app: FastAPI, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(*_: object, **__: object) -> None:
        raise KeyError("a secret detail")

    monkeypatch.setattr(type(app.state.context.store.listing), "newest", explode)
    answer = client.get("/v1/jobs")
    assert answer.status_code == 500
    assert answer.headers["content-type"] == "application/problem+json"
    assert "secret" not in answer.text
    assert "Traceback" not in answer.text
