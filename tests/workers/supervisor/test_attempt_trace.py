"""What ranks report becomes spans below their attempt, bounded however long the job runs."""

from __future__ import annotations

import os

from digits import digits_job
from otlp_receiver import OtlpReceiver

from service.jobs.files import DataLayout
from service.jobs.records import AttemptRef, Claim, HostShare, JobError, PartOutcome
from service.jobs.spec.train import TrainSpec
from service.jobs.tracing import Tracing, tracing_for
from workers.supervisor.attempt_trace import traced_attempt

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
SPEC = TrainSpec.model_validate(digits_job(steps=10))


def claim(attempt: int) -> Claim:
    return Claim(AttemptRef("job_1", attempt, "a"), SPEC, (HostShare(host="a", devices=(0,)),), "127.0.0.1", 10.0)


def test_an_attempt_of_many_steps_is_a_trace_of_few(collector: OtlpReceiver, data: DataLayout) -> None:
    paths = data.job("job_1")
    with traced_attempt(tracing_for("supervisor", os.environ), PARENT, claim(1), paths) as trace:
        trace.note_launch()
        for step in range(1, 1001):
            for name in ("loss", "eval_loss"):
                trace.take({"type": "metric", "time": 1e9 + step, "rank": 0, "step": step, "values": {name: 1.0}})
        trace.take({"type": "span", "time": 1e9, "rank": 1, "name": "rung", "start": 5.0, "end": 6.0})
        bound = {"type": "bound", "time": 1e9, "rank": 1, "instance": 4, "verdict": "verified", "seconds": 2.0}
        trace.take(bound)
        error = {"type": "error", "time": 1e9, "rank": 1, "error": "ValueError", "message": "no", "traceback": "…"}
        failed = PartOutcome("failed", error=JobError(type="ValueError", message="no"))
        trace.note_end(failed, [error])  # type: ignore[list-item]  # a plain dictionary
    (attempt,), steps = collector.named("attempt"), collector.named("step")
    assert (attempt.trace, attempt.parent) == tuple(PARENT.split("-")[1:3])
    assert (attempt.failed, attempt.events) == (True, ("exception",))
    assert attempt.attributes == {"job": "job_1", "kind": "train", "attempt": 1, "host": "a"}
    assert [span.attributes["step"] for span in steps] == [*range(1, 21), *range(100, 1001, 100)]
    assert steps[5].end - steps[5].start == 1_000_000_000
    assert {span.parent for span in collector.spans if span != attempt} == {attempt.id}
    (instance,) = collector.named("instance")
    assert (instance.end - instance.start, instance.attributes["verdict"]) == (2_000_000_000, "verified")
    assert {span.attributes["rank"] for span in collector.named("start")} == {0, 1}


def test_a_retry_links_to_the_attempt_before(collector: OtlpReceiver, data: DataLayout) -> None:
    paths = data.job("job_1")
    for attempt in (1, 2):
        with traced_attempt(tracing_for("supervisor", os.environ), PARENT, claim(attempt), paths):
            pass
    first, second = sorted(collector.named("attempt"), key=lambda span: span.attributes["attempt"])
    assert (first.links, second.links) == ((), (first.id,))


def test_an_attempt_that_is_not_traced_leaves_nothing(data: DataLayout) -> None:
    with traced_attempt(Tracing(), None, claim(1), data.job("job_1")) as trace:
        trace.take({"type": "metric", "time": 1.0, "rank": 0, "step": 1, "values": {}})
    assert not data.job("job_1").attempt(1).exists()
