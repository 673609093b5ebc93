"""Every form of a verification job: many queries, every method, searches for samples and boxes, rigorous bounds."""

from __future__ import annotations

import gzip
import re
from typing import Any

import pytest
import torch
from archives import zipped
from lanes import slow_but_for
from onnx_jobs import BOX, DECLARED, NETWORK, reach, specification, upload
from onnx_models import dense
from verify_jobs import Recorder, context, trained_model
from verify_jobs import specification as of_digits

from service.bounds.onnx import load
from service.jobs.files import DataLayout
from service.verification import job


def query(threshold: float) -> str:
    return f"{DECLARED}{BOX}(assert (>= Y_0 {threshold}))"


def archive(members: dict[str, str]) -> bytes:
    return zipped({f"{name}.gz": gzip.compress(text.encode()) for name, text in members.items()})


@pytest.mark.slow
def test_the_queries_of_an_archive_and_of_a_list_are_instances_of_one_job(trained: DataLayout) -> None:
    least, most = reach()
    span = most - least
    members = {"far.vnnlib": query(most + 9 * span), "near.vnnlib": query(most + 0.2 * span)}
    files = [upload(trained, archive(members)), upload(trained, query(most - 0.2 * span).encode())]
    ranked, report = context(trained)
    result = job.run(specification(trained, "", property={"vnnlib": files}, budget={"batch": 2}), ranked)
    assert result is not None
    assert [(row["name"], row["verdict"]) for row in report.bounds] == [
        ("far.vnnlib.gz", "verified"),
        ("near.vnnlib.gz", "verified"),
        (None, "falsified"),
    ]
    assert all(row["decided_by"] for row in report.bounds)
    assert [step[0] for step in report.steps] == [1, 2, 3], "told one by one"
    assert {moment["instance"] for moment in report.searches} <= {0, 1}, "an attack is over before it can be watched"
    assert {"instance", "domains", "open", "bound", "seconds"} == report.searches[-1].keys()
    spent = result["time"]
    assert spent["search"] + spent["attack"] > 0
    assert sum(spent.values()) <= result["wall_seconds"]
    assert result["memory_gib"] > 0


@pytest.mark.parametrize("intermediate", slow_but_for(["optimised", "fixed"], "optimised"))
def test_optimised_bounds_certify_more_and_say_how_they_were_found(trained: DataLayout, intermediate: str) -> None:
    digits = {"data": {"source": "digits"}, "count": 16, "eps": 0.03}
    fields = {"property": {"robustness": digits}, "budget": {"batch": 16, "iterations": 5}}
    plain = job.run(of_digits(**fields), context(trained)[0])
    ranked, report = context(trained)
    found = job.run(of_digits(**fields, method="alpha-crown", intermediate=intermediate), ranked)
    assert plain is not None
    assert found is not None
    assert found["mean_width"] < plain["mean_width"]
    expected = "alpha-crown" + (" (fixed intermediate bounds)" if intermediate == "fixed" else "")
    assert {found["method"], *(row["method"] for row in report.bounds)} == {expected}
    assert "note" not in plain
    kinds = ["intermediate bounds", "bounds asked for"] if intermediate == "optimised" else ["bounds asked for"]
    said = ", ".join(rf"{kind} (\d+\.\d\d)% narrower" for kind in kinds)
    brought = re.fullmatch(rf"optimised relaxations: {said}, by \d+% of iterations", found["note"])
    assert brought is not None
    assert all(float(each) > 0 for each in brought.groups())


@pytest.mark.slow
def test_a_search_decides_samples_that_bounds_leave_open(trained: DataLayout) -> None:
    digits = {"data": {"source": "digits"}, "count": 5, "eps": 0.05}
    ranked, report = context(trained)
    result = job.run(of_digits(property={"robustness": digits}, method="beta-crown", budget={"seconds": 20}), ranked)
    assert result is not None
    by = {row["decided_by"] for row in report.bounds}
    assert "bounds" not in by or len(by) > 1, "some were left open by bounds"
    assert result["verdicts"]["unknown"] == 0
    model = trained_model(trained).double()
    for row in report.bounds:
        if row["counterexample"] is not None:
            assert model(torch.tensor([row["counterexample"]], dtype=torch.float64)).isfinite().all()
        if row["verdict"] == "verified":
            assert row["margin"] >= 0


def boxed(network: bytes, trained: DataLayout, halfspace: dict[str, Any], **fields: Any) -> Recorder:
    box = {"lower": [-1.0] * 3, "upper": [1.0] * 3, "output": [halfspace]}
    ranked, report = context(trained)
    model = {"onnx": upload(trained, network)}
    job.run(specification(trained, "", model=model, property={"box": box}, method="beta-crown", **fields), ranked)
    return report


@pytest.mark.parametrize(("share", "verdict"), [(0.1, "falsified"), (-0.2, "verified")])
def test_a_search_decides_a_box(trained: DataLayout, share: float, verdict: str) -> None:
    least, most = reach()
    threshold = least + share * (most - least)
    (row,) = boxed(NETWORK, trained, {"coefficients": [1.0, 0.0], "threshold": threshold}).bounds
    assert row["verdict"] == verdict
    if verdict == "falsified":
        y = load(NETWORK).double()(torch.tensor([row["counterexample"]], dtype=torch.float64))
        assert float(y[0, 0]) < threshold


def test_an_output_that_reaches_its_threshold_does_not_violate_it(trained: DataLayout) -> None:
    """A network of zeros: ``y ≥ 0`` holds everywhere with equality, which rational arithmetic proves."""
    zeros = dense([3, 4, 2], scale=0.0)
    (row,) = boxed(zeros, trained, {"coefficients": [1.0, 0.0]}, budget={"seconds": 20}).bounds
    assert row["verdict"] == "verified"
    assert row["counterexample"] is None


@pytest.mark.slow
def test_a_search_ends_with_its_domains(trained: DataLayout) -> None:
    least, most = reach()
    ranked, report = context(trained)
    budget = {"domains": 2, "restarts": 0, "seconds": 600}
    job.run(specification(trained, query(most + 0.01 * (most - least)), method="ibp", budget=budget), ranked)
    (row,) = report.bounds
    assert (row["verdict"], row["decided_by"]) == ("unknown", None)
    assert row["reason"] == "budget.domains: 2 were bounded"
    assert row["domains"] < 2000
    assert row["seconds"] < 500
    assert report.searches[-1]["open"] > 0


def test_a_search_that_is_asked_to_stop_is_done_again_by_the_next_attempt(trained: DataLayout) -> None:
    least, most = reach()
    texts = [query(most + share * (most - least)) for share in (0.2, 9)]
    files = [upload(trained, text.encode()) for text in texts]
    fields = {"property": {"vnnlib": files}, "method": "ibp", "budget": {"seconds": 20, "restarts": 0}}
    asked = iter([False])
    stopped, _ = context(trained, should_stop=lambda: next(asked, True), job_id="job_" + "s" * 20)
    first = job.run(specification(trained, "", **fields), stopped)
    assert first is not None
    assert first["instances"] == 0
    assert first["completed"] == {"done": 0, "total": 2, "unit": "instances"}
    again, report = context(trained, job_id="job_" + "s" * 20, attempt=2)
    fields["method"] = "crown"
    second = job.run(specification(trained, "", **fields), again)
    assert second is not None
    assert [row["verdict"] for row in report.bounds] == ["verified", "verified"]
    assert second["completed"] == {"done": 2, "total": 2, "unit": "instances"}


@pytest.mark.parametrize(
    ("method", "norm"),
    slow_but_for(
        [("ibp", 2), ("crown-ibp", "inf"), ("crown", "inf"), ("crown", 2), ("alpha-crown", "inf")],
        ("crown", 2),
    ),
)
def test_rigorous_bounds_are_a_method_of_their_own(trained: DataLayout, method: str, norm: str | int) -> None:
    robustness = {"data": {"source": "digits"}, "count": 4, "eps": 0.01, "norm": norm}
    fields = {"method": method, "budget": {"iterations": 5}, "property": {"robustness": robustness}}
    plain, rigorous = context(trained), context(trained)
    job.run(of_digits(**fields), plain[0])
    result = job.run(of_digits(**fields, rigorous=True), rigorous[0])
    assert result is not None
    assert result["method"] == f"{method} (rigorous)"
    for row, expected in zip(rigorous[1].bounds, plain[1].bounds, strict=True):
        assert row["verdict"] == expected["verdict"]
        assert row["margin"] == pytest.approx(expected["margin"], abs=1e-3)
