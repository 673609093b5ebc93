"""The job: from a specification to rows, a result and a Parquet file; alone and on meshes."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from pyarrow import parquet
from torch import nn
from verify_jobs import context, robustness, specification, trained_model

from service.bounds.graph import UnsupportedModelError
from service.jobs.events import BoundsRow
from service.jobs.files import DataLayout
from service.models import build
from service.models.data import load
from service.verification import job
from service.verification.load import trained as trained_models
from service.verification.properties import PropertyError


@pytest.mark.parametrize("method", ["ibp", "crown-ibp", "crown"])
def test_a_trained_classifier_is_certified(trained: DataLayout, method: str) -> None:
    ranked, report = context(trained)
    result = job.run(specification(method=method), ranked)
    assert result is not None
    verdicts = result["verdicts"]
    assert verdicts.keys() == {"verified", "falsified", "unknown", "timeout"}
    assert sum(verdicts.values()) == 30
    assert result["certified_accuracy"] == verdicts["verified"] / 30
    assert result["clean_accuracy"] == 1 - verdicts["falsified"] / 30
    assert result["clean_accuracy"] > 0.7
    assert result["eps"] == 0.01
    assert result["mean_width"] > 0
    assert [layer["neurons"] for layer in result["layers"]] == [32, 16, 32]
    assert all(0 <= layer["mean_unstable"] <= layer["neurons"] for layer in result["layers"])
    assert [row["instance"] for row in report.bounds] == list(range(30))
    assert all(list(row) == [field.name for field in fields(BoundsRow)] for row in report.bounds)
    assert report.steps == [(8, 30, "instances"), (16, 30, "instances"), (24, 30, "instances"), (30, 30, "instances")]
    assert json.loads(json.dumps(result)) == result
    if method == "crown":
        assert verdicts["verified"] > 15
        assert report.lines[:2] == [
            "30 instances by crown on pp=1 × dp_replicate=1 × dp_shard=1 × tp=1 = 1 rank",
            "network: 64 inputs, 80 nonlinear neurons in 3 layers; batches of 8",
        ]
        counts = ", ".join(f"{count} {name}" for name, count in verdicts.items() if count)
        assert report.lines[-1].startswith(f"{counts} after ")


def test_nothing_is_computed_in_tf32(trained: DataLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    job.run(specification(method="ibp"), context(trained)[0])
    assert not torch.backends.cudnn.allow_tf32
    assert not torch.backends.cuda.matmul.allow_tf32


def test_certified_samples_survive_an_attack_and_falsified_ones_are_wrong(trained: DataLayout) -> None:
    ranked, report = context(trained)
    job.run(specification(), ranked)
    model = trained_model(trained).double()
    test = load(specification().property.robustness.data).test  # type: ignore[union-attr]
    for row in report.bounds:
        x, label = test.inputs[row["instance"]].double()[None], test.targets[row["instance"]]
        output = model(x)[0]
        assert (row["label"], row["prediction"]) == (label, output.argmax())
        assert (torch.tensor(row["lower"]) <= output + 1e-4).all()
        assert (torch.tensor(row["upper"]) >= output - 1e-4).all()
        if row["verdict"] == "falsified":
            assert row["counterexample"] == x[0].tolist()
            assert row["counterexample_outputs"] == pytest.approx(output.tolist(), rel=1e-12)
            assert row["onnxruntime_outputs"] is None
            assert output.argmax() != label
        else:
            assert row["counterexample"] is row["counterexample_outputs"] is row["sample"] is None
        if row["verdict"] == "verified":
            moved = x.clone().requires_grad_()
            nn.functional.cross_entropy(model(moved), label[None]).backward()
            assert moved.grad is not None
            assert model(x + 0.01 * moved.grad.sign()).argmax() == label


def test_a_counterexample_stands_beside_the_sample_around_which_it_was_found(trained: DataLayout) -> None:
    ranked, report = context(trained)
    wide = {"robustness": {"data": {"source": "digits"}, "count": 6, "eps": 0.3}}
    job.run(specification(method="beta-crown", property=wide, budget={"seconds": 5}), ranked)
    found = [row for row in report.bounds if row["decided_by"] == "attack"]
    assert found
    model, inputs = trained_model(trained).double(), load(specification().property.robustness.data).test.inputs  # type: ignore[union-attr]
    for row in found:
        sample = inputs[row["instance"]].double()
        assert row["sample"] == sample.tolist()
        assert row["sample_outputs"] == pytest.approx(model(sample[None])[0].tolist(), rel=1e-12)
        moved = (torch.tensor(row["counterexample"], dtype=torch.float64) - sample).abs()
        assert 0 < moved.max() <= 0.3 + 1e-9


def test_the_artifact_holds_the_rows(trained: DataLayout) -> None:
    ranked, report = context(trained)
    job.run(specification(), ranked)
    (path,) = report.artifacts
    assert path == ranked.paths.artifacts / "bounds.parquet"
    assert parquet.read_table(path).to_pylist() == report.bounds
    assert [left.name for left in path.parent.iterdir()] == ["bounds.parquet"]


def test_a_box_of_an_untrained_family(data: DataLayout) -> None:
    ranked, report = context(data)
    halfspace = {"coefficients": [1.0, 0.0], "threshold": -1e6}
    result = job.run(
        specification(
            model={"family": "mlp", "in_features": 2, "hidden": [8], "out_features": 2, "activation": "gelu"},
            property={"box": {"lower": [0.0, -1.0], "upper": [0.5, 1.0], "output": [halfspace]}},
        ),
        ranked,
    )
    assert result is not None
    assert result["verdicts"]["verified"] == 1
    assert "clean_accuracy" not in result
    (row,) = report.bounds
    assert all(low < high for low, high in zip(row["lower"], row["upper"], strict=True))


def test_numbers_that_are_not_finite_are_null(data: DataLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    def huge(*arguments: Any, **keywords: Any) -> nn.Module:
        module = build(*arguments, **keywords)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(1e30)
        return module

    monkeypatch.setattr(trained_models, "build", huge)
    ranked, report = context(data)
    model = {"family": "mlp", "in_features": 64, "hidden": [4, 4], "out_features": 10}
    result = job.run(specification(model=model), ranked)
    assert result is not None
    assert result["mean_width"] is None
    assert result["verdicts"]["verified"] == 0
    assert report.bounds[0]["margin"] is None
    json.dumps(report.bounds, allow_nan=False)
    json.dumps(result, allow_nan=False)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"model": {"family": "transformer"}}, PropertyError, "has no tokens, which a transformer reads"),
        (
            {"model": {"family": "transformer"}, "property": {"box": {"lower": [0.0], "upper": [1.0]}}},
            UnsupportedModelError,
            "aten.embedding",
        ),
        (
            {"property": {"robustness": {"data": {"source": "digits"}, "count": 400, "eps": 0.1}}},
            PropertyError,
            "count=400",
        ),
        ({"property": {"box": {"lower": [0.0], "upper": [1.0]}}}, PropertyError, "the model takes 64"),
        ({"model": {"job": "job_" + "9" * 20}}, ValueError, "has no weights"),
    ],
)
def test_a_job_that_cannot_be_done_ends_before_any_bounding(
    trained: DataLayout, fields: dict[str, Any], error: type[Exception], message: str
) -> None:
    ranked, report = context(trained)
    with pytest.raises(error, match=message):
        job.run(specification(**fields), ranked)
    assert report.bounds == []
    assert not report.artifacts


def test_a_job_that_is_asked_to_stop_keeps_what_it_has(trained: DataLayout) -> None:
    asked = iter([False, True])
    ranked, report = context(trained, should_stop=lambda: next(asked))
    result = job.run(specification(), ranked)
    assert result is not None
    assert result["instances"] == 8
    assert len(report.bounds) == 8


ON_A_MESH = 12
"""Instances, of which the batches are not all of one size."""


def run_on_mesh(folder: str, parallel: dict[str, int]) -> dict[str, Any]:
    import os

    from service.parallel import distributed

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    ranked, report = context(
        DataLayout(Path(folder)), rank, world, job_id=f"job_{next(iter(parallel)).replace('_', ''):x>20}"
    )
    result = job.run(specification(property=robustness(ON_A_MESH), parallel=parallel), ranked)
    distributed.stop()
    return {"result": result, "rows": report.bounds, "artifacts": [str(path) for path in report.artifacts]}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("parallel", [{"tp": 2}, {"dp_shard": 2}, {"pp": 2}])
def test_a_mesh_finds_what_one_rank_finds(trained: DataLayout, torchrun: Any, parallel: dict[str, int]) -> None:
    ranked, report = context(trained)
    alone = job.run(specification(property=robustness(ON_A_MESH)), ranked)
    first, second = torchrun(run_on_mesh, 2, folder=str(trained.root), parallel=parallel)
    assert alone is not None
    assert second["result"] is None
    assert second["artifacts"] == []
    assert first["result"]["verdicts"] == alone["verdicts"]
    assert first["result"]["mean_width"] == pytest.approx(alone["mean_width"], rel=2e-5)
    for layer, expected in zip(first["result"]["layers"], alone["layers"], strict=True):
        assert layer["neurons"] == expected["neurons"]
        assert layer["mean_unstable"] == pytest.approx(expected["mean_unstable"])
        assert layer["mean_width"] == pytest.approx(expected["mean_width"], rel=2e-5)
    streamed = sorted([*first["rows"], *second["rows"]], key=lambda row: row["instance"])
    assert [row["instance"] for row in streamed] == list(range(ON_A_MESH))
    (artifact,) = first["artifacts"]
    kept = parquet.read_table(artifact).to_pylist()
    assert kept == streamed
    size = max(abs(value) for row in report.bounds for value in (*row["lower"], *row["upper"]))
    for row, expected in zip(kept, report.bounds, strict=True):
        assert row["verdict"] == expected["verdict"]
        assert row["counterexample"] == expected["counterexample"]
        assert row["lower"] == pytest.approx(expected["lower"], abs=2e-5 * size)
        assert row["margin"] == pytest.approx(expected["margin"], abs=4e-5 * size)
