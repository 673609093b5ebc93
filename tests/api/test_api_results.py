"""What a job measured, printed, proved and produced."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import tarfile
import threading
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import redis as redis_py
from api_world import COMPILE, TRAIN, VERIFY, Worker, submit
from fastapi.testclient import TestClient

from service.jobs.records import Artifact, AttemptRef
from service.jobs.store import Store
from service.jobs.store.artifacts import FOLDER


def bound(instance: int, verdict: str = "verified", **fields: Any) -> dict[str, Any]:
    row = {"lower": [0.5, None], "upper": [1.5, 2.0], "margin": 0.5, "method": "crown", "seconds": 0.1, "domains": 1}
    return {"type": "bound", "instance": instance, "verdict": verdict, **row, "counterexample": None, **fields}


def log(line: str, rank: int | None = 0, **fields: Any) -> dict[str, Any]:
    return {"type": "log", "stream": "stdout", "line": line, "rank": rank, **fields}


def series(client: TestClient, job_id: str, **params: Any) -> dict[str, Any]:
    answer = client.get(f"/v1/jobs/{job_id}/metrics", params=params)
    assert answer.status_code == 200, answer.text
    return dict(answer.json()["series"])


def test_metrics_are_series_by_name(client: TestClient, worker: Worker, store: Store) -> None:
    job_id = submit(client)
    ref = worker.start(job_id)
    worker.emit(ref, [{"type": "metric", "step": 1, "values": {"loss": 2.0, "lr": 0.1}, "time": 5.0}])
    worker.emit(ref, [{"type": "metric", "step": 2, "values": {"loss": float("nan")}, "time": 6.0}])
    assert series(client, job_id) == {
        "loss": {"step": [1, 2], "time": [5.0, 6.0], "value": [2.0, None]},
        "lr": {"step": [1], "time": [5.0], "value": [0.1]},
    }
    assert set(series(client, job_id, names="lr")) == {"lr"}
    assert series(client, job_id, names="nothing") == {}
    assert client.get(f"/v1/jobs/{job_id}/metrics").json()["after"] == store.events.latest_id(job_id)


def test_long_series_are_thinned_and_keep_their_extremes(client: TestClient, worker: Worker) -> None:
    job_id = submit(client)
    ref = worker.start(job_id)
    values = [float(step % 7) for step in range(3000)]
    values[1234], values[2222] = 99.0, -99.0
    worker.metrics(ref, values, first=0)
    thin = series(client, job_id, max_points=50)["loss"]
    assert len(thin["step"]) == len(thin["value"]) == len(thin["time"]) <= 50
    assert (thin["step"][0], thin["step"][-1]) == (0, 2999)
    assert {99.0, -99.0} <= set(thin["value"])
    assert all(values[step] == value for step, value in zip(thin["step"], thin["value"], strict=True))


def test_a_step_that_a_later_attempt_repeats_counts_once(client: TestClient, worker: Worker, store: Store) -> None:
    job_id = submit(client)
    ref = worker.start(job_id)
    worker.metrics(ref, [5, 4, 3])
    worker.fail(ref)
    store.jobs.retry(job_id)
    again = worker.start(job_id)
    worker.metrics(again, [2, 1], first=3)
    assert series(client, job_id)["loss"]["step"] == [1, 2, 3, 4]
    assert series(client, job_id)["loss"]["value"] == [5, 4, 2, 1]


def test_metrics_as_csv(client: TestClient, worker: Worker) -> None:
    job_id = submit(client)
    worker.metrics(worker.start(job_id), [2.5, 1.5], name='a,"b')
    answer = client.get(f"/v1/jobs/{job_id}/metrics", params={"format": "csv"})
    assert answer.headers["content-type"].startswith("text/csv")
    rows = list(csv.reader(answer.text.splitlines()))
    assert rows[0] == ["name", "step", "time", "value"]
    assert [(name, step, value) for name, step, _, value in rows[1:]] == [('a,"b', "1", "2.5"), ('a,"b', "2", "1.5")]


@pytest.mark.parametrize("params", [{"max_points": 3}, {"max_points": "x"}, {"format": "xml"}])
def test_bad_metric_parameters_are_refused(client: TestClient, params: dict[str, Any]) -> None:
    answer = client.get(f"/v1/jobs/{submit(client)}/metrics", params=params)
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["path"] == next(iter(params))


def test_a_trimmed_stream_is_made_up_for_by_the_attempts_records(
    client: TestClient, worker: Worker, redis: redis_py.Redis
) -> None:
    job_id = submit(client)
    ref = worker.start(job_id)
    events = [{"type": "metric", "step": step, "values": {"loss": 1.0}, "time": 1.0, "rank": 0} for step in range(9)]
    lines = [log(f"line {n}", time=2.0) for n in range(3)]
    worker.emit(ref, [*events, *lines])
    folder = worker.store.artifacts.data.job(job_id).attempt(1)
    folder.mkdir(parents=True)
    record = "".join(json.dumps(event) + "\n" for event in [*events, *lines])
    (folder / "events.jsonl").write_text(record + '{"type": "metric", "half": ')
    redis.xtrim(f"trivet:job:{job_id}:events", maxlen=2, approximate=False)
    assert series(client, job_id)["loss"]["step"] == list(range(9))
    assert [line.split("] ")[1] for line in client.get(f"/v1/jobs/{job_id}/logs").text.splitlines()] == [
        "line 0", "line 1", "line 2",
    ]  # fmt: skip
    assert client.get(f"/v1/jobs/{job_id}/events").json()["gap"] is True


def test_logs_are_lines_with_time_and_rank(client: TestClient, worker: Worker) -> None:
    job_id = submit(client)
    ref = worker.start(job_id)
    worker.emit(ref, [log("a", 0, time=0.25), log("b", 1, time=1.0), log("c", None, time=2.0, stream="service")])
    answer = client.get(f"/v1/jobs/{job_id}/logs")
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert answer.text.splitlines() == [
        "1970-01-01T00:00:00.250Z [rank 0] a",
        "1970-01-01T00:00:01.000Z [rank 1] b",
        "1970-01-01T00:00:02.000Z [service] c",
    ]
    parsed = client.get(f"/v1/jobs/{job_id}/logs", params={"format": "jsonl"}).text.splitlines()
    assert [json.loads(line)["line"] for line in parsed] == ["a", "b", "c"]


def test_logs_by_rank_tail_and_position(client: TestClient, worker: Worker, store: Store) -> None:
    job_id = submit(client)
    ref = worker.start(job_id)
    worker.emit(ref, [log(str(n), n % 2) for n in range(10)])

    def lines(**params: Any) -> list[str]:
        return [
            line.rpartition("] ")[2] for line in client.get(f"/v1/jobs/{job_id}/logs", params=params).text.splitlines()
        ]

    assert lines(rank=1) == ["1", "3", "5", "7", "9"]
    assert lines(tail=3) == ["7", "8", "9"]
    assert lines(rank=0, tail=2) == ["6", "8"]
    assert lines(tail=0) == []
    sixth = [item.id for item in store.events.page(job_id, types={"log"}).items][5]
    assert lines(after=sixth) == ["6", "7", "8", "9"]
    worker.emit(ref, [log("An Error", 1, stream="stderr"), log("lines were not relayed", 1) | {"live": True}])
    assert lines(q="ERROR") == lines(q="error", tail=5) == lines(stream="stderr") == ["An Error"]
    assert lines(level="warning") == lines(level="error", tail=5) == ["An Error"]
    assert lines(rank=0, q="error") == lines(attempt=2) == lines(attempt=2, tail=3) == []
    assert lines(attempt=1, tail=2) == ["9", "An Error"]
    assert client.get(f"/v1/jobs/{job_id}/logs", params={"attempt": 0}).status_code == 422


def test_event_pages_continue_and_filter(client: TestClient, worker: Worker) -> None:
    job_id = submit(client)
    ref = worker.start(job_id)
    worker.metrics(ref, range(5))
    path = f"/v1/jobs/{job_id}/events"
    whole = client.get(path).json()
    assert [item["type"] for item in whole["items"]] == ["state"] * 3 + ["metric"] * 5
    assert whole["gap"] is False
    assert all(item["job"] == job_id for item in whole["items"])
    first = client.get(path, params={"limit": 3, "types": "metric"}).json()
    rest = client.get(path, params={"types": "metric", "after": first["next_after"]}).json()
    assert [item["step"] for item in first["items"] + rest["items"]] == [1, 2, 3, 4, 5]
    assert client.get(path, params={"after": rest["next_after"]}).json()["items"] == []


def test_bounds_are_rows_by_instance_and_page(client: TestClient, worker: Worker) -> None:
    job_id = submit(client, VERIFY)
    ref = worker.start(job_id)
    worker.emit(ref, [bound(n) for n in (2, 0, 1, 4)])
    worker.emit(ref, [bound(2, "falsified", counterexample=[0.5], counterexample_outputs=[1.5, None])])
    path = f"/v1/jobs/{job_id}/bounds"
    first = client.get(path, params={"limit": 3}).json()
    rest = client.get(path, params={"limit": 3, "cursor": first["next_cursor"]}).json()
    assert [row["instance"] for row in first["items"]] == [0, 1, 2]
    assert [row["instance"] for row in rest["items"]] == [4]
    assert rest["next_cursor"] is None
    row = first["items"][2]
    assert (row["verdict"], row["counterexample"], row["lower"]) == ("falsified", [0.5], [0.5, None])
    assert (row["counterexample_outputs"], row["onnxruntime_outputs"]) == ([1.5, None], None)
    assert set(row) == {
        "instance", "name", "verdict", "lower", "upper", "margin", "method", "decided_by", "reason", "seconds",
        "domains", "counterexample", "counterexample_outputs", "onnxruntime_outputs", "sample",
        "sample_outputs", "label", "prediction",
        "note",
    }  # fmt: skip


def test_bounds_of_another_kind_and_bad_cursors_are_refused(client: TestClient) -> None:
    answer = client.get(f"/v1/jobs/{submit(client)}/bounds")
    assert answer.status_code == 422
    assert "verify job" in answer.json()["errors"][0]["expected"]
    verify = submit(client, VERIFY)
    assert client.get(f"/v1/jobs/{verify}/bounds", params={"cursor": "x"}).status_code == 422
    assert client.get(f"/v1/jobs/{verify}/bounds").json() == {"items": [], "next_cursor": None}


@pytest.mark.parametrize("spec", [TRAIN, VERIFY], ids=lambda spec: spec["kind"])
def test_the_report_of_a_job_is_its_result(client: TestClient, worker: Worker, spec: dict[str, Any]) -> None:
    job_id = submit(client, spec)
    early = client.get(f"/v1/jobs/{job_id}/report")
    assert early.status_code == 404
    assert "queued" in early.json()["detail"]
    worker.succeed(worker.start(job_id), {"answer": 42})
    assert client.get(f"/v1/jobs/{job_id}/report").json() == {"answer": 42}


def test_a_failed_job_says_why_it_has_no_report(client: TestClient, worker: Worker) -> None:
    job_id = submit(client)
    worker.fail(worker.start(job_id), "the loss is not finite")
    answer = client.get(f"/v1/jobs/{job_id}/report")
    assert answer.status_code == 404
    assert "the loss is not finite" in answer.json()["detail"]


def publish(store: Store, ref: AttemptRef, name: str, content: bytes, media_type: str = "text/plain") -> Path:
    path = store.artifacts.data.job(ref.job_id).artifacts / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    artifact = Artifact(
        name=name,
        bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        media_type=media_type,
        created_at=datetime.now(UTC),
    )
    store.attempts.record_artifact(ref, artifact)
    return path


def test_the_report_of_a_compile_job_is_what_it_published(client: TestClient, worker: Worker, store: Store) -> None:
    job_id = submit(client, COMPILE)
    ref = worker.start(job_id)
    report = {"rungs": [], "gate": {"train": "inductor"}}
    publish(store, ref, "report.json", json.dumps(report).encode(), "application/json")
    worker.succeed(ref, {"summary": 1})
    assert client.get(f"/v1/jobs/{job_id}/report").json() == report


def test_artifacts_are_listed_and_fetched(client: TestClient, worker: Worker, store: Store) -> None:
    job_id = submit(client)
    ref = worker.start(job_id)
    content = bytes(range(256)) * 10
    publish(store, ref, "plots/ä b.bin", content, "application/octet-stream")
    publish(store, ref, "a.txt", b"hello")
    items = client.get(f"/v1/jobs/{job_id}/artifacts").json()["items"]
    assert [(item["name"], item["bytes"]) for item in items] == [("a.txt", 5), ("plots/ä b.bin", 2560)]
    answer = client.get(f"/v1/jobs/{job_id}/artifacts/plots/ä b.bin")
    assert answer.content == content
    assert answer.headers["etag"] == f'"{items[1]["sha256"]}"'
    assert answer.headers["content-disposition"].startswith("attachment")
    assert answer.headers["accept-ranges"] == "bytes"


def test_a_file_that_flips_between_itself_and_a_link_is_never_the_other_one(client: TestClient, worker: Worker) -> None:
    """What is checked and what is sent are the same open file, whatever its name leads to by then."""
    job_id = submit(client)
    secret = worker.store.artifacts.data.root / "admin.key"
    path = publish(worker.store, worker.start(job_id), "a.txt", b"artifact")
    secret.write_text("tvt_hush")
    over = threading.Event()

    def flip() -> None:
        while not over.is_set():
            (path.parent / "x").symlink_to(secret)
            (path.parent / "x").replace(path)
            (path.parent / "y").write_bytes(b"artifact")
            (path.parent / "y").replace(path)

    flipping = threading.Thread(target=flip)
    flipping.start()
    statuses: Counter[int] = Counter()
    try:
        while min(statuses[200], statuses[404]) < 20:
            answer = client.get(f"/v1/jobs/{job_id}/artifacts/a.txt")
            statuses[answer.status_code] += 1
            assert "hush" not in answer.text
    finally:
        over.set()
        flipping.join()
    assert set(statuses) == {200, 404}


def test_ranges_and_conditions_are_honoured(client: TestClient, worker: Worker, store: Store) -> None:
    job_id = submit(client)
    publish(store, worker.start(job_id), "a.txt", b"0123456789")
    path = f"/v1/jobs/{job_id}/artifacts/a.txt"
    part = client.get(path, headers={"Range": "bytes=2-4"})
    assert (part.status_code, part.content, part.headers["content-range"]) == (206, b"234", "bytes 2-4/10")
    assert client.get(path, headers={"Range": "bytes=-3"}).content == b"789"
    beyond = client.get(path, headers={"Range": "bytes=50-"})
    assert (beyond.status_code, beyond.headers["content-range"]) == (416, "bytes */10")
    assert beyond.headers["content-type"] == "application/problem+json"
    etag = part.headers["etag"]
    assert client.get(path, headers={"If-None-Match": etag}).status_code == 304
    assert client.get(path, headers={"If-None-Match": f'"x", W/{etag}'}).status_code == 304
    assert client.get(path, headers={"If-None-Match": '"x"'}).status_code == 200
    assert client.get(path, headers={"Range": "bytes=2-4", "If-Range": '"old"'}).content == b"0123456789"
    for unreadable in ("bytes=x", "bytes=5-2", "pages=1-2", "bytes"):
        whole = client.get(path, headers={"Range": unreadable})
        assert (whole.status_code, whole.content) == (200, b"0123456789"), unreadable


@pytest.mark.parametrize("accept", ["*/*", "text/event-stream"])
def test_head_is_answered_like_get_without_the_body(client: TestClient, worker: Worker, accept: str) -> None:
    """An endless stream's, too."""
    job_id = submit(client)
    publish(worker.store, worker.start(job_id), "a.txt", b"0123456789")
    for path in (
        f"/v1/jobs/{job_id}",
        f"/v1/jobs/{job_id}/artifacts/a.txt",
        f"/v1/jobs/{job_id}/logs",
        "/v1/jobs",
        "/login",
    ):
        head = client.head(path, headers={"Accept": accept})
        assert (head.status_code, head.content) == (200, b""), path
    assert client.head(f"/v1/jobs/{job_id}/artifacts/a.txt").headers["content-length"] == "10"
    assert client.head("/v1/events", headers={"Accept": accept}).headers["content-type"].startswith("text/event-stream")
    assert client.head("/v1/jobs:batch").status_code == 405
    assert client.head("/v1/jobs/job_0").status_code == 404


@pytest.mark.parametrize("media_type", ["text/html", "image/svg+xml", "application/javascript", "text/html; x"])
def test_what_a_job_wrote_is_never_run_by_a_browser(client: TestClient, worker: Worker, media_type: str) -> None:
    job_id = submit(client)
    publish(worker.store, worker.start(job_id), "x.html", b"<script>alert(1)</script>", media_type)
    headers = client.get(f"/v1/jobs/{job_id}/artifacts/x.html").headers
    assert headers["content-type"] == "application/octet-stream"
    assert headers["content-disposition"] == 'attachment; filename="x.html"'
    assert headers["content-security-policy"] == "sandbox"
    assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    "name",
    ["../../secret", "..%2f..%2fsecret", "%2e%2e/%2e%2e/secret", "/etc/passwd", "a/../../secret", "link", "a%00b"],
)
def test_no_name_leads_out_of_the_artifacts(client: TestClient, worker: Worker, store: Store, name: str) -> None:
    job_id = submit(client)
    ref = worker.start(job_id)
    folder = publish(store, ref, "a/b.txt", b"fine").parent.parent
    (folder.parent / "secret").write_text("secret")
    publish(store, ref, "link", b"x").unlink()
    (folder / "link").symlink_to(folder.parent / "secret")
    answer = client.get(f"/v1/jobs/{job_id}/artifacts/{name}")
    assert answer.status_code == 404
    assert "secret\n" not in answer.text


def test_a_folder_comes_as_a_tar_archive(client: TestClient, worker: Worker, store: Store, tmp_path: Path) -> None:
    job_id = submit(client)
    ref = worker.start(job_id)
    root = store.artifacts.data.job(job_id).root
    content = {"step_5/meta.json": b"{}", "step_5/shards/0.bin": bytes(range(256)) * 9000, "step_5/empty": b""}
    for name, data in content.items():
        (root / "checkpoints" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "checkpoints" / name).write_bytes(data)
    (root / "checkpoints/step_5/link").symlink_to("/etc/passwd")
    entry = Artifact(
        name="checkpoints/step_5", bytes=1, sha256="", media_type=FOLDER, created_at=datetime.now(UTC)
    )  # fmt: skip
    store.attempts.record_artifact(ref, entry)
    answer = client.get(f"/v1/jobs/{job_id}/artifacts/checkpoints/step_5")
    assert answer.headers["content-type"] == "application/x-tar"
    assert answer.headers["content-disposition"].endswith("step_5.tar")
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as archive:
        found = {member.name: archive.extractfile(member) for member in archive.getmembers()}
        assert {name: file.read() for name, file in found.items() if file} == content
    for other in (entry.model_copy(update={"name": "checkpoints/step_9"}), entry.model_copy(update={"name": "a.txt"})):
        publish(store, ref, "a.txt", b"no folder")
        store.attempts.record_artifact(ref, other)
        assert client.get(f"/v1/jobs/{job_id}/artifacts/{other.name}").status_code == 404
