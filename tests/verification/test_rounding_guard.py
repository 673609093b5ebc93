"""Verdicts that only rounding explains: no verified is said of them."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from lanes import first_fast
from onnx import TensorProto, helper
from onnx_jobs import specification, upload
from onnx_models import model, node
from verify_jobs import context

from service.jobs.files import DataLayout
from service.verification import job, rounding_guard
from service.verification.rounding_guard import REASON


def hidden() -> bytes:
    """``relu(x + 1e9) − 1e9``, x over the reals, and a multiple of 64 in float32."""
    nodes = [node("Add", ["x", "c"], "h"), node("Relu", ["h"], "r"), node("Sub", ["r", "c"])]
    return model(nodes, [1, 1], {"c": np.float32(1e9)})


def of_small_exponentials() -> bytes:
    return model([node("ReduceLogSumExp", ["x"], axes=[1])], [1, 3], opset=13)


def plain() -> bytes:
    return model([node("Relu", ["x"], "r"), node("Mul", ["r", "c"])], [1, 1], {"c": np.float32(3)})


@pytest.mark.parametrize(
    ("network", "ends", "most", "verdict"),
    first_fast(
        2,
        [
            (hidden(), ([0.0], [1.0]), 0.5, "unknown"),
            (of_small_exponentials(), ([-103.05] * 3, [-102.95] * 3), -101.88, "unknown"),
            (of_small_exponentials(), ([-103.05] * 3, [-102.95] * 3), -101.8, "verified"),
            (plain(), ([-1.0], [1.0]), 3.01, "verified"),
        ],
    ),
)
def test_what_only_rounding_proves_is_unknown(
    data: DataLayout, network: bytes, ends: tuple[list[float], list[float]], most: float, verdict: str
) -> None:
    """A second look in float64 keeps what holds there."""
    box = {"lower": ends[0], "upper": ends[1], "output": [{"coefficients": [-1], "threshold": -most}]}
    ranked, report = context(data)
    job.run(specification(data, "", model={"onnx": upload(data, network)}, property={"box": box}, method="ibp"), ranked)
    (row,) = report.bounds
    assert row["verdict"] == verdict
    assert verdict == "verified" or row["reason"] in {REASON, "the bounds do not decide it"}


def smooth() -> bytes:
    return model([node("Sigmoid", ["x"], "r"), node("Mul", ["r", "c"])], [1, 1], {"c": np.float32(3)})


def waves() -> tuple[bytes, float]:
    """``3 + s·Σ w sin(v x + b)``, s small, and its least value over [-1, 1]."""
    draws = np.random.default_rng(4)
    numbers = {"v": 3 * draws.normal(size=(1, 5)), "b": 3 * draws.normal(size=5), "w": draws.normal(size=(5, 1))}
    held = {name: value.astype(np.float32) for name, value in numbers.items()} | {"s": np.float32(1.5e-5)}
    nodes = [node("MatMul", ["x", "v"], "h"), node("Add", ["h", "b"], "z"), node("Sin", ["z"], "t")]
    nodes += [node("MatMul", ["t", "w"], "u"), node("Mul", ["u", "s"], "e"), node("Add", ["e", "c"])]
    v, b, w, s = (held[name].astype(np.float64) for name in "vbws")
    least = 3 + s * float((np.sin(np.linspace(-1, 1, 10001)[:, None] @ v + b) @ w).min())
    return model(nodes, [1, 1], held | {"c": np.float32(3)}), least


def decided(data: DataLayout, network: bytes, box: dict[str, Any], **given: Any) -> dict[str, Any]:
    given = {"model": {"onnx": upload(data, network)}, "property": {"box": box}, "method": "beta-crown"} | given
    ranked, report = context(data)
    job.run(specification(data, "", budget={"seconds": 5.0}, **given), ranked)
    (row,) = report.bounds
    return row


def at_most(ends: tuple[list[float], list[float]], most: float) -> dict[str, Any]:
    return {"lower": ends[0], "upper": ends[1], "output": [{"coefficients": [-1], "threshold": -most}]}


def test_what_only_float64_proves_is_bounded_or_searched_in_it(data: DataLayout) -> None:
    """Bounds in float32 give away more for rounding than these properties leave."""
    row = decided(data, smooth(), at_most(([-1.0], [1.0]), 3 / (1 + math.exp(-1)) + 2e-5))
    assert (row["verdict"], row["decided_by"]) == ("verified", "bounds")
    network, least = waves()
    box = {"lower": [-1.0], "upper": [1.0], "output": [{"coefficients": [1], "threshold": least - 5e-6}]}
    row = decided(data, network, box)
    assert (row["verdict"], row["decided_by"]) == ("verified", "input splitting")


def test_a_lack_of_memory_for_float64_leaves_a_row_open(data: DataLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(rounding_guard, "certify", fail)
    row = decided(data, smooth(), at_most(([-1.0], [1.0]), 3 / (1 + math.exp(-1)) + 2e-5))
    assert row["verdict"] == "unknown"


def test_what_float64_left_open_stays_open(data: DataLayout) -> None:
    """A bound in float64 lies above the exact one: by less than its margin, of which a comparison with float64 knows
    nothing.
    """
    draws = np.random.default_rng(0)
    weight, centre = draws.standard_normal((2, 2, 70))[1]
    lower, upper = (centre - 0.1).tolist(), (centre + 0.1).tolist()
    x, y = (helper.make_tensor_value_info(name, TensorProto.DOUBLE, [1, n]) for name, n in (("x", 70), ("y", 1)))
    held = helper.make_tensor("c", TensorProto.DOUBLE, [70, 1], weight.tolist())
    graph = helper.make_graph([node("MatMul", ["x", "c"])], "g", [x], [y], [held])
    network = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
    box = {"lower": lower, "upper": upper}
    row = decided(data, network, box | {"output": [{"coefficients": [1], "threshold": -100.0}]})
    threshold = math.nextafter(row["lower"][0], -math.inf)
    exact = sum(Fraction(w) * Fraction(a if w > 0 else b) for w, a, b in zip(weight, lower, upper, strict=True))
    assert Fraction(threshold) > exact
    row = decided(data, network, box | {"output": [{"coefficients": [1], "threshold": threshold}]})
    assert row["verdict"] == "unknown"


def test_rigorous_bounds_leave_open_what_they_do_not_prove(data: DataLayout) -> None:
    first = np.zeros((70, 1), np.float32)
    first[0] = 1
    box = {"lower": [0.0] * 70, "upper": [1e-3] * 70, "output": [{"coefficients": [1], "threshold": -5e-13}]}
    row = decided(data, model([node("MatMul", ["x", "c"])], [1, 70], {"c": first}), box, rigorous=True)
    assert row["verdict"] in {"verified", "unknown"}
