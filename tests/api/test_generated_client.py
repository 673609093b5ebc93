"""A client that a stock generator makes from ``/openapi.json`` submits, lists, reads, cancels and follows jobs."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest
import redis as redis_py
from api_world import COMPILE, TRAIN, VERIFY, Keys, Server, Worker, serving

from service.jobs.settings import Settings
from service.jobs.store import Store

PACKAGE = "generated_from_openapi"


@dataclass(frozen=True)
class Generated:
    """The generated package, and its client of a running service."""

    client: Any

    def __getattr__(self, name: str) -> Any:
        """The generated class of this name."""
        return getattr(importlib.import_module(f"{PACKAGE}.models"), name)

    def call(self, operation: str, *args: Any, **fields: Any) -> Any:
        """The answer of an operation, which is named with its tag."""
        tag, _, name = operation.partition(".")
        return importlib.import_module(f"{PACKAGE}.api.{tag}.{name}").sync(*args, client=self.client, **fields)


@pytest.fixture(scope="module")
def service(broker: str, settings: Settings, connected: Store) -> Iterator[Server]:
    with redis_py.Redis.from_url(broker) as empty:
        empty.flushall()
    with serving(settings, connected) as server:
        yield server


@pytest.fixture(scope="module")
def generated(service: Server, connected: Store, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Generated]:
    folder = tmp_path_factory.mktemp("generated")
    (folder / "openapi.json").write_bytes(httpx2.get(f"{service.url}/openapi.json", timeout=300).content)
    (folder / "config.yaml").write_text("post_hooks: []")
    options = ["--path", "openapi.json", "--config", "config.yaml", "--output-path", PACKAGE, "--meta", "none"]
    subprocess.run(
        [sys.executable, "-m", "openapi_python_client", "generate", "--fail-on-warning", *options],
        cwd=folder,
        check=True,
        timeout=600,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        client = importlib.import_module(PACKAGE).AuthenticatedClient(
            service.url, token=Keys(connected)["admin"], raise_on_unexpected_status=True
        )
        yield Generated(client)


def test_operations_have_short_names_of_their_own(service: Server) -> None:
    paths = service.app.openapi()["paths"].values()
    names = [operation["operationId"] for operations in paths for operation in operations.values()]
    assert len(names) == len(set(names))
    assert {"submit_job", "list_jobs", "get_job", "cancel_job", "get_job_events"} <= set(names)
    assert [name for name in names if "v1" in name] == []


def test_every_operation_is_generated(generated: Generated, service: Server) -> None:
    for operations in service.app.openapi()["paths"].values():
        for operation in operations.values():
            importlib.import_module(f"{PACKAGE}.api.{operation['tags'][0]}.{operation['operationId']}")


def specs(models: Generated) -> dict[str, Any]:
    """A spec of each kind, written with the generated classes."""
    model = models.MlpConfig(in_features=64, hidden=[16], out_features=10)
    robustness = models.Robustness(data=models.DigitsData(), eps=0.01, norm=2)
    return {
        "train": models.TrainSpec(
            model=model, data=models.DigitsData(), steps=10, objective=models.Certified(eps=0.1), name="typed"
        ),
        "verify": models.VerifySpec(model=model, property_=models.RobustnessProperty(robustness)),
        "compile": models.CompileSpec(model=model),
    }


@pytest.mark.parametrize("kind", ["train", "verify", "compile"])
def test_a_job_of_each_kind_is_submitted(generated: Generated, connected: Store, kind: str) -> None:
    job = generated.call("jobs.submit_job", body=specs(generated)[kind])
    assert (job.kind, job.state) == (kind, "queued")
    held = connected.jobs.get(job.id).spec
    assert held["model"]["hidden"] == [16]
    if kind == "train":
        assert held["objective"]["eps"] == 0.1
    if kind == "verify":
        assert held["property"]["robustness"]["norm"] == 2


@pytest.mark.parametrize("spec", [TRAIN, VERIFY, COMPILE], ids=lambda spec: str(spec["kind"]))
def test_a_spec_that_was_read_says_the_same_again(generated: Generated, spec: dict[str, Any]) -> None:
    class_of = getattr(generated, f"{spec['kind'].capitalize()}Spec")
    assert class_of.from_dict(json.loads(json.dumps(spec))).to_dict() == spec


def test_a_job_is_listed_read_followed_and_cancelled(generated: Generated, connected: Store) -> None:
    spec = specs(generated)["train"]
    spec.priority = 1  # before what other tests left waiting
    ended = generated.call("jobs.submit_job", body=spec)
    worker = Worker(connected)
    attempt = worker.start(ended.id)
    worker.metrics(attempt, [0.5, 0.25])
    worker.succeed(attempt)
    page = generated.call("jobs.list_jobs", kind=generated.ListJobsKind.TRAIN, limit=1)
    assert [job.id for job in page.items] == [ended.id]
    assert generated.call("jobs.get_job", ended.id, wait_s=60).state == "succeeded"
    seen = generated.call("events.get_job_events", ended.id, types="metric").items
    assert [event.to_dict()["values"]["loss"] for event in seen] == [0.5, 0.25]
    later = generated.call("events.get_job_events", ended.id, types="metric", after=seen[0].id).items
    assert [event.id for event in later] == [seen[1].id]

    waiting = generated.call("jobs.submit_job", body=specs(generated)["train"])
    assert generated.call("jobs.cancel_job", waiting.id).state == "cancelled"


def test_a_refusal_is_read_as_a_problem(generated: Generated) -> None:
    spec = specs(generated)["train"]
    spec.model.in_features = 63
    refused = generated.call("jobs.submit_job", body=spec)
    assert refused.status == 422
    assert "64" in refused.errors[0].message
