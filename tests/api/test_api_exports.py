"""Jobs are told of where their specs say, live and at their end: read back by the packages that people use."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import redis as redis_py
from api_world import TRAIN, VERIFY
from export_receiver import ExportReceiver, export_receiver
from export_world import LOSSES, REPORT, RESULT, Service, World, exporting, look, world
from google.protobuf.json_format import Parse
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from own_broker import own_broker
from ports import free_port
from pydantic import SecretStr, ValidationError
from waiting import eventually

from api.deliveries import token_for
from service.jobs.settings import Settings
from service.jobs.store.keyspace import EXPORTS_DUE

TOKEN = "a-secret-of-the-operator"
PORT = free_port()
"""The port of the receiver, for which the operator's settings have the token."""


@pytest.fixture
def receiver() -> Iterator[ExportReceiver]:
    with export_receiver(PORT) as receiving:
        yield receiving


__all__ = ["own_broker", "world"]  # any service of a broker may make an export that is due


@pytest.fixture(scope="module")
def service(broker: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    tokens = f"http://127.0.0.1:{PORT}={TOKEN}, https://example.org=other"
    with exporting(broker, tmp_path_factory.mktemp("exports"), tokens) as serving:
        yield serving


def test_mlflow_gets_a_run_with_all_of_a_job(world: World, receiver: ExportReceiver) -> None:
    job = world.run({**TRAIN, "name": "mine", "labels": {"team": "a"}}, mlflow=f"{receiver.url}/")
    assert receiver.url in world.exported(job, "mlflow")
    ((run, told),) = receiver.runs.items()
    assert told["status"] == "FINISHED"
    tags = {each["key"]: each["value"] for each in told["tags"]}
    assert tags["trivet.result.gate.train"] == "inductor"
    assert (tags["trivet.job"], tags["trivet.state"], tags["trivet.label.team"]) == (job, "succeeded", "a")
    assert (tags["trivet.computed_by.host"], tags["trivet.computed_by.devices"]) == ("fake", "cpu")
    parameters = {each["key"]: each["value"] for each in told["params"]}
    assert (parameters["model.family"], parameters["steps"], parameters["optimizer.lr"]) == ("mlp", "10", "0.001")
    assert not any("export" in name for name in parameters)
    metrics = [(each["key"], each["step"], each["value"]) for each in told["metrics"]]
    assert metrics[:3] == [("loss", 1, 2.5), ("loss", 2, "NaN"), ("loss", 3, 1.25)]
    assert ("result.verdicts.verified", 3, 3.0) in metrics
    assert receiver.files == {f"/api/2.0/mlflow-artifacts/artifacts/7/{run}/artifacts/report.json": REPORT}


def test_an_export_that_fails_unexpectedly_is_noted(
    world: World, receiver: ExportReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> str:
        raise KeyError("a defect")

    monkeypatch.setattr("api.exports.mlflow.MlflowExporter.begin", fail)
    job = world.run(TRAIN, mlflow=receiver.url)
    (line,) = eventually(lambda: world.lines(job))
    assert line.startswith("export to mlflow failed: KeyError: 'a defect'; tried again in ")


@pytest.mark.parametrize("refusal", [503, {"experiment": 7}])
def test_what_fails_is_tried_again_and_the_job_stays_as_it_is(
    world: World, receiver: ExportReceiver, redis: redis_py.Redis, refusal: int | dict[str, Any]
) -> None:
    """The second attempt begins anew: what the first one left is deleted."""
    receiver.refusals.append(refusal)
    job = world.run(TRAIN, mlflow=receiver.url)
    (line,) = eventually(lambda: world.lines(job))
    assert re.fullmatch(r"export to mlflow failed: ExportFailed: .*; tried again in \d+ s", line)
    assert world.client.get(f"/v1/jobs/{job}").json()["state"] == "succeeded"
    receiver.runs["left"] = {"metrics": [1]}
    redis.zadd(EXPORTS_DUE(), {f"{job}:mlflow": 1}, xx=True)
    world.exported(job, "mlflow")
    assert len(receiver.runs) == 1
    assert "left" not in receiver.runs
    assert eventually(lambda: not redis.exists(EXPORTS_DUE()))
    assert world.store.jobs.get(job).result == RESULT


def losses(receiver: ExportReceiver) -> list[tuple[int, Any]]:
    """The losses of the only run, as an MLflow server keeps them: of what is alike, one."""
    (told,) = receiver.runs.values()
    found = {(each["step"], each["timestamp"], each["value"]) for each in told["metrics"] if each["key"] == "loss"}
    return sorted((step, value) for step, _, value in found)


def test_mlflow_follows_a_running_job_and_has_at_the_end_what_its_record_has(
    world: World, receiver: ExportReceiver, redis: redis_py.Redis
) -> None:
    """A retry that takes other values replaces the run, once the job has ended."""
    job = world.submit({**TRAIN, "retries": 1}, mlflow=receiver.url)
    ref = world.worker.start(job)
    world.worker.metrics(ref, [2.0, 1.5])
    look(job, "mlflow", redis)
    assert losses(receiver) == [(1, 2.0), (2, 1.5)]
    (run,) = receiver.runs
    assert receiver.runs[run]["status"] == "RUNNING"
    world.worker.metrics(ref, [1.0], first=3)
    world.worker.fail(ref)
    again = world.worker.start(job)
    world.worker.metrics(again, [1.0, 0.5], first=3)
    look(job, "mlflow", redis)
    assert list(receiver.runs) == [run], "what an attempt repeats is the same"
    assert losses(receiver) == [(1, 2.0), (2, 1.5), (3, 1.0), (4, 0.5)]
    world.worker.metrics(again, [0.7], first=4)
    world.worker.succeed(again, RESULT)
    assert world.exported(job, "mlflow").endswith(next(iter(receiver.runs)))
    assert list(receiver.runs) != [run]
    assert losses(receiver) == [(1, 2.0), (2, 1.5), (3, 1.0), (4, 0.7)]
    assert not redis.hexists(f"trivet:job:{job}", "export:mlflow")


def test_what_was_sent_and_not_noted_is_not_there_twice(world: World, redis: redis_py.Redis) -> None:
    """The process that exports may end between the two."""
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    job = world.submit(TRAIN, tensorboard=True)
    ref = world.worker.start(job)
    world.worker.metrics(ref, [2.0])
    look(job, "tensorboard", redis)
    noted = redis.hget(f"trivet:job:{job}", "export:tensorboard")
    world.worker.metrics(ref, [1.5], first=2)
    look(job, "tensorboard", redis)
    redis.hset(f"trivet:job:{job}", "export:tensorboard", noted)
    world.worker.metrics(ref, [1.0], first=3)
    look(job, "tensorboard", redis)
    (folder,) = (world.settings.layout.root / "tensorboard").glob(job)
    read = accumulators.EventAccumulator(str(folder))
    read.Reload()
    assert [(each.step, each.value) for each in read.Scalars("loss")] == [(1, 2.0), (2, 1.5), (3, 1.0)]


def test_a_target_that_is_down_holds_no_job_and_is_tried_at_its_end(world: World, receiver: ExportReceiver) -> None:
    receiver.refusals += [503]
    job = world.submit(TRAIN, mlflow=receiver.url)
    ref = world.worker.start(job)
    eventually(lambda: world.lines(job))
    world.worker.metrics(ref, LOSSES)
    assert world.worker.succeed(ref, RESULT).state == "succeeded"
    world.exported(job, "mlflow")
    assert len(losses(receiver)) == 3


@pytest.mark.slow
def test_a_failed_job_is_told_of_with_its_error_and_again_after_a_retry(world: World, receiver: ExportReceiver) -> None:
    job = world.run(TRAIN, mlflow=receiver.url, fails=True)
    world.exported(job, "mlflow")
    ((_, told),) = receiver.runs.items()
    assert told["status"] == "FAILED"
    assert {"key": "trivet.error", "value": "RuntimeError: it broke"} in told["tags"]
    assert world.client.post(f"/v1/jobs/{job}/retry").status_code == 202
    world.worker.succeed(world.worker.start(job), RESULT)
    eventually(lambda: [each["status"] for each in receiver.runs.values()] == ["FINISHED"])


def test_a_collector_gets_metrics_and_a_record(world: World, receiver: ExportReceiver) -> None:
    job = world.run(VERIFY, otlp=receiver.url)
    world.exported(job, "otlp")
    assert TOKEN not in world.client.get(f"/v1/jobs/{job}").text
    assert {each.headers["authorization"] for each in receiver.taken} == {f"Bearer {TOKEN}"}
    points = {}
    for request in (each for each in receiver.taken if each.path == "/v1/metrics"):
        (resource,) = Parse(request.body, ExportMetricsServiceRequest()).resource_metrics
        assert {each.key: each.value.string_value for each in resource.resource.attributes}["trivet.job"] == job
        (metric,) = resource.scope_metrics[0].metrics
        points[metric.name] = list(metric.gauge.data_points)
    losses = points["trivet.job.loss"]
    assert [each.attributes[0].value.int_value for each in losses] == [1, 2, 3]
    assert [each.as_double for each in losses] == pytest.approx(LOSSES, nan_ok=True)
    assert [each.as_double for each in points["trivet.job.result.verdicts.verified"]] == [3.0]
    (sent,) = (each for each in receiver.taken if each.path == "/v1/logs")
    (record,) = Parse(sent.body, ExportLogsServiceRequest()).resource_logs[0].scope_logs[0].log_records
    said = {each.key: each.value.string_value for each in record.attributes}
    assert (record.severity_text, said["spec.property.robustness.eps"]) == ("INFO", "0.01")
    assert said["result.gate.train"] == "inductor"
    assert said["artifact.report.json"] == hashlib.sha256(REPORT).hexdigest()


def test_tensorboard_reads_the_event_files(world: World) -> None:
    accumulators = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="event files are read by TensorBoard's reader"
    )
    job = world.run(TRAIN, tensorboard=True)
    folder = Path(world.exported(job, "tensorboard").removeprefix("exported to tensorboard: "))
    assert folder == world.settings.layout.root / "tensorboard" / job
    read = accumulators.EventAccumulator(str(folder))
    read.Reload()
    assert sorted(read.Tags()["scalars"]) == [
        "loss",
        "result/loss",
        "result/verdicts.unknown",
        "result/verdicts.verified",
    ]
    losses = read.Scalars("loss")
    assert [each.step for each in losses] == [1, 2, 3]
    assert [each.value for each in losses] == pytest.approx(LOSSES, nan_ok=True)
    assert abs(losses[0].wall_time - time.time()) < 3600
    assert sorted(read.Tags()["tensors"]) == ["facts", "spec"]
    (spec,) = read.Tensors("spec")
    assert '"steps": 10' in spec.tensor_proto.string_val[0].decode()


NOWHERE = [
    "ftp://host/",
    "https://",
    "https://user:secret@host/",
    "https://host/?token=1",
    "https://host/#part",
    "host:80",
]


def test_a_url_that_leads_to_no_server_is_refused(world: World) -> None:
    for url in (*NOWHERE, "https://a..b/"):
        for target in ("mlflow", "otlp"):
            answer = world.client.post("/v1/jobs", json={**TRAIN, "export": {target: url}})
            assert answer.status_code == 422
            (error,) = answer.json()["errors"]
            assert (error["path"], error["got"]) == (f"export.{target}", url)
            assert "https:// URL with a host" in error["expected"]


@pytest.mark.parametrize("url", NOWHERE)
def test_an_operator_cannot_name_it_either(url: str) -> None:
    with pytest.raises(ValidationError, match="export_mlflow"):
        Settings(data=Path("unused"), export_mlflow=url)
    with pytest.raises(ValidationError, match="without `=`") as refused:
        Settings(data=Path("unused"), export_tokens=SecretStr("a-token"))
    assert "a-token" not in str(refused.value)
    with pytest.raises(ValidationError, match=r"names 'mlflow\.example\.com'.*expected URL=token") as refused:
        Settings(data=Path("unused"), export_tokens=SecretStr("mlflow.example.com=a-token"))
    assert "a-token" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "token"),
    [
        ("https://ml.example/base", "one"),
        ("https://ML.example:443/base/", "one"),
        ("https://ml.example/base/v2/x", "two"),
        ("https://ml.example/base2", None),
        ("https://ml.example/", None),
        ("http://ml.example/base", None),
        ("https://ml.example:8443/base", None),
        ("https://evil.example/base", None),
        ("https://ml.example/base/../other", None),
        ("https://ml.example/base/%2e%2e/other", None),
        ("https://ml.example/base/..%2fother", None),
    ],
)
def test_a_token_goes_only_where_the_operator_said(url: str, token: str | None) -> None:
    assert token_for(url, {"https://ml.example/base/": "one", "https://ml.example/base/v2": "two"}) == token


@pytest.mark.slow
def test_a_sweep_tells_of_its_jobs(world: World, receiver: ExportReceiver) -> None:
    parent = world.submit({**TRAIN, "sweep": {"grid": {"seed": [1, 2]}}}, otlp=receiver.url)
    jobs = [each["id"] for each in world.client.get("/v1/jobs", params={"sweep": parent}).json()["items"]]
    for job in jobs:
        world.worker.succeed(world.worker.start(job))
    told = eventually(lambda: len(found := [each for each in receiver.taken if each.path == "/v1/logs"]) == 2 and found)
    for job in jobs:
        assert any(f"job {job} succeeded" in each.body.decode() for each in told)
    assert world.lines(parent) == []


MLFLOW = shutil.which("mlflow")


@pytest.mark.slow
@pytest.mark.skipif(MLFLOW is None, reason="a run is read back from MLflow's own server, which is not installed")
def test_mlflow_itself_has_the_run(world: World, tmp_path: Path) -> None:
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    words = ["server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    words += [f"--backend-store-uri=sqlite:///{tmp_path}/mlflow.db", f"--artifacts-destination={tmp_path}/mlruns"]
    with subprocess.Popen([str(MLFLOW), *words], cwd=tmp_path, start_new_session=True) as server:
        try:
            eventually(lambda: is_up(address))
            for _ in range(2):  # exported twice, it is one run
                job = world.run({**TRAIN, "name": "mine"}, mlflow=address)
                run = world.exported(job, "mlflow").rpartition("/")[2]
            told = mlflow(address, "runs", "describe", "--run-id", run)
            listed = mlflow(address, "artifacts", "list", "--run-id", run)
        finally:
            os.killpg(server.pid, 15)
    described = json.loads(told)
    assert (described["info"]["run_name"], described["info"]["status"]) == ("mine", "FINISHED")
    assert described["data"]["params"]["model.family"] == "mlp"
    assert described["data"]["metrics"]["loss"] == 1.25
    assert described["data"]["metrics"]["result.verdicts.verified"] == 3
    assert described["data"]["tags"]["trivet.job"] == job
    assert [each["path"] for each in json.loads(listed)] == ["report.json"]


def is_up(address: str) -> bool:
    try:
        return httpx2.get(f"{address}/health", trust_env=False).is_success
    except httpx2.HTTPError:
        return False


def mlflow(address: str, *words: str) -> str:
    environment = {**os.environ, "MLFLOW_TRACKING_URI": address}
    return subprocess.run([str(MLFLOW), *words], env=environment, capture_output=True, text=True, check=True).stdout
