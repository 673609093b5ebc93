"""Verified rows are attacked by their own files before they are published."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import numpy as np
import onnx
import pytest
import torch
from onnx_jobs import BOX, DECLARED, NETWORK, reach, specification, upload
from onnx_models import model, node
from torch import Tensor, nn
from verify_jobs import context

from service.bounds.finite import undefined_nodes
from service.bounds.interval import Interval
from service.bounds.methods import METHODS, BoundOptions
from service.bounds.network import prepare
from service.bounds.onnx import load
from service.bounds.onnx.own_file import OwnFile
from service.bounds.onnx.reading import Runtime, parse
from service.bounds.operators.conversion import Array
from service.jobs.files import DataLayout
from service.jobs.spec.families.transformer import TransformerConfig
from service.jobs.spec.verify import VerifySpec
from service.models import build
from service.models.transformer import AfterEmbedding, Transformer
from service.verification import job, outside
from service.verification.bab.specification import Specification
from service.verification.bab.visited import VisitedInputs
from service.verification.defined import open_tests
from service.verification.failures import RowsFailedError
from service.verification.task import Task

BEYOND = reach()[1] + 5


def query(least: float = BEYOND) -> str:
    """Holds, by far, for what :data:`NETWORK` gives."""
    return f"{DECLARED}{BOX}(assert (>= Y_0 {least}))"


def giving(outputs: Callable[[Array], Array], asked: list[Array]) -> Callable[[OwnFile, Array], Array]:
    def flat(file: OwnFile, instance: Array) -> Array:
        asked.append(instance)
        return outputs(instance)

    return flat


@pytest.mark.parametrize("reached", [BEYOND + 1, np.inf])
def test_a_file_that_violates_what_was_proved_makes_an_error_with_a_report(
    data: DataLayout, monkeypatch: pytest.MonkeyPatch, reached: float
) -> None:
    asked = list[Array]()
    monkeypatch.setattr(OwnFile, "flat", giving(lambda x: np.array([reached if x[0] == 1 else 0.0, 0.0]), asked))
    ranked, report = context(data)
    with pytest.raises(RowsFailedError, match="violates it, which is an error of Trivet: please report its artifact"):
        job.run(specification(data, query()), ranked)
    assert report.bounds == []
    with zipfile.ZipFile(ranked.paths.artifacts / "error-of-instance-0.zip") as bundle:
        assert bundle.read("model.onnx") == NETWORK
        told = json.loads(bundle.read("report.json"))
    assert told["input"] == asked[-1].tolist()
    assert told["outputs"] == [reached, 0.0]
    assert told["row"]["verdict"] == "verified"


@pytest.mark.parametrize("replays", [0, 1, 40])
def test_the_budget_says_how_many_inputs_are_run(
    data: DataLayout, monkeypatch: pytest.MonkeyPatch, replays: int
) -> None:
    asked = list[Array]()
    monkeypatch.setattr(OwnFile, "flat", giving(lambda x: np.zeros(2), asked))
    ranked, report = context(data)
    job.run(specification(data, query(), budget={"replays": replays}), ranked)
    assert report.bounds[0]["verdict"] == "verified"
    assert len(asked) == replays
    assert all(x.dtype == np.float32 and bool((np.abs(x) <= 1).all()) for x in asked)


def test_inputs_that_a_search_visited_nearest_to_a_counterexample_are_run(
    data: DataLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, visited, add = list[Array](), list[tuple[float, list[float]]](), VisitedInputs.add

    def noted(self: VisitedInputs, searched: Specification, x: Tensor, distances: Tensor) -> None:
        visited.extend(zip(distances.tolist(), searched.nearest(x.double()).tolist(), strict=True))
        add(self, searched, x, distances)

    monkeypatch.setattr(VisitedInputs, "add", noted)
    monkeypatch.setattr(OwnFile, "flat", giving(lambda x: np.array([-BEYOND, 0.0]), asked))
    ranked, report = context(data)
    job.run(specification(data, query(reach()[1] + 0.1), method="beta-crown", budget={"replays": 40}), ranked)
    assert report.bounds[0]["verdict"] == "verified"
    assert report.bounds[0]["decided_by"] in {"input splitting", "activation splitting"}
    assert len(asked) == 40
    nearest = [np.float32(x).tolist() for _, x in sorted(visited, key=lambda pair: pair[0])[:20]]
    assert [x.tolist() for x in asked[:20]] == nearest


def test_inputs_that_a_search_visited_are_kept_of_no_instance_that_is_over(
    data: DataLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = list[dict[int, Tensor]]()
    monkeypatch.setattr(job, "add_outputs", lambda row, task, _: kept.append(task.visited) or row)
    ranked, report = context(data)
    job.run(specification(data, query(reach()[1] + 0.1), method="beta-crown", budget={"replays": 0}), ranked)
    assert report.bounds[0]["decided_by"] in {"input splitting", "activation splitting"}
    assert kept[-1] == {}


def test_inputs_are_numbers_of_the_file_within_the_exact_box(data: DataLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, ends = list[Array](), [(0.1, 0.1000000002), (1e-50, 2.0), (0.3, 0.7)]
    monkeypatch.setattr(OwnFile, "flat", giving(lambda x: np.zeros(2), asked))
    box = "".join(f"(assert (>= X_{at} {low:.60f}))(assert (<= X_{at} {high}))" for at, (low, high) in enumerate(ends))
    for first, is_run in ((box, False), (box.replace("0.1000000002", "0.10000001"), True)):
        asked.clear()
        job.run(specification(data, f"{DECLARED}{first}(assert (>= Y_0 {BEYOND}))"), context(data)[0])
        assert bool(asked) == is_run  # no float32 number is between the first ends
    assert all(1e-50 <= x[1] <= 2 and 0.3 <= float(x[2]) <= 0.7 for x in asked)


def test_an_output_that_is_no_number_leaves_the_row_undecided(
    data: DataLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OwnFile, "flat", giving(lambda x: np.full(2, np.nan), []))
    ranked, report = context(data)
    job.run(specification(data, query()), ranked)
    assert report.bounds[0]["verdict"] == "unknown"
    assert report.bounds[0]["reason"].startswith("onnxruntime gives no number (NaN) at an input of the box, (")


NEAR = [node("Sub", ["x", "at"], "moved"), node("Abs", ["moved"], "away")]
LOGARITHM = [*NEAR, node("Sub", ["away", "little"], "d"), node("Log", ["d"], "l")]
SPIKE = [*NEAR, node("Mul", ["away", "steep"], "m"), node("Sub", ["most", "m"], "s"), node("Relu", ["s"], "r")]
HIDDEN: dict[str, tuple[list[onnx.NodeProto], str]] = {
    "a logarithm": ([*LOGARITHM, node("Clip", ["l", "zero", "one"])], "'log_l' (aten.log.default)"),
    "an overflow": (
        [*SPIKE, node("Exp", ["r"], "e"), node("Sub", ["e", "e"], "d"), node("Sigmoid", ["d"])],
        "'exp_e' (aten.exp.default)",
    ),
}
CONSTANTS = {"at": 1.9, "little": 1e-4, "steep": 1e6, "most": 200, "zero": 0, "one": 1}


@pytest.mark.parametrize("name", HIDDEN)
def test_where_a_model_has_no_value_nothing_is_verified(data: DataLayout, name: str) -> None:
    """Although what reads such a value is bounded, and no input that is run shows it."""
    nodes, told = HIDDEN[name]
    constants = {constant: np.float32(number) for constant, number in CONSTANTS.items()}
    file = {"onnx": upload(data, model(nodes, [1, 1], constants))}
    for lower, upper, verdict in ((0, 5, "unknown"), (3, 5, "verified")):
        asked = f"(declare-const X_0 Real)(declare-const Y_0 Real)(assert (>= X_0 {lower}))(assert (<= X_0 {upper}))"
        ranked, report = context(data)
        spec = specification(data, f"{asked}(assert (>= Y_0 11))", model=file, budget={"replays": 0})
        job.run(spec, ranked)
        assert report.bounds[0]["verdict"] == verdict
        if verdict == "unknown":
            assert report.bounds[0]["reason"].startswith(f"{told} may have no value in the box, or overflow")


def test_what_is_not_found_out_in_its_time_is_said_to_be_so(data: DataLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outside, "MOST_SECONDS", 0.0)
    constants = {constant: np.float32(number) for constant, number in CONSTANTS.items()}
    file = {"onnx": upload(data, model(HIDDEN["a logarithm"][0], [1, 1], constants))}
    ranked, report = context(data)
    asked = "(declare-const X_0 Real)(declare-const Y_0 Real)(assert (>= X_0 0))(assert (<= X_0 5))(assert (>= Y_0 11))"
    job.run(specification(data, asked, model=file), ranked)
    assert "for all that its time allowed to find out" in report.bounds[0]["reason"]


def test_a_causal_mask_is_no_overflow() -> None:
    """The least number of float64 stands for the upper end of −∞."""
    config = TransformerConfig(vocab_size=8, dim=16, layers=1, heads=2, kv_heads=2, ffn_dim=16, max_sequence=4)
    transformer = build(config, None, dtype=torch.float64)
    assert isinstance(transformer, Transformer)
    network = prepare(AfterEmbedding(transformer, 4).eval().requires_grad_(False), (4, 16))
    box = Interval.point(torch.randn(1, 4, 16, dtype=torch.float64))
    assert not undefined_nodes(network.graph, box, METHODS["ibp"](network, box, BoundOptions()).inputs)


class LogarithmOfRest(nn.Module):
    """Of 0 where the input is the number as float32 rounds it: torch rounds the number beside it, too."""

    def __init__(self, number: float | Tensor) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.number).log()


@pytest.mark.parametrize("width", [1, 1e-6])
@pytest.mark.parametrize("number", [0.3, torch.tensor(0.3, dtype=torch.float64), 2**24 + 3])
def test_numbers_of_a_program_are_rounded_to_its_type(number: float | Tensor, width: float) -> None:
    least = torch.tensor([[float(number)]])
    module = LogarithmOfRest(number)
    assert module(least).item() == -torch.inf
    network, box = prepare(module, (1,)), Interval(least.double(), least.double() + width)
    assert undefined_nodes(network.graph, box, METHODS["ibp"](network, box, BoundOptions()).inputs)


class LogarithmOfShare(nn.Module):
    """Of 0 far below 0, where the share is too small for float32."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sigmoid().log()


class LogarithmOfEdge(nn.Module):
    """Of 0 beside the input, whose number is too small for float32."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.pad(x, (0, 1), value=1e-46).log()


@pytest.mark.parametrize(
    ("module", "least", "is_defined"),
    [(LogarithmOfShare(), -120.0, False), (LogarithmOfShare(), -80.0, True), (LogarithmOfEdge(), 1.0, False)],
)
def test_what_float32_cannot_hold_may_be_0(module: nn.Module, least: float, is_defined: bool) -> None:
    ends = torch.tensor([[least]], dtype=torch.float64)
    network, box = prepare(module, (1,)), Interval(ends, ends + 1)
    assert bool(module(ends.float()).isfinite().all()) is is_defined
    found = undefined_nodes(network.graph, box, METHODS["ibp"](network, box, BoundOptions()).inputs)
    assert bool(found) is not is_defined


@pytest.mark.parametrize(("lower", "is_noted"), [(-1.0, True), (1.0, False)])
def test_bounds_that_may_not_hold_where_a_value_is_no_number_say_so(
    data: DataLayout, lower: float, is_noted: bool
) -> None:
    """A cast of what is no number is one, and outside of the bounds."""
    nodes = [node("Log", ["x"], "l"), node("Clip", ["l", "one", "one"], "c"), node("Cast", ["c"], "i", to=6)]
    content = model([*nodes, node("Cast", ["i"], to=1)], [1, 1], {"one": np.float32(1)})
    assert Runtime.of(parse(content)).flat(np.float32([-1.0])).tolist() == [-(2.0**31)]
    ranked, report = context(data)
    asked = {"kind": "verify", "device": "cpu", "model": {"onnx": upload(data, content)}, "method": "ibp"}
    asked["property"] = {"box": {"lower": [lower], "upper": [2.0]}}
    job.run(VerifySpec.model_validate(asked), ranked)
    row = report.bounds[0]
    assert -1 <= row["lower"][0] <= row["upper"][0] <= 2
    note = "bounds hold where every value is a number: 'log_l' (aten.log.default) may have none in the box, or overflow"
    assert row["note"] == (note if is_noted else None)


def test_what_is_open_about_a_value_is_told(data: DataLayout) -> None:
    nodes = [node("Log", ["x"], "l"), node("IsNaN", ["l"], "t"), node("Where", ["t", "ten", "x"])]
    file = {"onnx": upload(data, model(nodes, [1, 1], {"ten": np.float32(10)}))}
    asked = "(declare-const X_0 Real)(declare-const Y_0 Real)(assert (>= X_0 0))(assert (<= X_0 1))"
    ranked, report = context(data)
    job.run(specification(data, f"{asked}(assert (>= Y_0 5))", model=file, budget={"seconds": 1}), ranked)
    assert report.bounds[0]["verdict"] in {"unknown", "timeout"}
    assert report.bounds[0]["reason"].endswith("; whether 'isnan_t' is asked about a number cannot be told in the box")


def test_a_mesh_says_that_it_leaves_such_questions_open() -> None:
    nodes = [node("IsNaN", ["x"], "t"), node("Where", ["t", "ten", "x"])]
    network = prepare(load(model(nodes, [1, 1], {"ten": np.float32(10)})), (1,))
    engine = SimpleNamespace(is_alone=False, anywhere=bool, network=network)
    assert "parallel.tp and parallel.pp of 1 may decide this" in open_tests(
        cast(Task, SimpleNamespace(engine=engine)), 0
    )


def test_the_own_file_takes_whole_numbers_where_its_input_is_one() -> None:
    nodes = [node("Cast", ["x"], "f", to=1), node("Add", ["f", "half"])]
    content = model(nodes, [1, 3], {"half": np.float32(0.5)}, kind=onnx.TensorProto.INT64)
    typed = onnx.load_from_string(content)
    typed.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    content, given = typed.SerializeToString(), np.array([0.4, 1.5, -2.0], np.float32)
    own = OwnFile(lambda: content, ["y"]).flat(given)
    assert own.tolist() == Runtime.of(parse(content)).flat(given).tolist() == [0.5, 2.5, -1.5]
