"""The client of each release reads what this service answers.

``tests/released`` keeps, for each release, the JSON Schemas of what its client makes of answers: the fields that it
needs, their types, and the values that it knows. ``docs/site/public.py --client VERSION`` writes them.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2
import jsonschema
import pytest
from cli_world import Cli, Worker

from service.jobs.records import Artifact
from service.jobs.store import Store

RELEASED = sorted((Path(__file__).parents[1] / "released").glob("*.json"))


def answers(trivet: Cli, store: Store, worker: Worker) -> dict[str, list[Any]]:
    """What the service answers to each call, each item by itself where the client reads items."""
    headers = {"Authorization": f"Bearer {trivet.variables['TRIVET_KEY']}"}
    with httpx2.Client(base_url=trivet.variables["TRIVET_URL"], headers=headers) as http:
        spec = json.loads(Path(trivet.spec()).read_text())
        made = http.post("/v1/jobs", json=spec).json()
        file = http.post("/v1/files", content=b"bytes", params={"name": "a.bin"}).json()
        ref = worker.start(made["id"])
        entry = Artifact(name="a", bytes=1, sha256="0" * 64, media_type="text/plain", created_at=datetime.now(UTC))
        store.attempts.record_artifact(ref, entry)
        http.post("/v1/jobs", json=spec)
        calls = {
            "/v1/alerts": "/v1/alerts?all=true", "/v1/jobs/{job}": f"/v1/jobs/{made['id']}",
            "/v1/jobs/{job}/artifacts": f"/v1/jobs/{made['id']}/artifacts",
        }  # fmt: skip
        pages = ("/v1/jobs", "/v1/queue", "/v1/jobs/{job}", "/v1/projects/default")
        read = {"POST /v1/jobs": [made], "POST /v1/files": [file]}
        for call in json.loads(RELEASED[-1].read_text()).keys() - read.keys():
            got = http.get(calls.get(call, call)).raise_for_status().json()
            read[call] = [got] if call in pages else got["items"]
    return read


def faults(schemas: Mapping[str, Any], read: Mapping[str, list[Any]]) -> list[str]:
    return [
        f"{call}: {fault.json_path}: {fault.message}"
        for call, schema in schemas.items()
        for answer in read[call]
        for fault in jsonschema.Draft202012Validator(schema).iter_errors(answer)
    ]


@pytest.mark.parametrize("release", RELEASED, ids=lambda path: path.stem)
def test_the_client_of_a_release_reads_what_this_service_answers(
    trivet: Cli, store: Store, worker: Worker, release: Path
) -> None:
    schemas, read = json.loads(release.read_text()), answers(trivet, store, worker)
    assert all(read.values()), {call: len(items) for call, items in read.items()}
    assert faults(schemas, read) == []
    changed = copy.deepcopy(read)
    del changed["/v1/jobs/{job}"][0]["attempt"]
    changed["POST /v1/jobs"][0]["state"] = "dreaming"
    assert [fault.split(": ")[0] for fault in faults(schemas, changed)] == ["/v1/jobs/{job}", "POST /v1/jobs"]
