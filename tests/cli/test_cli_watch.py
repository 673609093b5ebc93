"""Commands that follow jobs, and those that show what they did."""

from __future__ import annotations

import json
import math
import re
import signal
from typing import Any

import pytest
from cli_world import TRAIN, Cli, Worker

from service.jobs.records import AttemptRef
from service.jobs.store import Store

METRICS = [{"type": "metric", "step": step, "values": {"loss": 1.0 / step}} for step in (1, 2, 3)]


def test_watching_a_success_exits_0(trivet: Cli, worker: Worker) -> None:
    def act(ref: AttemptRef) -> None:
        worker.emit(ref, METRICS)
        worker.end(ref, loss=0.3)

    thread = worker.run_next(act)
    ran = trivet("submit", trivet.spec(), "--watch")
    thread.join()
    assert ran.code == 0, ran.err
    *states, result, following, _ = ran.out.splitlines()
    assert [line.rpartition(": ")[2] for line in states] == ["queued", "starting", "running", "succeeded"]
    assert result == "  loss: 0.3"
    assert following.startswith("certify it: trivet submit verify.yaml --set model.job=job_")
    assert len(following) <= 80, "a command to be copied fits into a narrow terminal"


@pytest.mark.parametrize(
    ("final", "advice"),
    [
        (False, "again, from its last checkpoint if it has one: trivet retry job_"),
        (True, "it would fail again: change its spec"),
    ],
)
def test_watching_a_failure_exits_1_and_says_why(trivet: Cli, worker: Worker, final: bool, advice: str) -> None:
    thread = worker.run_next(lambda ref: worker.end(ref, "the loss is not finite", final=final))
    ran = trivet("submit", trivet.spec(), "--watch")
    thread.join()
    assert ran.code == 1
    assert "the loss is not finite" in ran.err
    assert advice in ran.err


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
    worker.emit(ref, [*METRICS, {"type": "metric", "step": 3, "values": {"lr": math.nan}}])
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
    shown = [line.split()[:6] for line in trivet.ok("metrics", job_id).out.splitlines()]
    assert ["lr", "3", *["nan"] * 4] in shown
    assert "loss" in [row[0] for row in shown]
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
    parent = trivet.ok("submit", "-", stdin=json.dumps({**spec, "sweep": {"grid": {"seed": [1]}}})).out.strip()
    assert f"bounds belong to its jobs, which this lists: trivet show {parent}" in trivet.ok("bounds", parent).out
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
