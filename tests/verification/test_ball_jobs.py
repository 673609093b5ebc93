"""Jobs about balls of inputs by each norm: what they certify, and counterexamples that stay inside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lanes import slow_but_for
from verify_jobs import TRAINED, context, specification, trained_model

from service.bounds.near import NearLayers
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


def run_on_mesh(folder: str, parallel: dict[str, int], norm: int) -> list[dict[str, Any]]:
    import os

    from service.parallel import distributed

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    name = f"job_{next(iter(parallel)):x>20}"
    ranked, report = context(DataLayout(Path(folder)), rank, world, job_id=name)
    job.run(ball(norm, 4, parallel=parallel), ranked)
    distributed.stop()
    return list(report.bounds)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("parallel", "norm"), [({"tp": 2}, 0), ({"tp": 2}, 1), ({"pp": 2}, 2)])
def test_ranks_that_share_a_model_bound_balls_as_one_does_without_the_offsets(
    trained: DataLayout, torchrun: Any, parallel: dict[str, int], norm: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = torchrun(run_on_mesh, 2, folder=str(trained.root), parallel=parallel, norm=norm)
    better, report = context(trained)
    job.run(ball(norm, 4), better)
    monkeypatch.setattr(NearLayers, "of", lambda network, box: NearLayers(network, {}))
    alone, plain = context(trained)
    job.run(ball(norm, 4), alone)
    for row, expected, tight in zip(first, plain.bounds, report.bounds, strict=True):
        size = max(map(abs, (*expected["lower"], *expected["upper"])))
        # The first stage of several has the offsets of its own layers.
        assert "pp" in parallel or row["lower"] == pytest.approx(expected["lower"], abs=2e-5 * size)
        for three in zip(expected["lower"], row["lower"], tight["lower"], strict=True):
            assert three[0] - 2e-5 * size <= three[1] <= three[2] + 2e-5 * size
