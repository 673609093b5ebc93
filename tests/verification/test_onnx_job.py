"""Jobs on ONNX models and VNN-LIB queries, from uploaded files to rows and a result."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lanes import first_fast
from onnx import TensorProto
from onnx_jobs import BOX, DECLARED, NETWORK, reach, specification, upload
from onnx_models import model, node
from verify_jobs import context

from service.bounds.onnx import load
from service.jobs.files import DataLayout
from service.jobs.spec.verify import VerifySpec
from service.verification import job
from service.verification.properties import PropertyError

_BETWEEN = "(assert (<= X_0 1))(assert (>= X_0 -1))"


@pytest.mark.parametrize("reached", [True, False])
def test_a_query_is_decided(data: DataLayout, reached: bool) -> None:
    least, most = reach()
    threshold = most + (-0.1 if reached else 0.2) * (most - least)
    ranked, report = context(data)
    result = job.run(specification(data, f"{DECLARED}{BOX}(assert (>= Y_0 {threshold}))"), ranked)
    assert result is not None
    (row,) = report.bounds
    assert row["verdict"] == ("falsified" if reached else "verified")
    assert result["verdicts"][row["verdict"]] == 1
    assert row["lower"][0] <= least <= most <= row["upper"][0]
    if reached:
        y = load(NETWORK).double()(torch.tensor([row["counterexample"]], dtype=torch.float64))
        assert float(y[0, 0]) >= threshold
        assert row["counterexample_outputs"] == pytest.approx(y[0].tolist(), rel=1e-12)
        assert row["onnxruntime_outputs"] == pytest.approx(y[0].tolist(), rel=1e-4)
        assert all(-1 <= entry <= 1 for entry in row["counterexample"])
    else:
        assert row["counterexample"] is None
        assert result["time"]["replays"] > 0


def test_a_search_that_is_out_of_time_says_so(data: DataLayout) -> None:
    least, most = reach()
    query = f"{DECLARED}{BOX}(assert (>= Y_0 {most + 0.03 * (most - least)}))"
    ranked, report = context(data)
    result = job.run(specification(data, query, method="ibp", budget={"seconds": 1e-6}), ranked)
    assert result is not None
    assert result["verdicts"]["timeout"] == 1
    assert report.bounds[0]["verdict"] == "timeout"
    assert report.bounds[0]["reason"].endswith("seconds were spent")


@pytest.mark.parametrize(("comparison", "verdict"), [(">", "verified"), (">=", "falsified")])
def test_a_bound_that_is_attained_is_told_from_one_that_is_passed(
    data: DataLayout, comparison: str, verdict: str
) -> None:
    nodes = [node("Relu", ["x"], "p"), node("Neg", ["x"], "n"), node("Relu", ["n"], "q"), node("Sub", ["p", "q"])]
    query = f"(declare-const X_0 Real)(declare-const Y_0 Real){_BETWEEN}(assert ({comparison} Y_0 1.0))"
    ranked, report = context(data)
    job.run(specification(data, query, model={"onnx": upload(data, model(nodes, [1, 1]))}), ranked)
    assert report.bounds[0]["verdict"] == verdict


@pytest.mark.parametrize(("most", "verdict"), first_fast(1, [(2.01, "verified"), (1.9, "falsified")]))
def test_rows_of_a_table_are_searched_without_gradients(data: DataLayout, most: float, verdict: str) -> None:
    nodes = [node("Cast", ["x"], "i", to=TensorProto.INT64), node("Gather", ["E", "i"], "rows"),
             node("ReduceMean", ["rows"], axes=[1])]  # fmt: skip
    content = model(nodes, [1, 3], {"E": np.array([0.0, 1, 2, -1, 0.5], np.float32)}, opset=13)
    inputs = "".join(f"(declare-const X_{i} Real)(assert (>= X_{i} 0))(assert (<= X_{i} 4))" for i in range(3))
    query = f"{inputs}(declare-const Y_0 Real)(assert (>= Y_0 {most}))"
    ranked, report = context(data)
    spec = specification(data, query, model={"onnx": upload(data, content)}, method="beta-crown")
    job.run(spec, ranked)
    assert report.bounds[0]["verdict"] == verdict


@pytest.mark.parametrize(
    ("asked", "verdict"),
    first_fast(1, [("(<= Y_3 Y_2)", "falsified"), ("(>= Y_3 1)", "verified"), ("(<= Y_0 0)", "verified")]),
)
def test_a_query_about_a_label_beside_its_scores(data: DataLayout, asked: str, verdict: str) -> None:
    """``Y_3`` is the place of the largest score, which is the first one's in the box."""
    content = model(
        [
            node("Softmax", ["x"], "p", axis=1),
            node("ArgMax", ["p"], "label", axis=1),
            node("Cast", ["label"], "y", to=1),
        ],
        [1, 3],
        outputs=("p", "y"),
    )
    inputs = "".join(
        f"(declare-const X_{i} Real)(assert (>= X_{i} {2 - i}))(assert (<= X_{i} {2.9 - i}))" for i in range(3)
    )
    declared = inputs + "".join(f"(declare-const Y_{i} Real)" for i in range(4))
    ranked, report = context(data)
    job.run(specification(data, f"{declared}(assert {asked})", model={"onnx": upload(data, content)}), ranked)
    assert report.bounds[0]["verdict"] == verdict


def test_what_is_chosen_of_a_file_is_bounded(data: DataLayout) -> None:
    nodes = [node("Mul", ["x", "c"], "scaled"), node("Add", ["scaled", "d"], "moved"), node("Relu", ["moved"])]
    content = model(
        nodes, [1, 2], {"c": np.array([[2.0, -1.0]], np.float32), "d": np.float32(1)}, outputs=("y", "moved")
    )
    chosen = {"onnx": upload(data, content), "outputs": ["scaled"]}
    ranked, report = context(data)
    job.run(specification(data, "", model=chosen, property={"box": {"lower": [0, 0], "upper": [1, 1]}}), ranked)
    (row,) = report.bounds
    assert (row["lower"], row["upper"]) == ([0.0, -1.0], [2.0, 0.0])


def test_a_box_of_an_onnx_model(data: DataLayout) -> None:
    box = {"lower": [-1, -1, -1], "upper": [1, 1, 1], "output": [{"coefficients": [1, 0], "threshold": -1e6}]}
    ranked, report = context(data)
    job.run(specification(data, "", property={"box": box}), ranked)
    assert report.bounds[0]["verdict"] == "verified"


def test_a_query_about_a_built_in_model(data: DataLayout) -> None:
    model = {"family": "mlp", "in_features": 3, "hidden": [4], "out_features": 2}
    ranked, report = context(data)
    job.run(specification(data, f"{DECLARED}{BOX}(assert (>= Y_1 1000))", model=model), ranked)
    assert report.bounds[0]["verdict"] == "verified"


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("(assert", "property.vnnlib: line 1: got '('"),
        ("(declare-const X_0 Real)(declare-const Y_0 Real)(assert (<= 0 X_0 ))(assert (<= X_0 1))", "has 3 and 2"),
        (f"{DECLARED}{BOX}(assert (>= X_0 2))", "no input satisfies"),
    ],
)  # fmt: skip
def test_a_query_that_does_not_fit_is_refused(data: DataLayout, query: str, message: str) -> None:
    with pytest.raises(PropertyError) as refused:
        job.run(specification(data, query), context(data)[0])
    assert message in str(refused.value)


def on_a_mesh(folder: str, cases: list[dict[str, Any]], parallel: dict[str, int]) -> list[dict[str, Any]]:
    """Each specification as a job of its own."""
    import os

    from service.parallel import distributed

    found = []
    for index, fields in enumerate(cases):
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        ranked, report = context(DataLayout(Path(folder)), rank, world, job_id=f"job_{index:a>20}")
        result = job.run(VerifySpec.model_validate({"device": "cpu", "parallel": parallel, **fields}), ranked)
        found.append({"rows": report.bounds, "layers": None if result is None else result["layers"]})
    distributed.stop()
    return found


@pytest.mark.slow
@pytest.mark.distributed
def test_an_onnx_model_on_a_mesh_is_verified_and_searched(data: DataLayout, torchrun: Any) -> None:
    """In stages of two ranks each; on the ranks of one axis, rigorous jobs are searched in test_rigorous_searches."""
    least, most = reach()
    box = {"lower": [-1, -1, -1], "upper": [1, 1, 1]}
    at = [most + share * (most - least) for share in (0.02, -0.1)]
    queries = [f"{DECLARED}{BOX}(assert (>= Y_0 {threshold}))" for threshold in at]
    network = upload(data, NETWORK)
    fields = [{"model": {"onnx": network}, "property": {"vnnlib": upload(data, query.encode())}} for query in queries]
    fields += [{"model": {"onnx": network}, "property": {"box": box}, "method": "alpha-crown"}]
    mesh = {"pp": 2, "tp": 2}
    proved, refuted, bounded = torchrun(on_a_mesh, 4, folder=str(data.root), cases=fields, parallel=mesh)[0]
    assert proved["rows"][0]["verdict"] == "verified"
    assert proved["rows"][0]["decided_by"] == "input splitting"
    assert refuted["rows"][0]["verdict"] == "falsified"
    assert refuted["rows"][0]["counterexample_outputs"][0] >= at[1]
    assert refuted["rows"][0]["onnxruntime_outputs"][0] >= at[1]
    x = torch.tensor(refuted["rows"][0]["counterexample"], dtype=torch.float64)
    assert float(load(NETWORK).double()(x[None])[0, 0]) >= at[1]
    ranked, report = context(data)
    alone = job.run(VerifySpec.model_validate({"device": "cpu", **fields[2]}), ranked)
    assert alone is not None
    for end in ("lower", "upper"):
        assert bounded["rows"][0][end] == pytest.approx(report.bounds[0][end], abs=2e-5 * (most - least))
    assert [layer["neurons"] for layer in bounded["layers"]] == [layer["neurons"] for layer in alone["layers"]]


def on_two_ranks(folder: str, box: dict[str, Any], odd: str) -> dict[str, Any]:
    import os

    from service.bounds.graph import UnsupportedModelError
    from service.parallel import distributed

    data, rank = DataLayout(Path(folder)), int(os.environ["RANK"])
    ranked, report = context(data, rank, 2)
    try:
        fields = {"model": None, "property": {"instances": odd}, "parallel": {"tp": 2}}
        job.run(specification(data, "", **fields), context(data, rank, 2)[0])
        refused = ""
    except UnsupportedModelError as error:
        refused = str(error)
    result = job.run(specification(data, "", property={"box": box}, parallel={"tp": 2}), ranked)
    distributed.stop()
    return {"rows": report.bounds, "layers": None if result is None else result["layers"], "refused": refused}


@pytest.mark.slow
@pytest.mark.distributed
def test_an_onnx_model_is_divided_over_ranks(data: DataLayout, torchrun: Any) -> None:
    box = {"lower": [-1, -1, -1], "upper": [1, 1, 1]}
    ranked, report = context(data)
    alone = job.run(specification(data, "", property={"box": box}), ranked)
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("instances.csv", "odd.onnx,q.vnnlib\n")
        archive.writestr("odd.onnx", model([node("Det", ["x"], "y")], [1, 2, 2], {}, opset=17))
        archive.writestr("q.vnnlib", f"{DECLARED}{BOX}(assert (>= Y_0 0))")
    first, other = torchrun(on_two_ranks, 2, folder=str(data.root), box=box, odd=upload(data, made.getvalue()))
    assert [each["refused"].partition(" (")[0] for each in (first, other)] == ["odd.onnx: no rule for ONNX Det"] * 2
    assert alone is not None
    (row,), (expected,) = first["rows"], report.bounds
    for end in ("lower", "upper"):
        assert row[end] == pytest.approx(expected[end], abs=2e-5 * max(map(abs, expected[end])))
    assert [layer["neurons"] for layer in first["layers"]] == [layer["neurons"] for layer in alone["layers"]]


def steep() -> bytes:
    """``relu(1e8 (x − 100)) − relu(1e8 (x − 100) − 1)`` in float64: a step that float32 does not see."""
    nodes = [
        node("Gemm", ["x", "w", "b"], "h"),
        node("Relu", ["h"], "r"),
        node("Gemm", ["r", "v"]),
    ]
    constants = {"w": np.full((1, 2), 1e8), "b": np.array([-1e10, -1e10 - 1]), "v": np.array([[1.0], [-1.0]])}
    return model(nodes, [1, 1], constants, opset=13, kind=TensorProto.DOUBLE)


def offset() -> bytes:
    nodes = [node("Add", ["x", "o"], "h"), node("Relu", ["h"], "r"), node("Sub", ["r", "o"])]
    return model(nodes, [1, 1], {"o": np.array([[2.0**30]])}, opset=13, kind=TensorProto.DOUBLE)


@pytest.mark.parametrize(
    ("network", "box", "unsafe", "verdict"),
    first_fast(
        2,
        [
            (steep(), (200, 300), "(>= Y_0 0.5)", "falsified"),
            (offset(), (-1, 1), "(>= Y_0 1.1)", "verified"),
            (steep(), (200, 300), "(<= Y_0 0.5)", "verified"),
            (offset(), (-1, 1), "(>= Y_0 0.9)", "falsified"),
        ],
    ),
)
def test_a_double_model_is_bounded_and_attacked_in_double(
    data: DataLayout, network: bytes, box: tuple[int, int], unsafe: str, verdict: str
) -> None:
    declared = "(declare-const X_0 Real)(declare-const Y_0 Real)"
    query = f"{declared}(assert (>= X_0 {box[0]}))(assert (<= X_0 {box[1]}))(assert {unsafe})"
    ranked, report = context(data)
    job.run(specification(data, query, model={"onnx": upload(data, network)}), ranked)
    assert report.bounds[0]["verdict"] == verdict


def test_a_query_whose_conditions_contradict_each_other_says_so(data: DataLayout) -> None:
    """It holds whatever the network, and a case that contradicts itself beside others is left out."""
    ranked, report = context(data)
    never = "(and (> Y_0 Y_1) (> Y_1 Y_0))"
    job.run(specification(data, f"{DECLARED}{BOX}(assert {never})"), ranked)
    (row,) = report.bounds
    assert (row["verdict"], row["decided_by"]) == ("verified", "the query")
    assert "contradict each other" in row["note"]
    ranked, report = context(data)
    job.run(specification(data, f"{DECLARED}{BOX}(assert (or {never} (>= Y_0 -1000)))"), ranked)
    (row,) = report.bounds
    assert row["verdict"] == "falsified"
    assert row["note"].startswith("1 of the query's 2 cases")
