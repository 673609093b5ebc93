"""A training and a verification tell a receiver how they go, as their specs ask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from running_service import start, stop
from waiting import eventually
from webhook_receiver import receiving

from service.jobs.webhooks import WebhookEvent
from trivet.webhooks import verify

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def test_jobs_tell_of_metrics_of_results_and_of_their_ends(tmp_path: Path) -> None:
    service = start(tmp_path / "data", TRIVET_WEBHOOK_ALLOW="127.0.0.1")
    with receiving() as receiver:
        model = {"family": "mlp", "in_features": 64, "hidden": [32], "out_features": 10}
        training: dict[str, Any] = {
            "kind": "train", "model": model, "data": {"source": "digits"}, "steps": 40, "optimizer": {"lr": 0.01},
            "evaluate": {"every": 10},
            "notify": {"webhook": receiver.url, "when": {"eval_accuracy": "> 0.2", "loss": "< 0"}},
        }  # fmt: skip
        trained = service.wait(service.submit(training)["id"])
        checking: dict[str, Any] = {
            "kind": "verify", "model": {"job": trained["id"]}, "method": "ibp",
            "property": {"robustness": {"data": {"source": "digits"}, "count": 4, "eps": 0.001}},
            "notify": {"webhook": receiver.url, "on": [], "when": {"instances": ">= 4"}},
        }  # fmt: skip
        checked = service.wait(service.submit(checking)["id"])
        eventually(lambda: len(receiver.taken) >= 3)
        secret = service.http.get("/v1/webhooks/secret").json()["secret"]
        told = {(each.data.job, each.type): each for each in (verify(secret, *taken) for taken in receiver.taken)}
    stop(service)
    assert set(told) == {
        (trained["id"], "job.metric"), (trained["id"], "job.succeeded"), (checked["id"], "job.metric"),
    }  # fmt: skip
    accuracy, instances = number(told[trained["id"], "job.metric"]), number(told[checked["id"], "job.metric"])
    assert (accuracy[0], accuracy[1] > 0.2, accuracy[2] in (10, 20, 30, 40)) == ("eval_accuracy", True, True)
    assert instances == ("instances", 4.0, None)


def number(event: WebhookEvent) -> tuple[str, float, int | None]:
    """The name, value and step that an event tells of."""
    assert event.data.metric is not None
    return event.data.metric.name, event.data.metric.value, event.data.metric.step
