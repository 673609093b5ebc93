"""Jobs about Euclidean balls of inputs: what they certify, and counterexamples that stay inside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from verify_jobs import TRAINED, context, specification, trained_model

from service.jobs.files import DataLayout
from service.models.data import load
from service.verification import job


def euclidean(eps: float, count: int = 12, **fields: Any) -> Any:
    digits = {"data": {"source": "digits"}, "count": count, "eps": eps, "norm": 2}
    return specification(model={"job": TRAINED}, property={"robustness": digits}, **fields)


@pytest.mark.slow
def test_a_job_certifies_balls(trained: DataLayout) -> None:
    result = job.run(euclidean(0.05), context(trained)[0])
    assert result is not None
    assert result["verdicts"]["verified"] > 6
    box = {"data": {"source": "digits"}, "count": 12, "eps": 0.05}
    boxed, _ = context(trained)
    wider = job.run(specification(property={"robustness": box}), boxed)
    assert wider is not None
    assert result["mean_width"] < wider["mean_width"] / 2


def test_counterexamples_lie_in_the_ball_and_change_the_class(trained: DataLayout) -> None:
    ranked, report = context(trained)
    eps = 0.45
    result = job.run(euclidean(eps, 5, method="beta-crown", budget={"seconds": 1}), ranked)
    assert result is not None
    model, test = trained_model(trained).double(), load(euclidean(eps).property.robustness.data).test
    found = [row for row in report.bounds if row["decided_by"] not in (None, "bounds", "witness")]
    falsified = [row for row in found if row["verdict"] == "falsified"]
    assert falsified
    for row in falsified:
        x, sample = torch.tensor(row["counterexample"], dtype=torch.float64), test.inputs[row["instance"]].double()
        assert float((x - sample).norm()) <= eps
        assert model(x[None])[0].argmax() != test.targets[row["instance"]]
        assert model(sample[None])[0].argmax() == test.targets[row["instance"]]
    assert pytest.approx(result["clean_accuracy"]) == 1 - sum(r["decided_by"] == "witness" for r in report.bounds) / 5
