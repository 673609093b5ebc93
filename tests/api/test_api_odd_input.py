"""Texts and numbers that nobody writes by mistake: they are refused in the field's name, and nothing breaks."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import pytest
from api_world import TRAIN, VERIFY, Keys, Worker, bearer, submit
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lanes import examples

LONE = "\ud800"
SPECS: list[dict[str, Any]] = [
    TRAIN,
    VERIFY,
    {
        "kind": "verify",
        "model": TRAIN["model"],
        "property": {"box": {"lower": [0.0] * 64, "upper": [1.0] * 64, "output": [{"coefficients": [1.0] * 10}]}},
    },
    {"kind": "compile", "model": TRAIN["model"]},
]


def post(client: TestClient, body: str) -> Any:
    return client.post("/v1/jobs", content=body.encode(), headers={"content-type": "application/json"})


@pytest.mark.parametrize(
    "body",
    [
        '{"kind": "train", "kind": "verify"}',
        '{"model": {"family": "mlp", "hidden": [1], "hidden": [2]}}',
        '{"steps": 1, "name": "a", "st\\u0065ps": 2}',
    ],
)
def test_a_key_that_is_there_twice_is_refused_by_name(client: TestClient, body: str) -> None:
    """Of two values a reader and the service may take different ones."""
    name = {"k": "kind", "m": "hidden", "s": "steps"}[body[2]]
    answer = post(client, body)
    assert answer.status_code == 422
    assert f"the key '{name}' is there twice" in answer.json()["detail"]


def test_every_call_with_a_json_body_refuses_keys_that_are_there_twice(client: TestClient) -> None:
    document = client.get("/openapi.json").json()["paths"]
    taking = {
        (method, path.replace("{", "").replace("}", ""))
        for path, calls in document.items()
        for method, call in calls.items()
        if "application/json" in call.get("requestBody", {}).get("content", {})
    }
    assert ("post", "/v1/jobs") in taking
    for method, path in taking:
        headers = {"content-type": "application/json"}
        answer = client.request(method, path, content=b'{"a": 1, "a": 2}', headers=headers)
        assert "is there twice" in answer.text, (method, path)


@pytest.mark.parametrize(
    "header", [("host", "localhost"), ("authorization", ""), ("idempotency-key", "a"), ("content-type", "text/plain")]
)
def test_a_request_that_says_a_header_twice_is_refused(client: TestClient, header: tuple[str, str]) -> None:
    """A proxy in front may act on the one and the service on the other."""
    name, value = header
    once = [(name, value or client.headers[name])]
    assert client.get("/v1/me", headers=once).status_code == 200
    answer = client.get("/v1/me", headers=[*once, (name, "evil.example")])
    assert (answer.status_code, name in answer.json()["detail"].lower()) == (400, True)


def test_a_compressed_body_is_not_taken_for_a_plain_one(client: TestClient) -> None:
    answer = client.post("/v1/files", content=b"compressed", headers={"content-encoding": "gzip"})
    assert (answer.status_code, "gzip" in answer.json()["detail"]) == (415, True)


@pytest.mark.parametrize(
    ("call", "name", "said"),
    [
        ("POST /v1/jobs:delete?state=failed&ended_befor=2020-01-01T00:00Z", "ended_befor", "'ended_before'"),
        ("GET /v1/jobs?owner=ann&owner=bob", "owner", "twice"),
        ("GET /v1/me?x=1", "x", "no parameter"),
        ("GET /v1/jobs?label=", "label", "^[^=]"),
        ("GET /v1/jobs/ID/logs?after=1-0&attempt=1", "attempt", "every line"),
        ("STREAM /v1/jobs/ID/logs?rank=1", "rank", "a live stream"),
    ],
)
def test_a_parameter_that_would_be_ignored_is_refused(client: TestClient, call: str, name: str, said: str) -> None:
    """A misspelt filter would list, or delete, what it was to leave out."""
    method, path = call.replace("ID", submit(client)).replace("STREAM", "GET").split()
    accept = "text/event-stream" if call.startswith("STREAM") else "*/*"
    (error,) = client.request(method, path, headers={"accept": accept}).json()["errors"]
    assert error["path"] == name
    assert said in str(error)


def test_a_list_takes_several_values_of_a_parameter(client: TestClient) -> None:
    assert client.get("/v1/jobs?state=failed&state=queued&ticket=x").status_code == 200


@pytest.mark.parametrize(
    "change",
    [
        {"name": LONE},
        {LONE: 1},
        {"kind": LONE},
        {"labels": {"team": LONE}},
        {"labels": {LONE: "a"}},
        {"model": {"family": LONE}},
        {"data": {"source": LONE}},
        {"after": [LONE]},
        {"steps": LONE},
    ],
)
def test_a_lone_surrogate_is_refused_and_echoed_as_it_was_sent(client: TestClient, change: dict[str, Any]) -> None:
    answer = post(client, json.dumps({**TRAIN, **change}))
    assert answer.status_code == 422
    assert answer.content.decode("utf-8")
    assert answer.json()["errors"]


_odd = st.one_of(
    st.none(), st.booleans(), st.text(max_size=5), st.sampled_from([LONE, "\x00", "1e400", "nan", "\x1b[31m"]),
    st.sampled_from([0, -1, 2**53 + 1, 2**63, 2**64, 10**30, 10**400, -(10**400)]),
    st.sampled_from([1e308, -1e308, 5e-324, float("inf"), float("-inf"), float("nan"), 0.5]),
    st.just([]), st.just({}), st.just([[[[]]]]), st.just({LONE: LONE}), st.just([1, "a", None]),
)  # fmt: skip


def _changed(value: Any, data: st.DataObject) -> Any:
    """A copy in which one value somewhere within is an odd one, or one that nobody asked for is beside."""
    value = deepcopy(value)
    target = value
    while True:
        if isinstance(target, dict):
            name = data.draw(st.sampled_from([*sorted(target), "odd"]))
        else:
            name = data.draw(st.integers(0, len(target) - 1))
        inside = target.get(name) if isinstance(target, dict) else target[name]
        if not isinstance(inside, (dict, list)) or not inside or data.draw(st.booleans()):
            target[name] = data.draw(_odd)
            return value
        target = inside


@settings(
    max_examples=examples(25, 150),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_no_spec_breaks_the_service(client: TestClient, data: st.DataObject) -> None:
    body = json.dumps(_changed(data.draw(st.sampled_from(SPECS)), data))
    answer = post(client, body)
    assert answer.status_code in (201, 400, 422), answer.text
    if answer.status_code == 201:
        assert client.get(f"/v1/jobs/{answer.json()['id']}").status_code == 200
    else:
        assert answer.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize("number", ["9007199254740993", "-9007199254740993", "1" + "0" * 22 + "1"])
@pytest.mark.parametrize("field", ["lower", "upper", "coefficients", "threshold"])
def test_an_integer_that_would_be_rounded_is_refused(client: TestClient, field: str, number: str) -> None:
    spec = deepcopy(SPECS[2])
    box = spec["property"]["box"]
    if field in box:
        box[field][0] = int(number)
    else:
        box["output"][0][field] = int(number) if field == "threshold" else [int(number), *[0.0] * 9]
    errors = post(client, json.dumps(spec)).json()["errors"]
    (error,) = (each for each in errors if "two float64 numbers" in each["message"])
    assert field in error["path"]
    assert error["message"].startswith(f"{number} is between")
    assert error["expected"].startswith("a number that float64 has, such as ")


@pytest.mark.parametrize("number", ["1e400", "-1e400", "NaN", "Infinity", "1" + "0" * 400])
def test_a_number_that_is_not_finite_is_refused(client: TestClient, number: str) -> None:
    body = json.dumps(SPECS[2]).replace("[0.0,", f"[{number},", 1)
    assert number in body
    errors = post(client, body).json()["errors"]
    assert "property.box.lower.0" in [error["path"] for error in errors]


IDS = [str(2**64), f"0-{2**64}", f"{2**64}-0", "9" * 40, "1-2-3", "-1", "1_0-0", "٣-0", "5-", "9" * 4500, ""]


@pytest.mark.parametrize("text", IDS)
def test_event_ids_that_the_broker_cannot_have_are_refused(client: TestClient, text: str) -> None:
    job_id = submit(client)
    for path in (f"/v1/jobs/{job_id}/events", f"/v1/jobs/{job_id}/logs"):
        answer = client.get(path, params={"after": text})
        assert answer.status_code == (200 if text == "5-" else 422), answer.text


@pytest.mark.parametrize("text", [*IDS[:7], f"{2**64};", f"1;job={2**64}", "1;job=", "1;=1", "9" * 4500 + ";"])
def test_positions_of_streams_that_the_broker_cannot_have_are_refused(
    client: TestClient, keys: Keys, text: str
) -> None:
    headers = {"accept": "text/event-stream", "last-event-id": text}
    for path in ("/v1/events", f"/v1/jobs/{submit(client)}/events", f"/v1/jobs/{submit(client)}/logs"):
        answer = client.get(path, headers={**bearer(keys["read"]), **headers})
        assert answer.status_code == 422, (path, answer.text)


@pytest.mark.parametrize("detail", [[1, 2], "text", 3, None, {"step": True}, {"step": "1"}])
def test_a_span_whose_detail_is_of_another_kind_belongs_to_no_step(
    client: TestClient, worker: Worker, detail: Any
) -> None:
    job_id = submit(client)
    ref = worker.start(job_id)
    worker.emit(ref, [{"type": "span", "name": "odd", "start": 1.0, "end": 2.0, "detail": detail}])
    answer = client.get(f"/v1/jobs/{job_id}/timeline")
    assert answer.status_code == 200
    (apart,) = answer.json()["apart"]
    assert apart["detail"] == (detail if isinstance(detail, dict) else {})
