"""Jobs whose memory does not suffice: instances end as unknown, with the reason, and the job goes on."""

from __future__ import annotations

import io
import time
import weakref
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from lanes import slow_but_for
from limited_memory import OPTIMISTIC, Claims, LimitedMemory, size_of
from meshes import start_mesh
from nets import mlp
from onnx_jobs import BOX, DECLARED, upload
from onnx_models import dense
from pydantic import ValidationError
from search_problems import exact_minimum, model_from, specification_of, split_activations, split_inputs
from torch import nn
from verify_jobs import context, specification

from service.bounds.interval import Interval
from service.bounds.memory import MemoryBudget, MemoryShortageError, SystemMeter
from service.bounds.methods import CROWN, METHODS, BoundOptions
from service.bounds.network import prepare
from service.jobs.files import DataLayout
from service.jobs.spec.common import ParallelSpec
from service.jobs.spec.model import MlpConfig
from service.jobs.spec.verify import VerifySpec
from service.models import build
from service.parallel import distributed
from service.parallel.mesh import Axis, Mesh
from service.parallel.mesh import build as build_mesh
from service.verification import job
from service.verification.bab.search_group import SearchGroup
from service.verification.failures import RowFailures, RowsFailedError
from service.verification.task import Task

QUERY = DECLARED + BOX + "(assert (>= Y_0 1000))"


@pytest.mark.parametrize("memory", [0, -1, "much", float("nan"), float("inf"), 10**7])
def test_a_budget_of_memory_is_a_positive_number_of_gib(memory: Any) -> None:
    with pytest.raises(ValidationError, match="memory_gib"):
        specification(budget={"memory_gib": memory})
    assert specification(budget={"memory_gib": 0.5}).budget.memory_gib == 0.5


@pytest.mark.parametrize("method", slow_but_for(["crown", "alpha-crown", "beta-crown"], "crown"))
def test_a_job_that_needs_more_than_its_budget_ends_with_reasons(trained: DataLayout, method: str) -> None:
    """This process takes more than a MiB before anything is bounded: no step fits, and intervals prove nothing."""
    ranked, report = context(trained)
    ball = {"robustness": {"data": {"source": "digits"}, "count": 30, "eps": 0.05}}
    budget = {"memory_gib": 2**-10, "batch": 8, "seconds": 5}
    spec = specification(method=method, property=ball, budget=budget)
    result = job.run(spec, ranked)
    assert result is not None
    assert len(report.bounds) == 30
    assert result["verdicts"]["verified"] == 0
    for row in report.bounds:
        if row["verdict"] == "unknown":
            assert row["reason"].startswith("out of memory in the ")
            assert "are needed, 0 B are free on cpu within budget.memory_gib=0.00097" in row["reason"]
    assert result["verdicts"]["unknown"] == 30 - result["verdicts"]["falsified"]


def archive(data: DataLayout, models: dict[str, bytes]) -> str:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as file:
        file.writestr("instances.csv", "".join(f"{name},query.vnnlib\n" for name in models))
        file.writestr("query.vnnlib", QUERY)
        for name, model in models.items():
            file.writestr(name, model)
    return upload(data, content.getvalue())


def test_a_model_that_does_not_fit_does_not_stop_the_others(data: DataLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three models in an archive the one in the middle is larger than the memory that there is."""
    small, large = dense([3, 10, 10, 2]), dense([3, 600, 600, 2])
    file = archive(data, {"a.onnx": small, "b.onnx": large, "c.onnx": small})
    limited = LimitedMemory(2**20)
    monkeypatch.setattr(SystemMeter, "used", lambda meter, device: limited.used(device))
    monkeypatch.setattr(SystemMeter, "free", lambda meter, device: limited.free(device))
    ranked, report = context(data)
    spec = VerifySpec.model_validate(
        {"property": {"instances": file}, "method": "beta-crown", "budget": {"seconds": 20, "restarts": 0}}
    )
    with limited:
        result = job.run(spec, ranked)
    assert result is not None
    rows = {row["name"]: row for row in report.bounds}
    verdicts = [rows[f"{name} query.vnnlib"]["verdict"] for name in ("a.onnx", "b.onnx", "c.onnx")]
    assert verdicts == ["verified", "unknown", "verified"]
    assert "out of memory in preparing the model" in rows["b.onnx query.vnnlib"]["reason"]
    assert limited.refused


def test_an_only_model_that_does_not_fit_ends_every_instance(data: DataLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    file, query = upload(data, dense([3, 600, 600, 2])), upload(data, QUERY.encode())
    limited = LimitedMemory(2**20)
    monkeypatch.setattr(SystemMeter, "free", lambda meter, device: limited.free(device))
    ranked, report = context(data)
    spec = VerifySpec.model_validate({"model": {"onnx": file}, "property": {"vnnlib": [query, query]}})
    with limited:
        result = job.run(spec, ranked)
    assert result is not None
    assert result["verdicts"]["unknown"] == 2
    assert all("out of memory in preparing the model" in row["reason"] for row in report.bounds)


@pytest.mark.slow
def test_a_batch_that_does_not_fit_is_bounded_in_smaller_ones(
    trained: DataLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Instances of which only a few can be bounded together have the bounds of all together."""
    whole, expected = context(trained)
    spec = specification(budget={"batch": 30})
    job.run(spec, whole)
    ranked, report = context(trained)
    asked, certify = list[int](), job.certify

    def scarce(engine: Any, checker: Any, method: Any, options: Any, question: Any, *, clock: Any) -> Any:
        asked.append(len(question.instances))
        if len(question.instances) > 4:
            raise torch.OutOfMemoryError
        return certify(engine, checker, method, options, question, clock=clock)

    monkeypatch.setattr(job, "certify", scarce)
    job.run(spec, ranked)
    assert asked == [30, 15, 7, 3, 4, 8, 4, 4, 15, 7, 3, 4, 8, 4, 4]
    for row, wanted in zip(report.bounds, expected.bounds, strict=True):
        assert row["verdict"] == wanted["verdict"]
        torch.testing.assert_close(torch.tensor(row["lower"]), torch.tensor(wanted["lower"]), rtol=1e-4, atol=1e-4)


def test_the_errors_of_failed_instances_hold_no_tensors() -> None:
    held, failures = list[weakref.ref[torch.Tensor]](), RowFailures(context(DataLayout(Path()))[1])

    def fail() -> None:
        tensor = torch.zeros(3)
        held.append(weakref.ref(tensor))
        raise ValueError("a defect")

    def fail_because() -> None:
        try:
            fail()
        except ValueError as error:
            raise RuntimeError from error

    def fail_in_a_circle() -> None:
        try:
            fail()
        except ValueError as error:
            raise error from error

    for instance, run in enumerate((fail, fail_because, fail_in_a_circle)):
        failures.unless_failed(cast(Task, SimpleNamespace(is_alone=True)), [instance], run)
    assert [each() for each in held] == [None] * 3
    with pytest.raises(RowsFailedError, match="a defect"):
        failures.raise_first(1)


def searches_and_bounds_with_little_memory() -> dict[str, Any]:
    searched, reasons = search_with_little_memory(start_mesh(dp_replicate=2).dp)
    bounded = bound_with_little_memory(build_mesh(ParallelSpec(tp=2), "cpu"))
    distributed.stop()
    return {"found": searched | bounded, "reasons": reasons}


def search_with_little_memory(axis: Axis) -> tuple[dict[str, Any], dict[str, str]]:
    """The outcomes of searches, by how little memory the second rank has, and why some fell short."""
    found, reasons = dict[str, Any](), dict[str, str]()
    one, row = torch.ones(3, dtype=torch.float64), torch.tensor([[1.0, -1.0]], dtype=torch.float64)
    net = mlp([3, 7, 6, 2], nn.ReLU(), 0).double().requires_grad_(False)
    goal = specification_of(-one, one, row, [exact_minimum(net, -one, one, row[0]) - 1.0], [0])
    for search in (split_inputs, split_activations):
        options = BoundOptions(memory=OPTIMISTIC)
        subject = replace(model_from(net, 3), search_group=SearchGroup(axis), options=options)
        for room in (1000, 20_000, 2**30):
            with LimitedMemory(size_of(net) + room if axis.rank else 2**30, net):
                try:
                    finding = search(subject, goal, CROWN, time.monotonic() + 600, lambda _: None)
                    outcome, shortage = finding.verdict.value, finding.shortage
                except MemoryShortageError as error:
                    outcome, shortage = "short", error
            found[f"{search.__name__} {room}"] = outcome
            reasons[f"{search.__name__} {room}"] = "" if shortage is None else str(shortage)
    return found, reasons


def bound_with_little_memory(mesh: Mesh) -> dict[str, Any]:
    """The entries of a part, by the memory that is free on the second tensor-parallel rank."""
    found = dict[str, Any]()
    module = build(MlpConfig(in_features=8, hidden=(8, 8), out_features=2), mesh, dtype=torch.float64, seed=1)
    network = prepare(module.eval().requires_grad_(False), (8,), mesh.tp)
    box = Interval(-torch.ones(1, 8, dtype=torch.float64), torch.ones(1, 8, dtype=torch.float64))
    for name, free in (("none", 0), ("some", 2**14)):
        memory = MemoryBudget(2**40, Claims(free if mesh.tp.rank else 2**40))
        try:
            with torch.no_grad():
                analysis = METHODS["crown"](network, box, BoundOptions(memory=memory))
            found[name] = analysis.options.elements  # type: ignore[attr-defined]
        except MemoryShortageError:
            found[name] = "short"
    return found


@pytest.mark.slow
@pytest.mark.distributed
def test_ranks_take_the_same_decision_where_memory_is_short_on_one(torchrun: Any) -> None:
    """A search whose second rank has no memory for boxes that are handed over goes on with the first alone; one that
    bounds the whole box on both ranks ends. Tensor-parallel ranks plan by the one that has least.

    Where the second rank has some memory, the search may suffice with it; else a rank says where it ended.
    """
    ranks = torchrun(searches_and_bounds_with_little_memory, 2)
    first, second = (rank["found"] for rank in ranks)
    assert first == second
    assert (first["none"], first["some"]) == ("short", 2**14 // 256)
    assert (first["split_inputs 1000"], first["split_activations 1000"]) == ("verified", "short")
    for search in ("split_inputs", "split_activations"):
        reasons = [rank["reasons"][f"{search} 20000"] for rank in ranks]
        is_named = any(reason.startswith("out of memory in ") for reason in reasons)
        assert first[f"{search} 20000"] == "verified" or is_named, (first, reasons)
        assert not any(rank["reasons"][f"{search} {2**30}"] for rank in ranks)
        assert first[f"{search} {2**30}"] == "verified"
