"""Verdicts of small ONNX models of less usual operators, about what sampling reaches and what is beyond."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import pytest
from lanes import slow_but_for
from onnx import numpy_helper, parser
from onnx_jobs import specification, upload
from verify_jobs import context

from service.bounds.onnx.reading import Runtime, parse
from service.jobs.files import DataLayout
from service.verification import job

DRAW = np.random.default_rng(7)
CONSTANTS: dict[str, Any] = {
    "w": np.float32(DRAW.normal(size=(3, 3)) / 2),
    "v": np.float32(DRAW.normal(size=(3, 3)) / 2),
    "zero": np.array(0), "one": np.array(1), "two": np.array(2), "twos": np.array([2]), "yes": np.array(True),
    "f": np.float32(0), "places": np.array([0, 1, 2]), "pair": np.float32([-0.5, 1.5]),
    "s": np.float32(0.05), "z": np.uint8(128), "wu": np.uint8(DRAW.integers(100, 156, size=(3, 3))),
    "ws": np.float32(0.02), "ys": np.float32(0.03), "yz": np.uint8(120),
}  # fmt: skip
H = "h = MatMul(x, w)"
ROUND = """<body = b (int64 i, bool more, float[1,3] s) => (bool again, float[1,3] t)
  {again = Identity(on) m = MatMul(s, w) t = Tanh(m)}>"""
SCAN = """<num_scan_inputs = 1, scan_input_axes = [1], body = b (float[1,3] s, float[1,3] e) => (float[1,3] t)
  {m = MatMul(e, w) p = Add(s, m) t = Relu(p)}>"""
BRANCHES = """<then_branch = p () => (float[1,3] t) {t = Relu(h)}, else_branch = q () => (float[1,3] u)
  {u = Neg(h)}>"""


@dataclass(frozen=True)
class Kind:
    nodes: str
    shape: tuple[int, ...] = (1, 3)

    def content(self) -> bytes:
        lengths = ",".join(map(str, self.shape))
        head = f'<ir_version: 8, opset_import: ["" : 17]> g (float[{lengths}] x) => (float[a,b] y)'
        model = parser.parse_model(f"{head} {{{self.nodes}}}")
        model.graph.initializer.extend(numpy_helper.from_array(each, name) for name, each in CONSTANTS.items())
        content: bytes = model.SerializeToString()
        return content


KINDS = {
    "a loop with a condition around it": Kind(f"{H} on = Identity(yes) y = Loop(two, yes, h) {ROUND}"),
    "a quantised product, often between two numbers": Kind(
        "q = QuantizeLinear(x, s, z) p = QLinearMatMul(q, s, z, wu, ws, z, ys, yz) y = DequantizeLinear(p, ys, yz)"
    ),
    "one number of all": Kind("m = ReduceMax<keepdims = 0>(x) r = Relu(m) t = Tanh(r) y = Mul(x, t)"),
    "whole numbers compared": Kind(
        f"{H} a = ArgMax<axis = 1, keepdims = 1>(h) e = Equal(a, places) o = Cast<to = 1>(e) y = MatMul(o, v)"
    ),
    "a scan": Kind(f"a = Gather<axis = 1>(x, zero) y = Scan(a, x) {SCAN}", (1, 2, 3)),
    "a list": Kind("q = SplitToSequence<axis = 1>(x, one) a = SequenceAt(q, zero) b = SequenceAt(q, two) "
                   "m = Mul(a, b) l = SequenceInsert(q, m, zero) y = ConcatFromSequence<axis = 1>(l)"),
    "a branch": Kind(f"{H} n = Shape(x) g = Gather(n, one) c = Equal(g, two) y = If (c) {BRANCHES}"),
    "the largest": Kind(f"{H} y, i = TopK(h, twos)"),
    "one of several": Kind(f"{H} a = ArgMax<axis = 1, keepdims = 0>(h) y = OneHot(a, two, pair)"),
    "a sum of products": Kind('y = Einsum<equation = "bi,ij,bj->bi">(x, w, x)'),
    "a choice": Kind(f"{H} c = Greater(h, f) n = Neg(h) y = Where(c, x, n)"),
}  # fmt: skip


def first(runtime: Runtime, point: Any) -> float:
    """Return what the model gives first."""
    return float(runtime.flat(np.asarray(point, np.float32))[0])


def reach(runtime: Runtime, features: int) -> tuple[float, float]:
    """Of the first output at many points, of which half are corners, and near the best of them."""
    draw = np.random.default_rng(3)
    points = draw.uniform(-1, 1, (800, features))
    points[::2] = np.sign(points[::2])
    values = [first(runtime, each) for each in points]
    best = points[int(np.argmax(values))]
    near = [np.clip(best + scale * draw.normal(size=features), -1, 1) for scale in (0.1, 0.03, 0.01) for _ in range(40)]
    return min(values), max(*values, *(first(runtime, each) for each in near))


@pytest.mark.parametrize(
    "name", slow_but_for(KINDS, "a loop with a condition around it", "whole numbers compared", "one number of all")
)
def test_what_is_reached_is_falsified_and_what_is_beyond_is_verified(data: DataLayout, name: str) -> None:
    content, features = KINDS[name].content(), prod(KINDS[name].shape)
    runtime = Runtime.of(parse(content))
    least, most = reach(runtime, features)
    outputs = len(runtime.flat(np.zeros(features, np.float32)))
    for share, verdict in ((-0.02, "falsified"), (0.25, "verified")):
        threshold = most + share * (most - least)
        query = "".join(f"(declare-const X_{i} Real)" for i in range(features))
        query += "".join(f"(declare-const Y_{i} Real)" for i in range(outputs))
        query += "".join(f"(assert (<= X_{i} 1.0))(assert (>= X_{i} -1.0))" for i in range(features))
        query += f"(assert (>= Y_0 {threshold:.9f}))"
        ranked, report = context(data)
        job.run(specification(data, query, model={"onnx": upload(data, content)}, method="beta-crown"), ranked)
        (row,) = report.bounds
        assert row["verdict"] == verdict
        if verdict == "falsified":
            assert first(runtime, row["counterexample"]) >= threshold - 1e-5
        else:
            assert row["upper"] is None or row["upper"][0] >= most - 1e-5
