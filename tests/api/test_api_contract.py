"""The OpenAPI document agrees with the interface and with what the API answers."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any
from urllib.parse import quote

import pytest
from api_world import TRAIN, Keys, Worker, bearer
from fastapi import FastAPI
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lanes import examples, first_fast

from api.openapi.field_descriptions import FIELDS

PROMISED = {
    "/v1/jobs": {"post", "get"},
    "/v1/jobs/{job_id}": {"get", "delete"},
    "/v1/jobs/{job_id}/cancel": {"post"},
    "/v1/jobs/{job_id}/retry": {"post"},
    "/v1/jobs/{job_id}/events": {"get"},
    "/v1/events": {"get"},
    "/v1/jobs:batch": {"post"},
    "/v1/jobs:delete": {"post"},
    "/v1/jobs:check": {"post"},
    "/v1/jobs:counts": {"get"},
    "/v1/jobs:metrics": {"get"},
    "/v1/jobs/{job_id}/metrics": {"get"},
    "/v1/jobs/{job_id}/logs": {"get"},
    "/v1/jobs/{job_id}/bounds": {"get"},
    "/v1/jobs/{job_id}/tree": {"get"},
    "/v1/jobs/{job_id}/report": {"get"},
    "/v1/jobs/{job_id}/schedule": {"get"},
    "/v1/jobs/{job_id}/timeline": {"get"},
    "/v1/jobs/{job_id}/artifacts": {"get"},
    "/v1/jobs/{job_id}/notices": {"get"},
    "/v1/jobs/{job_id}/artifacts/{name}": {"get"},
    "/v1/jobs/{job_id}/share": {"post"},
    "/v1/jobs/{job_id}/share/{project}": {"delete"},
    "/v1/projects": {"post", "get"},
    "/v1/projects/{name}": {"get", "patch", "delete"},
    "/v1/projects/{name}/members/{owner}": {"put", "delete"},
    "/v1/files": {"post", "get"},
    "/v1/files/{file_id}": {"get", "delete"},
    "/v1/hosts": {"get"},
    "/v1/hosts/{name}/drain": {"post"},
    "/v1/hosts/{name}/resume": {"post"},
    "/v1/queue": {"get"},
    "/v1/alerts": {"get"},
    "/v1/shares": {"get"},
    "/v1/shares/{project}": {"put"},
    "/v1/kinds": {"get"},
    "/v1/me": {"get"},
    "/v1/kinds/{kind}/schema": {"get"},
    "/v1/keys": {"post", "get"},
    "/v1/keys/{key_id}": {"delete"},
    "/v1/keys/{key_id}/rotate": {"post"},
    "/v1/accounts": {"post", "get"},
    "/v1/accounts/{name}": {"delete"},
    "/v1/accounts/{name}/keys": {"post"},
    "/v1/accounts/{name}/disable": {"post"},
    "/v1/accounts/{name}/enable": {"post"},
    "/v1/audit": {"get"},
    "/v1/webhooks": {"post", "get"},
    "/v1/webhooks/secret": {"get"},
    "/v1/webhooks/secret/renew": {"post"},
    "/v1/webhooks/{webhook_id}": {"delete"},
    "/v1/webhooks/{webhook_id}/deliveries": {"get"},
    "/healthz": {"get"},
    "/readyz": {"get"},
    "/metrics": {"get"},
}
"""Every call of the interface, written down a second time: scripts rely on them, so one that is added is added here on
purpose, and none goes by accident."""


@pytest.fixture(scope="module")
def document(app: FastAPI) -> dict[str, Any]:
    return app.openapi()


def test_every_promised_call_is_documented_and_nothing_else(document: dict[str, Any]) -> None:
    assert {path: set(operations) for path, operations in document["paths"].items()} == PROMISED


def test_every_reference_resolves(document: dict[str, Any]) -> None:
    references = json.dumps(document).split('"$ref": "#/components/schemas/')[1:]
    named = {reference.partition('"')[0] for reference in references}
    assert named <= set(document["components"]["schemas"])


def test_errors_are_documented_as_problems(document: dict[str, Any]) -> None:
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert operation["summary"]
            assert operation.get("description"), path
            for status, response in operation["responses"].items():
                if int(status) >= 400 and "content" in response:
                    assert list(response["content"]) == ["application/problem+json"]
            if path.startswith("/v1"):
                assert {"401", "403", "422", "503"} <= set(operation["responses"])
                assert operation["security"]


def test_every_field_and_parameter_says_what_it_is(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    fields = {
        f"{name}.{field}": told for name, each in schemas.items() for field, told in each.get("properties", {}).items()
    }
    assert [name for name, told in fields.items() if not told.get("description")] == []
    operations = [each for operations in document["paths"].values() for each in operations.values()]
    parameters = [(each["operationId"], one) for each in operations for one in each.get("parameters", ())]
    assert [(name, one["name"]) for name, one in parameters if not one.get("description")] == []


def test_no_field_is_described_twice(document: dict[str, Any]) -> None:
    """A description that its model has as well would never be read."""
    read = {
        key
        for name, each in document["components"]["schemas"].items()
        for field, told in each.get("properties", {}).items()
        for key in (f"{name}.{field}", field)
        if told["description"].startswith(FIELDS.get(key, "nothing"))
    }
    assert set(FIELDS) - read == set()


def test_streams_are_documented_as_streams(document: dict[str, Any]) -> None:
    for path in ("/v1/events", "/v1/jobs/{job_id}/events", "/v1/jobs/{job_id}/logs"):
        assert "text/event-stream" in document["paths"][path]["get"]["responses"]["200"]["content"]


def test_promised_parameters_exist(document: dict[str, Any]) -> None:
    def parameters(path: str, method: str = "get") -> set[str]:
        return {parameter["name"] for parameter in document["paths"][path][method]["parameters"]}

    assert {"kind", "state", "label", "owner", "q", "order", "limit", "cursor"} <= parameters("/v1/jobs")
    assert {"after", "types", "limit"} <= parameters("/v1/jobs/{job_id}/events")
    assert {"names", "max_points", "format"} <= parameters("/v1/jobs/{job_id}/metrics")
    assert {"rank", "tail", "after", "stream", "attempt", "q"} <= parameters("/v1/jobs/{job_id}/logs")
    assert "wait_s" in parameters("/v1/jobs/{job_id}")
    assert "jobs" in parameters("/v1/events")
    assert "idempotency-key" in parameters("/v1/jobs", "post")


def test_a_job_has_the_promised_fields(document: dict[str, Any]) -> None:
    promised = {"id", "kind", "name", "labels", "owner", "state", "attempt", "priority", "spec", "result", "error"}
    promised |= {"created_at", "started_at", "ended_at", "progress", "placement"}
    assert promised <= set(document["components"]["schemas"]["Job"]["properties"])


def test_the_document_is_served_as_it_is(anonymous: TestClient, document: dict[str, Any]) -> None:
    assert anonymous.get("/openapi.json").json() == json.loads(json.dumps(document))


def resolve(schema: dict[str, Any], document: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return schema


def conforms(value: Any, schema: dict[str, Any], document: dict[str, Any]) -> bool:
    """Enough of JSON Schema to tell whether an answer has the documented shape."""
    schema = resolve(schema, document)
    if "anyOf" in schema:
        return any(conforms(value, choice, document) for choice in schema["anyOf"])
    if "enum" in schema and value not in schema["enum"]:
        return False
    types: dict[str, Any] = {
        "object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "null": type(None),
        "boolean": bool,
    }  # fmt: skip
    if "type" in schema and not isinstance(value, types[schema["type"]]):
        return False
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        missing = set(schema.get("required", ())) - set(value)
        return not missing and all(
            conforms(value[name], properties[name], document) for name in value if name in properties
        )
    if isinstance(value, list) and "items" in schema:
        return all(conforms(item, schema["items"], document) for item in value)
    return True


_words = st.text(st.characters(codec="utf-8", exclude_characters="/"), min_size=1, max_size=30)
_values = _words | st.integers(-5, 10**20).map(str) | st.sampled_from(["", "0-0", "null", "-1", "9" * 40])


@settings(
    max_examples=examples(50, 120),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_whatever_a_low_privilege_key_asks_the_answer_is_as_documented(
    anonymous: TestClient, keys: Keys, worker: Worker, document: dict[str, Any], data: st.DataObject
) -> None:
    """No call crashes, answers in an undocumented way, or lets a read key change anything."""
    path = data.draw(st.sampled_from(sorted(path for path in PROMISED if path.startswith("/v1/"))))
    method = data.draw(st.sampled_from(sorted(PROMISED[path])))
    operation = document["paths"][path][method]
    url, params, headers = path, {}, bearer(keys["read"])
    job_id = worker.store.jobs.submit(_spec(), "somebody")[0].id
    for parameter in operation.get("parameters", ()):
        if parameter["in"] == "path":
            known = {"job_id": job_id, "kind": "train"}.get(parameter["name"])
            value = known if known and data.draw(st.booleans()) else data.draw(_words)
            url = url.replace("{" + parameter["name"] + "}", quote(value, safe=""))
        elif parameter["in"] == "query" and data.draw(st.booleans()):
            params[parameter["name"]] = data.draw(_values) if parameter["name"] != "wait_s" else "0"
    body = data.draw(st.none() | st.dictionaries(_words, _values, max_size=3)) if method == "post" else None
    if path == "/v1/events":
        params["types"] = "nothing"  # else the answer never ends
    answer = anonymous.request(method, url, params=params, headers=headers, json=body)
    assert answer.status_code < 500, answer.text
    if method != "get":
        assert answer.status_code in (403, 404, 405, 422)
    if answer.status_code >= 400:
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["status"] == answer.status_code
    elif answer.headers["content-type"] == "application/json" and url.count("/") == path.count("/"):
        schema = operation["responses"][str(answer.status_code)]["content"]["application/json"]["schema"]
        assert conforms(answer.json(), schema, document)
    assert worker.store.jobs.get(job_id).state == "queued"


def _spec() -> Any:
    from service.jobs.kinds.registry import spec_adapter

    return spec_adapter.validate_python(TRAIN)


@pytest.mark.parametrize(
    "modules",
    first_fast(
        2, ["api.__main__, workers.agent.agent", "trivet.up", "api.main", "trivet", "trivet.client", "trivet.cli"]
    ),
)
def test_services_and_the_client_start_without_torch(modules: str) -> None:
    code = f"import sys, {modules}; print({{'numpy', 'torch', 'transformers'}} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).stdout == b"set()\n"


@pytest.mark.slow
def test_an_application_is_built_without_torch() -> None:
    code = (
        "import sys; from api.main import create_app; from service.jobs.settings import Settings; "
        "create_app(Settings()).openapi(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = "import sys, trivet; sys.exit(any(name in sys.modules for name in ('pydantic', 'httpx2', 'rich', 'torch')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
