"""Every command against a real service, as a process."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from cli_world import TRAIN, Cli, Worker
from waiting import eventually

from service.jobs.records import AllocatedDevices, Artifact, AttemptRef
from service.jobs.store import HostReport, Store
from service.jobs.store.keyspace import HOST
from trivet.cli.main import OTHER_NAMES
from trivet.client import Client

METRICS = [{"type": "metric", "step": step, "values": {"loss": 1.0 / step}} for step in (1, 2, 3)]


def test_submit_prints_the_id_and_only_that(trivet: Cli, store: Store) -> None:
    job_id = trivet.ok("submit", trivet.spec()).out.strip()
    assert store.jobs.get(job_id).name == "mine"


def test_submit_reads_yaml_from_standard_input_and_sets_values(trivet: Cli, store: Store) -> None:
    model = "{family: mlp, in_features: 64, hidden: [8, 8], out_features: 10}"
    text = f"kind: train\nmodel: {model}\ndata: {{source: digits}}\nsteps: 1\n"
    changes = [
        "steps=7",
        "model.hidden.1=32",
        "labels.team=a",
        "optimizer.lr=1e-2",
        "name=null me",
        "batch={global: 32}",
    ]
    words = [word for change in changes for word in ("--set", change)]
    job = trivet.ok("submit", "-", *words, "--json", stdin=text).json
    spec = job["spec"]
    assert (spec["steps"], spec["model"]["hidden"], spec["labels"]) == (7, [8, 32], {"team": "a"})
    assert (spec["optimizer"]["lr"], spec["name"], spec["batch"]["global"]) == (0.01, "null me", 32)


def test_a_spec_is_validated_without_being_submitted(trivet: Cli, store: Store) -> None:
    assert "would be accepted, 1 job of 1 rank\n" in trivet.ok("validate", trivet.spec()).out
    swept = ("--set", "sweep={grid: {seed: [1, 2]}}", "--set", "parallel.tp=2", "--json")
    assert [(each["jobs"], each["ranks"]) for each in trivet.ok("validate", trivet.spec(), *swept).json] == [(2, 2)]
    asked = "notify={webhook: https://example.org/, when: {loss: low}}"
    refused = trivet("validate", trivet.spec(), "--set", asked)
    assert (refused.code, "notify.when.loss" in refused.err, "--set" in refused.err) == (2, True, True)
    assert store.jobs.list().items == ()


def test_several_specs_are_submitted_all_or_none(trivet: Cli, store: Store) -> None:
    other = trivet.folder / "other.yaml"
    other.write_text(Path(trivet.spec()).read_text().replace("mine", "other"))
    ids = trivet.ok("submit", trivet.spec(), str(other), "--set", "labels.team=a").out.split()
    assert [store.jobs.get(job_id).name for job_id in ids] == ["mine", "other"]
    assert [store.jobs.get(job_id).labels for job_id in ids] == [{"team": "a"}] * 2
    refused = trivet("submit", trivet.spec(), trivet.spec(), "--set", "stepps=1")
    assert refused.code == 2
    assert "jobs.1.stepps" in refused.err
    assert len(store.jobs.list().items) == 2


def test_a_batch_is_a_file_with_a_list_of_specs(trivet: Cli, store: Store, worker: Worker) -> None:
    specs = [{**TRAIN, "name": f"run {index}"} for index in range(3)]
    ids = trivet.ok("submit", "--batch", "-", "--json", stdin=json.dumps(specs)).json
    assert [store.jobs.get(job_id).name for job_id in ids] == ["run 0", "run 1", "run 2"]
    for words in (["submit"], ["submit", trivet.spec(), "--batch", "-"]):
        assert "--batch" in trivet(*words).err
    assert "a batch is a list of specs" in trivet("submit", "--batch", trivet.spec()).err
    wrong = trivet.folder / "wrong.yaml"
    wrong.write_text(json.dumps([TRAIN, {**TRAIN, "stepps": 1}]).replace("}, {", "},\n{"))
    assert "wrong.yaml:2:" in trivet("submit", "--batch", str(wrong)).err
    many = trivet("submit", "--batch", "-", "--watch", stdin=json.dumps(specs * 34))
    assert (many.code, "100 jobs at most" in many.err) == (2, True)


@pytest.mark.slow
def test_watching_a_sweep_ends_with_a_table_of_its_jobs(trivet: Cli, store: Store, worker: Worker) -> None:
    sweep = {"grid": {"optimizer.lr": [0.1, 0.2]}, "best": {"metric": "loss", "mode": "min"}}
    process = trivet.start("submit", trivet.spec(sweep=sweep), "--watch")
    eventually(lambda: len(store.jobs.list().items) == 3)
    second, first, parent = (job.id for job in store.jobs.list().items)
    worker.end(worker.start(first), loss=0.5)
    worker.end(worker.start(second), loss=0.25)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (0, f"submitted {parent}\n")
    rows = [line.split() for line in out.splitlines() if line.startswith("job_")]
    assert rows == [[first, "0.1", "succeeded", "0.5"], [second, "0.2", "succeeded", "0.25"]]
    assert f"best: {second}, loss 0.25" in out
    assert first in trivet.ok("show", parent).out
    assert trivet.ok("jobs", "--sweep", parent, "--json").json["items"][0]["parameters"] == {"optimizer.lr": 0.2}
    for given, listed in ((), [parent]), (("--sweep", "all"), [second, first, parent]):
        assert [job["id"] for job in trivet.ok("jobs", "--json", *given).json["items"]] == listed


@pytest.mark.slow
def test_watching_a_batch_exits_1_unless_all_succeed(trivet: Cli, store: Store, worker: Worker) -> None:
    process = trivet.start("submit", "--batch", "-", "--watch")
    assert process.stdin is not None
    process.stdin.write(json.dumps([TRAIN, TRAIN]))
    process.stdin.close()
    process.stdin = None
    eventually(lambda: len(store.jobs.list().items) == 2)
    second, first = (job.id for job in store.jobs.list().items)
    worker.end(worker.start(first), loss=0.5)
    store.jobs.cancel(second)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, err.split()) == (1, [first, second])
    assert f"train mine {first}: succeeded" in out
    assert f"train mine {second}: cancelled" in out


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("steps", "path=value"),
        ("steps.x=1", "no parts"),
        ("model.hidden.9=1", "position"),
        ("model.hidden.a=1", "position"),
        ("steps=[1", "YAML"),
        ("=1", "path=value"),
        ("steps=.inf", "steps is inf; expected a finite number"),
        ("optimizer.lr=.nan", "optimizer.lr is nan; expected a finite number"),
        ("model.hidden.0=1.0e+400", "model.hidden.0 is inf; expected a finite number"),
        ("name=!!binary aGk=", "name is a bytes of YAML"),
        ("labels={1: a}", "labels has the field 1; the name of a field is text"),
    ],
)
def test_a_change_that_cannot_be_made_is_refused(trivet: Cli, store: Store, change: str, said: str) -> None:
    ran = trivet("submit", trivet.spec(), "--set", change)
    assert ran.code == 2
    assert said in ran.err
    assert not store.jobs.list().items


@pytest.mark.parametrize(
    ("content", "said"), [("[1, 2]", "a list"), ("", "nothing"), ("{a: ", "neither YAML nor JSON")]
)
def test_a_file_that_is_no_spec_is_refused(trivet: Cli, content: str, said: str) -> None:
    path = trivet.folder / "bad.yaml"
    path.write_text(content)
    ran = trivet("submit", str(path))
    assert ran.code == 2
    assert said in ran.err
    assert trivet("submit", "missing.yaml").code == 2


def test_a_refused_spec_is_a_table_of_fields(trivet: Cli) -> None:
    ran = trivet("submit", trivet.spec(steps=0, stepz=1))
    assert ran.code == 2
    assert "2 problems" in ran.err
    for word in ("steps", "at least 1", "stepz", "did you mean 'steps'?"):
        assert word in ran.err


def test_a_path_where_an_uploaded_file_is_wanted_is_told_how_to_get_its_id(trivet: Cli) -> None:
    ran = trivet("submit", trivet.spec(kind="verify"), "--set", "property={vnnlib: /tmp/queries.zip}")
    assert ran.code == 2
    assert "expected a file's id, as `trivet upload FILE` prints it" in ran.err
    data = "data={source: file, file: /tmp/x, format: tokens, sequence: 4, vocabulary: 9}"
    here = trivet("schedule", trivet.spec(), "--set", data)
    assert here.code == 2
    assert here.err.endswith("file: expected a file's id, as `trivet upload FILE` prints it; got '/tmp/x'\n")
    assert len(here.err.splitlines()) == 1


def test_an_uploaded_file_has_one_id_however_often_it_comes(trivet: Cli, store: Store) -> None:
    path = trivet.folder / "tokens.bin"
    path.write_bytes(b"\x01\x02" * 500)
    file_id = trivet.ok("upload", str(path)).out.strip()
    assert trivet.ok("upload", str(path), "--json").json["id"] == file_id
    stored, held = store.files.get(file_id)
    assert (stored.bytes, held.read_bytes()) == (1000, path.read_bytes())
    assert trivet("upload", "missing.bin").code == 2


PIPELINE: dict[str, Any] = {"parallel": {"pp": 2}, "pipeline": {"schedule": "1f1b", "micro_batches": 3}}
ROWS = ["rank 0  F0 F1 ······B0    F2 B1    ···B2", "rank 1  ···F0 B0    F1 B1    F2 B2"]


def test_a_schedule_is_drawn_from_a_spec_without_a_service(trivet: Cli) -> None:
    ran = trivet("schedule", trivet.spec(**PIPELINE), TRIVET_URL="http://127.0.0.1:9")
    assert ran.code == 0, ran.err
    drawn = [line.rstrip() for line in ran.out.splitlines()]
    assert drawn[0] == "1f1b: 2 ranks, 2 stages, 3 micro-batches; predicted bubble 25.0%"
    assert drawn[2:4] == ROWS
    assert "activations kept at most, by rank: 2, 1" in drawn
    split = trivet.ok("schedule", trivet.spec(**PIPELINE), "--set", "pipeline.schedule=zbv").out
    assert "W backward weight" in split
    assert "f0" in split
    assert trivet("schedule", trivet.spec()).code == 2
    refused = trivet(
        "schedule", trivet.spec(**PIPELINE), "--set", "pipeline.micro_batches=99999", "--set", "batch.global=99999"
    )
    assert refused.code == 2
    assert "pipeline.micro_batches" in refused.err


def test_the_queue_says_why_jobs_wait(trivet: Cli, worker: Worker) -> None:
    running = trivet.ok("submit", trivet.spec(), "--set", "timeout_s=3600").out.strip()
    worker.start(running)
    jobs = [trivet.ok("submit", trivet.spec(), "--set", "after=" + json.dumps([running])).out.strip()]
    page = trivet.ok("queue", "--json").json
    assert [(line["job"], line["place"]) for line in page["items"]] == [(jobs[0], None)]
    assert f"waits for {running}" in trivet.ok("queue").out
    assert jobs[0] in trivet.ok("queue", jobs[0]).out
    assert "nothing waits" in trivet.ok("queue", "--owner", "nobody").out
    assert "not a cursor of the queue" in trivet("queue", "--cursor", "x").err
    assert "vision has weight 2" in trivet.ok("shares", "weigh", "vision", "2").out
    assert {share["project"] for share in trivet.ok("shares", "--json").json["items"]} == {"default", "vision"}


@pytest.mark.slow
def test_a_jobs_schedule_and_timeline(trivet: Cli, worker: Worker, url: str, secret: str) -> None:
    job_id = trivet.ok("submit", trivet.spec(**PIPELINE, batch={"global": 6})).out.strip()
    assert all(row in trivet.ok("schedule", job_id).out for row in ROWS)
    assert trivet.ok("schedule", job_id, "--json").json["bubble"] == 0.25
    worker.emit(worker.start(job_id), [{"type": "span", "name": "data", "start": 1, "end": 2, "detail": {"step": 1}}])
    with Client(url, secret) as client:
        assert client.timeline(job_id)["step"] == 1
    plain = trivet.ok("submit", trivet.spec()).out.strip()
    ran = trivet("schedule", plain)
    assert ran.code == 2
    assert "has no pipeline" in ran.err


def test_watching_a_success_exits_0(trivet: Cli, worker: Worker) -> None:
    def act(ref: AttemptRef) -> None:
        worker.emit(ref, METRICS)
        worker.end(ref, loss=0.3)

    thread = worker.run_next(act)
    ran = trivet("submit", trivet.spec(), "--watch")
    thread.join()
    assert ran.code == 0, ran.err
    *states, result, following = ran.out.splitlines()
    assert [line.rpartition(": ")[2] for line in states] == ["queued", "starting", "running", "succeeded"]
    assert result == "  loss: 0.3"
    assert following.startswith("certify it: trivet submit verify.yaml --set model.job=job_")


def test_watching_a_failure_exits_1_and_says_why(trivet: Cli, worker: Worker) -> None:
    thread = worker.run_next(lambda ref: worker.end(ref, "the loss is not finite"))
    ran = trivet("submit", trivet.spec(), "--watch")
    thread.join()
    assert ran.code == 1
    assert "the loss is not finite" in ran.err
    assert "again, from its last checkpoint: trivet retry job_" in ran.err


def test_watch_follows_a_job_and_as_json_gives_its_events(trivet: Cli, worker: Worker, store: Store) -> None:
    job_id = trivet.ok("submit", trivet.spec()).out.strip()
    watching = trivet.start("watch", job_id, "--json")
    ref = worker.start(job_id)
    worker.emit(ref, METRICS)
    worker.end(ref)
    out, err = watching.communicate(timeout=300)
    assert watching.returncode == 0, err
    events = [json.loads(line) for line in out.splitlines()]
    assert [event["type"] for event in events] == ["state"] * 3 + ["metric"] * 3 + ["state"]
    store.jobs.delete(job_id)
    assert trivet("watch", job_id).code == 2


def test_a_cancelled_job_exits_1(trivet: Cli, store: Store) -> None:
    job_id = trivet.ok("submit", trivet.spec()).out.strip()
    store.jobs.cancel(job_id)
    assert trivet("watch", job_id).code == 1


def test_an_interrupted_watch_leaves_the_job_alone(trivet: Cli, store: Store) -> None:
    job_id = trivet.ok("submit", trivet.spec()).out.strip()
    watching = trivet.start("watch", job_id)
    assert watching.stdout is not None
    assert "queued" in watching.stdout.readline()
    watching.send_signal(signal.SIGINT)
    _, err = watching.communicate(timeout=300)
    assert watching.returncode == 130
    assert "Traceback" not in err
    assert store.jobs.get(job_id).state == "queued"


def test_jobs_lists_and_filters(trivet: Cli, store: Store) -> None:
    first = trivet.ok("submit", trivet.spec(name="one [bold]")).out.strip()
    second = trivet.ok("submit", trivet.spec(name="two", labels={"a": "b"})).out.strip()
    text = trivet.ok("jobs").out
    assert text.index(second) < text.index(first)
    assert "one [bold]" in text
    assert [job["id"] for job in trivet.ok("jobs", "--label", "a=b", "--json").json["items"]] == [second]
    assert "no jobs" in trivet.ok("jobs", "--kind", "verify").out
    assert trivet("jobs", "--state", "done").code == 2


def test_phases_are_shown_with_their_seconds(trivet: Cli, store: Store, worker: Worker) -> None:
    job_id = trivet.ok("submit", trivet.spec()).out.strip()
    ref = worker.start(job_id)
    began = store.jobs.get(job_id).phases[0].began_at.timestamp()
    told: Any = {"type": "phase", "time": began + 2.5, "rank": 0, "name": "loading"}
    store.attempts.emit(ref, [told])
    assert re.search(r"phases +starting 2\.5 s, loading \d+\.\d s so far", trivet.ok("show", job_id).out)


def test_show_cancel_retry_delete(trivet: Cli, store: Store) -> None:
    job_id = trivet.ok("submit", trivet.spec()).out.strip()
    text = trivet.ok("show", job_id).out
    assert all(word in text for word in (job_id, "queued", "mine", "in_features: 64"))
    assert trivet.ok("show", job_id, "--json").json["id"] == job_id
    assert "cancelled" in trivet.ok("cancel", job_id).out
    assert trivet.ok("retry", job_id, "--json").json["state"] == "queued"
    conflict = trivet("retry", job_id)
    assert conflict.code == 2
    assert "queued" in conflict.err
    trivet.ok("cancel", job_id)
    assert trivet("delete", job_id, stdin="n\n").code == 2
    assert store.jobs.get(job_id).state == "cancelled"
    trivet.ok("delete", job_id, "--yes")
    missing = trivet("show", job_id)
    assert missing.code == 2
    assert job_id in missing.err


def test_logs_metrics_bounds_and_report(trivet: Cli, worker: Worker) -> None:
    job_id = trivet.ok("submit", trivet.spec()).out.strip()
    assert "no metrics yet" in trivet.ok("metrics", job_id).out
    ref = worker.start(job_id)
    worker.emit(ref, [{"type": "log", "stream": "stdout", "line": f"line {n}", "rank": n % 2} for n in range(4)])
    worker.emit(ref, METRICS)
    worker.end(ref, eval_accuracy=0.9)
    assert [line.rpartition("] ")[2] for line in trivet.ok("logs", job_id, "-n", "2").out.splitlines()] == [
        "line 2",
        "line 3",
    ]
    assert len(trivet.ok("logs", job_id, "--rank", "1", "--json").out.splitlines()) == 2
    assert trivet.ok("logs", job_id, "-g", "LINE 2").out.endswith("[rank 0] line 2\n")
    assert not trivet.ok("logs", job_id, "--stream", "stderr", "-f").out
    assert "expected one of stdout, stderr, service" in trivet("logs", job_id, "--stream", "x").err
    assert "--attempt" in trivet("logs", job_id, "-f", "--attempt", "1").err
    assert [line for line in trivet.ok("logs", job_id, "-f").out.splitlines() if "rank 1" in line] == [
        "[rank 1] line 1", "[rank 1] line 3",
    ]  # fmt: skip
    assert "loss" in trivet.ok("metrics", job_id).out
    assert trivet.ok("metrics", job_id, "loss", "--json").json["series"]["loss"]["step"] == [1, 2, 3]
    assert trivet.ok("report", job_id).out.strip() == "eval_accuracy: 0.9"
    assert trivet("bounds", job_id).code == 2


def test_bounds_of_a_verify_job(trivet: Cli, worker: Worker) -> None:
    spec = {
        "kind": "verify",
        "model": TRAIN["model"],
        "property": {"robustness": {"data": {"source": "digits"}, "eps": 0.1}},
    }
    job_id = trivet.ok("submit", "-", stdin=json.dumps(spec)).out.strip()
    assert "no bounds yet" in trivet.ok("bounds", job_id).out
    row = {
        "type": "bound",
        "instance": 3,
        "verdict": "verified",
        "lower": [0, None],
        "upper": [0.5, None],
        "margin": 0.25,
    }
    row |= {"method": "crown", "seconds": 0.1, "domains": 1, "counterexample": None}
    seen = {"counterexample": [0.5], "counterexample_outputs": [0.25, None, *[1.0] * 9], "onnxruntime_outputs": [0.75]}
    late = {**row, "instance": 5, "verdict": "timeout", "lower": [], "upper": [], "margin": None}
    late["reason"] = "its 20 seconds were spent"
    worker.emit(worker.start(job_id), [row, {**row, "instance": 4, "verdict": "falsified", **seen}, late])
    printed = trivet.ok("bounds", job_id).out
    assert "undecided (1): its 20 seconds were spent" in printed
    assert all(word in printed for word in ("verified", "0.25", "0.5"))
    own = ", ".join(["0.25", "not finite", *["1"] * 8, "…"])
    assert f"instance 4: outputs at its counterexample: {own} (by onnxruntime: 0.75)" in " ".join(printed.split())
    first, second, third = trivet.ok("bounds", job_id, "--json").json["items"]
    assert third["reason"] == late["reason"]
    assert (first["instance"], first["counterexample_outputs"]) == (3, None)
    assert {name: second[name] for name in seen} == seen


def test_what_ended_an_earlier_attempt_is_shown(trivet: Cli, worker: Worker) -> None:
    job_id = trivet.ok("submit", trivet.spec(retries=1)).out.strip()
    worker.end(worker.start(job_id), "it broke")
    worker.start(job_id)
    shown = trivet.ok("show", job_id).out
    assert "attempt 1  queued: " in shown
    assert "it broke" in shown


def fetch_to_odd_places(trivet: Cli, job_id: str, content: bytes) -> None:
    """Into a folder, through a link, into a pipe, to a device; what is none of a file keeps its place."""
    here, fetch = trivet.folder, ("artifacts", job_id, "sub/model.bin", "-o")
    (here / "out").mkdir()
    (here / "link.bin").symlink_to("linked.bin")
    os.mkfifo(here / "pipe")
    trivet.ok(*fetch, "out/")
    assert (here / "out" / "model.bin").read_bytes() == content
    trivet.ok(*fetch, "link.bin")
    assert (here / "link.bin").is_symlink()
    assert (here / "linked.bin").read_bytes() == content
    with subprocess.Popen(["cat", here / "pipe"], stdout=subprocess.PIPE) as reader:
        trivet.ok(*fetch, "pipe")
        assert reader.communicate()[0] == content
    assert (here / "pipe").is_fifo()
    trivet.ok(*fetch, "/dev/null")
    full = trivet(*fetch, "/dev/full")
    assert (full.code, "No space left" in full.err) == (2, True)
    assert Path("/dev/null").is_char_device()
    assert Path("/dev/full").is_char_device()
    for place, said in (("no/", "there is no folder no/"), ("no/x", "no such folder"), ("got.bin/x", "no such folder")):
        ran = trivet(*fetch, place)
        assert (ran.code, said in ran.err) == (2, True), ran.err
    assert trivet.start(*fetch, "/dev/stdout").communicate()[0].encode() == content


def test_artifacts_are_listed_and_fetched_whole(trivet: Cli, worker: Worker, store: Store) -> None:
    job_id = trivet.ok("submit", trivet.spec()).out.strip()
    assert "no artifacts" in trivet.ok("artifacts", job_id).out
    ref, content = worker.start(job_id), b"\x00weights" * 100
    path = store.artifacts.data.job(job_id).artifacts / "sub" / "model.bin"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    store.attempts.record_artifact(
        ref,
        Artifact(
            name="sub/model.bin", bytes=len(content), sha256=digest, media_type="x/y", created_at=datetime.now(UTC)
        ),
    )
    assert digest[:16] in trivet.ok("artifacts", job_id).out
    trivet.ok("artifacts", job_id, "sub/model.bin", "-o", "got.bin")
    assert (trivet.folder / "got.bin").read_bytes() == content
    trivet.ok("artifacts", job_id, "sub/model.bin")
    assert (trivet.folder / "model.bin").read_bytes() == content
    fetch_to_odd_places(trivet, job_id, content)
    before = sorted(trivet.folder.iterdir())
    assert trivet("artifacts", job_id, "nothing", "-o", "none.bin").code == 2
    assert sorted(trivet.folder.iterdir()) == before


def test_hosts_drain_and_resume(trivet: Cli, worker: Worker) -> None:
    assert "no hosts" in trivet.ok("hosts").out
    job_id = trivet.ok("submit", trivet.spec()).out.strip()
    worker.start(job_id)
    text = trivet.ok("hosts").out
    assert all(word in text for word in ("fake", "alive", "3/4", job_id))
    assert "draining" in trivet.ok("hosts", "drain", "fake").out
    assert trivet.ok("hosts", "--json").json["items"][0]["draining"] is True
    trivet.ok("hosts", "resume", "fake")
    assert trivet("hosts", "drain", "nobody").code == 2


def test_alerts_say_what_is_wrong_and_what_to_do(trivet: Cli, worker: Worker) -> None:
    worker.store.hosts.beat(HostReport("fake", "127.0.0.1", cpu_slots=4))
    failing = ("failing_since", 1, "failing_reason", "no torch", "failed_starts", 2, "retry_at", 1)
    worker.store.client.call("HSET", HOST("fake"), *failing)
    told = trivet("alerts", "--all")
    assert told.code == 1
    assert "TrivetHostFailing" in told.out
    assert "host=fake" in told.out
    assert "TrivetDiskFull" in told.out, "an alert that is as it should be"
    fired = [alert for alert in trivet("alerts", "--json").json["items"] if alert["state"] == "firing"]
    assert [(alert["name"], alert["labels"]) for alert in fired] == [("TrivetHostFailing", {"host": "fake"})]


def test_hosts_shows_what_launchers_have_and_their_allocations(trivet: Cli, worker: Worker) -> None:
    has = AllocatedDevices(launcher="slurm", id="12.0", job=None, pool="cpu", devices=2)
    worker.store.hosts.beat(HostReport("login", "127.0.0.1", launchers={"slurm": "main: 1 of 2 nodes idle"}))
    worker.store.hosts.beat(HostReport("slurm-12.0-0", "127.0.0.1", allocation=has))
    text = " ".join(trivet.ok("hosts").out.split())
    assert "slurm, asked by login: main: 1 of 2 nodes idle" in text
    assert "slurm-12.0-0 alive slurm 12.0" in text
    (login, node) = trivet.ok("hosts", "--json").json["items"]
    assert (login["allocation"], node["allocation"]["devices"]) == (None, 2)


@pytest.mark.slow
def test_hosts_says_why_a_host_gets_no_work(trivet: Cli, worker: Worker) -> None:
    jobs = [trivet.ok("submit", trivet.spec()).out.strip() for _ in range(2)]
    worker.never_claim(jobs)
    text = " ".join(trivet.ok("hosts").out.split())
    assert "failing" in text
    assert "fake gets no work since" in text
    assert "nobody on host fake claimed the job in time; tried again in" in text
    assert trivet.ok("hosts", "--json").json["items"][0]["failing"]["failed_starts"] == 2
    assert "takes jobs" in trivet.ok("hosts", "resume", "fake").out
    assert "failing" not in trivet.ok("hosts").out


def test_keys_are_created_used_listed_and_revoked(trivet: Cli) -> None:
    secret = trivet.ok("keys", "create", "ann", "--scope", "read").out.strip()
    assert trivet("jobs", TRIVET_KEY=secret).code == 0
    refused = trivet("submit", trivet.spec(), TRIVET_KEY=secret)
    assert refused.code == 2
    assert "scope 'submit'" in refused.err
    listed = {key["name"]: key for key in trivet.ok("keys", "list", "--json").json["items"]}
    assert listed["ann"]["scopes"] == ["read"]
    assert "ann" in trivet.ok("keys", "list").out
    trivet.ok("keys", "revoke", listed["ann"]["id"])
    gone = trivet("jobs", TRIVET_KEY=secret)
    assert gone.code == 2
    assert "TRIVET_KEY" in gone.err


@pytest.mark.slow
def test_projects_have_members_and_share_jobs(trivet: Cli) -> None:
    assert trivet.ok("projects", "create", "vision", "--description", "cameras").out.strip() == "vision"
    ann = trivet.ok("keys", "create", "ann", "--project", "vision", "--role", "submitter").out.strip()
    assert trivet("keys", "create", "ann", "--role", "submitter").code == 2
    assert trivet("keys", "create", "ann", "--project", "vision", "--role", "boss").code == 2
    ours = trivet.ok("submit", trivet.spec()).out.strip()
    theirs = trivet.ok("submit", trivet.spec(), "--project", "vision").out.strip()
    seen = trivet("jobs", "--json", TRIVET_KEY=ann)
    assert [job["id"] for job in seen.json["items"]] == [theirs]
    hidden = trivet("show", ours, TRIVET_KEY=ann)
    assert (hidden.code, "there is no job" in hidden.err) == (2, True)
    assert "vision" in trivet.ok("share", ours, "vision").out
    assert trivet("show", ours, TRIVET_KEY=ann).code == 0
    trivet.ok("share", ours, "vision", "--stop")
    assert trivet("show", ours, TRIVET_KEY=ann).code == 2
    trivet.ok("projects", "members", "set", "vision", "ann", "viewer")
    shown = trivet("projects", "show", "vision", TRIVET_KEY=ann)
    assert "cameras" in shown.out
    assert "viewer" in shown.out
    assert trivet("projects", "members", "set", "vision", "ann", "maintainer", TRIVET_KEY=ann).code == 2
    trivet.ok("projects", "members", "remove", "vision", "ann")
    assert trivet("jobs", TRIVET_KEY=ann).code == 2
    trivet.ok("projects", "set", "vision", "--description", "lidar")
    listed = trivet.ok("projects", "list", "--json").json["items"]
    assert [(project["name"], project["description"]) for project in listed][1:] == [("vision", "lidar")]
    assert "1 keys" in trivet("projects", "delete", "vision").err


@pytest.mark.slow
def test_quotas_are_set_shown_and_taken_away(trivet: Cli) -> None:
    trivet.ok("projects", "create", "audio")
    set_now = trivet.ok("projects", "set", "audio", "--quota", "queued_jobs=1", "--quota", "default_time_s=60")
    assert "queued_jobs: 0 of 1" in set_now.out
    assert "default_time_s: 60" in set_now.out
    trivet.ok("submit", trivet.spec(), "--project", "audio")
    refused = trivet("submit", trivet.spec(), "--project", "audio")
    assert (refused.code, "1 of 1 queued jobs" in refused.err) == (2, True)
    trivet.ok("projects", "set", "audio", "--quota", "queued_jobs=")
    shown = trivet.ok("projects", "show", "audio", "--json").json
    assert (shown["quotas"]["queued_jobs"], shown["usage"]["queued_jobs"]) == (None, 1)
    for words, said in (("queued_jobs", "queued_jobs="), ("nonsense=1", "nonsense"), ("queued_jobs=x", "queued_jobs")):
        wrong = trivet("projects", "set", "audio", "--quota", words)
        assert (wrong.code, said in wrong.err) == (2, True)


@pytest.mark.slow
def test_uploads_are_listed_and_deleted(trivet: Cli) -> None:
    assert "no uploads" in trivet.ok("uploads").out
    (trivet.folder / "words.txt").write_text("some words")
    file_id = trivet.ok("upload", "words.txt").out.split()[0]
    listed = trivet.ok("uploads").out
    assert all(word in listed for word in (file_id, "words.txt", "10"))
    (entry,) = trivet.ok("uploads", "--json").json["items"]
    assert (entry["id"], entry["bytes"], entry["in_use"]) == (file_id, 10, False)
    trivet.ok("uploads", "delete", file_id)
    assert "no uploads" in trivet.ok("uploads").out
    gone = trivet("uploads", "delete", file_id)
    assert (gone.code, file_id in gone.err) == (2, True)


def test_a_service_that_is_not_there_is_named_with_what_to_do(trivet: Cli) -> None:
    ran = trivet("jobs", TRIVET_URL="http://127.0.0.1:9")
    assert ran.code == 2
    assert "http://127.0.0.1:9" in ran.err
    assert "trivet up" in ran.err
    assert trivet("jobs", TRIVET_URL="ftp://x").code == 2


def test_settings_lists_every_setting_with_its_source(trivet: Cli) -> None:
    (trivet.folder / "trivet.toml").write_text("port = 9999\n")
    lines = {line["variable"]: line for line in trivet.ok("settings", "--json").json["settings"]}
    assert (lines["TRIVET_PORT"]["value"], lines["TRIVET_PORT"]["source"]) == ("9999", "trivet.toml")
    assert lines["TRIVET_URL"]["source"] == "environment"
    assert "tvt_" not in trivet.ok("settings").out
    bad = trivet("settings", TRIVET_PORT="x")
    assert bad.code == 2
    assert "port" in bad.err


@pytest.mark.parametrize(
    "words", [["nonsense"], ["submit"], ["show"], ["jobs", "--limit", "0"], ["logs", "x", "-n", "x"]]
)
def test_wrong_usage_exits_2(trivet: Cli, words: list[str]) -> None:
    assert trivet(*words).code == 2


def test_a_command_of_another_tool_is_answered_with_ours(trivet: Cli) -> None:
    wrong = trivet("ls")
    assert (wrong.code, "Did you mean 'jobs'?" in wrong.err) == (2, True)
    text = trivet.ok("--help").out
    assert all(f"  {name} " in text for name in OTHER_NAMES.values())
    assert not any(f"  {name} " in text for name in OTHER_NAMES)


def test_help_names_every_promised_command(trivet: Cli) -> None:
    text = trivet.ok("--help").out
    promised = (
        "up api worker submit jobs show watch logs metrics bounds report cancel retry artifacts hosts keys projects"
    )
    assert all(f" {name} " in text for name in [*promised.split(), "settings", "demo"])


@pytest.mark.slow
def test_output_into_a_closed_pipe_is_no_error(trivet: Cli, worker: Worker) -> None:
    job_id = trivet.ok("submit", trivet.spec()).out.strip()
    ref = worker.start(job_id)
    worker.emit(ref, [{"type": "log", "stream": "stdout", "line": "x" * 500} for _ in range(2000)])
    process = trivet.start("logs", job_id)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    eventually(lambda: process.poll() is not None)
    assert process.stderr is not None
    assert "Traceback" not in process.stderr.read()
    process.stderr.close()


def test_no_data_folder_is_made_by_asking(trivet: Cli) -> None:
    trivet.ok("jobs")
    assert not Path(trivet.folder / ".trivet").exists()
