"""Jobs about balls of inputs by each norm: what they certify, and counterexamples that stay inside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lanes import slow_but_for
from verify_jobs import TRAINED, context, specification, trained_model

from service.jobs.files import DataLayout
from service.models.data import load
from service.verification import job

NORMS: dict[Any, dict[str, Any]] = {2: {"eps": 0.45}, 1: {"eps": 1.5}, 0: {"eps": 1.0, "entries": 3, "clip": "data"}}


def ball(norm: int, count: int = 12, asked: Any = None, **fields: Any) -> Any:
    digits = {"data": {"source": "digits"}, "count": count, "norm": norm, **NORMS[norm], **(asked or {})}
    return specification(model={"job": TRAINED}, property={"robustness": digits}, **fields)


@pytest.mark.slow
def test_a_job_certifies_balls(trained: DataLayout) -> None:
    result = job.run(ball(2, asked={"eps": 0.05}), context(trained)[0])
    assert result is not None
    assert result["verdicts"]["verified"] > 6
    box = {"data": {"source": "digits"}, "count": 12, "eps": 0.05}
    boxed, _ = context(trained)
    wider = job.run(specification(property={"robustness": box}), boxed)
    assert wider is not None
    assert result["mean_width"] < wider["mean_width"] / 2


@pytest.mark.parametrize("norm", slow_but_for([2, 1, 0], 0))
def test_counterexamples_lie_in_the_ball_and_change_the_class(trained: DataLayout, norm: int) -> None:
    ranked, report = context(trained)
    spec = ball(norm, 5, method="beta-crown", budget={"seconds": 2})
    result = job.run(spec, ranked)
    assert result is not None
    model, test = trained_model(trained).double(), load(spec.property.robustness.data).test
    found = [row for row in report.bounds if row["decided_by"] not in (None, "bounds", "witness")]
    falsified = [row for row in found if row["verdict"] == "falsified"]
    assert falsified
    for row in falsified:
        x, sample = torch.tensor(row["counterexample"], dtype=torch.float64), test.inputs[row["instance"]].double()
        changes = (x - sample).abs()
        asked = NORMS[norm]
        assert (changes.count_nonzero() if norm == 0 else changes.norm(p=norm)) <= asked.get("entries", asked["eps"])
        assert norm > 0 or (x.min() >= 0 and x.max() <= 1 and changes.max() <= asked["eps"])
        assert model(x[None])[0].argmax() != test.targets[row["instance"]]
        assert model(sample[None])[0].argmax() == test.targets[row["instance"]]
    assert pytest.approx(result["clean_accuracy"]) == 1 - sum(r["decided_by"] == "witness" for r in report.bounds) / 5
