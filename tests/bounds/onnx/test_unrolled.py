"""Loops with a constant number of rounds, and sequences, in ONNX models."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper, parser
from onnx_models import weights

from service.bounds.graph import UnsupportedModelError
from service.bounds.onnx import load
from service.bounds.onnx.reading import Runtime, parse
from service.bounds.onnx.stored import store, stored
from service.formats.onnx import outline_of

BODY = """<body = b (int64 i, bool more, float[1,3] s) => (bool again, float[1,3] t, float[1,3] row)
  {again = Identity(more) m = MatMul(s, w) t = Tanh(m) f = Cast<to=1>(i) row = Add(t, f)}>"""
NO_ROUND = BODY.replace("again = Identity(more)", "again = Constant<value = bool {0}>()")
BY_NUMBER = BODY.replace("again = Identity(more)", "k = Constant<value_int = 0>() again = Cast<to = 9>(k)")
SCAN = """<num_scan_inputs = 1, scan_input_axes = [1], scan_input_directions = [1], scan_output_axes = [-1],
  scan_output_directions = [1], body = b (float[1,3] s, float[1,3] e) => (float[1,3] t, float[1,3] row)
  {m = MatMul(e, w) p = Add(s, m) t = Tanh(p) row = Relu(p)}>"""
NESTED = """<body = b (int64 i, bool more, float[1,3] s) => (bool again, float[1,3] t)
  {again = Cast<to=9>(more) n = Constant<value = int64 {2}>()
   t = Loop(n, more, s) <body = c (int64 j, bool on, float[1,3] u) => (bool next, float[1,3] v)
     {next = Identity(on) m = MatMul(u, w) v = Relu(m)}>}>"""
LIST = """<body = b (int64 i, bool more, seq(float[1,3]) s) => (bool again, seq(float[1,3]) t)
  {again = Identity(more) o = Gather<axis = 1>(x, i) l = MatMul(o, w) t = SequenceInsert(s, l)}>"""
BY_SHAPE = "s = Shape(x) n = Gather(s, one)"


def made(nodes: str, opset: int = 17, **constants: Any) -> bytes:
    """``y`` of ``x``, of five rows of three numbers."""
    text = f'<ir_version: 8, opset_import: ["" : {opset}]> g (float[1,5,3] x) => (float[a,b,c] y) {{{nodes}}}'
    model = parser.parse_model(text)
    given = {"w": weights(3, 3), "one": np.array(1), "two": np.array(2), "zero": np.array(0), "yes": np.array(True)}
    used = {name for graph in (text,) for name in given if name in graph}
    for name, value in ({each: given[each] for each in used} | constants).items():
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
    content: bytes = model.SerializeToString()
    return content


START = "h = Gather<axis = 1>(x, zero)"
MODELS = {
    "a loop": made(f"{START} y, r = Loop(two, yes, h) {BODY}"),
    "the rows of a loop": made(f"{START} u, y = Loop(two, , h) {BODY}"),
    "as many rounds as the shape says": made(f"{START} {BY_SHAPE} y, r = Loop(n, , h) {BODY}"),
    "a loop that ends after a round": made(f"{START} {BY_SHAPE} y, r = Loop(n, yes, h) {NO_ROUND}"),
    "a loop that a number ends": made(f"{START} {BY_SHAPE} y, r = Loop(n, yes, h) {BY_NUMBER}"),
    "no round": made(f"{START} y, r = Loop(zero, yes, h) {BODY}"),
    "a loop in a loop": made(f"{START} y = Loop(two, yes, h) {NESTED}"),
    "a scan": made(f"{START} u, y = Scan(h, x) {SCAN}"),
    "the state of a scan": made(f"{START} y, r = Scan(h, x) {SCAN}", 11),
    "a list": made(f"e = SequenceEmpty() {BY_SHAPE} q = Loop(n, yes, e) {LIST} "
                   "y = ConcatFromSequence<axis = 1, new_axis = 1>(q)"),
    "parts": made("q = SplitToSequence<axis = 1>(x, two) a = SequenceAt(q, zero) b = SequenceAt(q, one) y = Mul(a, b)"),
    "rows without their dimension": made(
        "q = SplitToSequence<axis = 1, keepdims = 0>(x) p = SequenceErase(q, zero) l = SequenceLength(p)"
        "k = Sub(l, one)"
        "a = SequenceAt(p, k) b = SequenceAt(p, zero) s = SequenceConstruct(b, a) t = SequenceInsert(s, a, zero)"
        "y = ConcatFromSequence<axis = 0>(t)", 12),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_what_is_written_out_computes_what_onnxruntime_computes(name: str) -> None:
    assert outline_of(MODELS[name]).unsupported == ()
    x = torch.randn(2, 15, generator=torch.Generator().manual_seed(3))
    runtime = Runtime.of(parse(MODELS[name]))
    expected = np.stack([runtime.flat(each) for each in x.numpy()])
    np.testing.assert_allclose(load(MODELS[name])(x).numpy(), expected, rtol=1e-5, atol=1e-6)


def test_a_loop_is_stored_written_out(tmp_path: Any) -> None:
    x = torch.randn(2, 15, generator=torch.Generator().manual_seed(3))
    for name in ("a loop", "a list"):
        store(tmp_path / name, MODELS[name], torch.float32)
        assert torch.equal(stored(tmp_path / name, torch.float32)(x), load(MODELS[name])(x))


COUNT = "m = ReduceMax<keepdims = 0>(x) c = Cast<to = 7>(m) k = Max(c, one)"
WHILE = BODY.replace("again = Identity(more)", "z = ReduceMax<keepdims = 0>(s) again = Cast<to = 9>(z)")
POSITIVE = "g = Greater(x, f) i = NonZero(g)"


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (made(f"{START} {COUNT} y, r = Loop(k, yes, h) {BODY}"), "Loop"),
        (made(f"{START} y, r = Loop(two, yes, h) {WHILE}"), "Loop"),
        (made(f"{POSITIVE} t = Transpose(i) d = Cast<to = 1>(t) {START} y, r = Scan(h, d) "
              f"{SCAN.replace('[1], scan_input_d', '[0], scan_input_d')}", f=np.float32(0)), "Scan"),
        (made(f"{POSITIVE} q = SplitToSequence<axis = 1>(i) l = SequenceLength(q) d = Cast<to = 1>(l) y = Mul(x, d)",
              f=np.float32(0)), "SplitToSequence"),
        (made(f"{COUNT} q = SplitToSequence<axis = 1>(x) y = SequenceAt(q, k)"), "SequenceAt"),
        (made("m = ReduceMax<keepdims = 0>(x) c = Greater(m, f) e = If (c) <then_branch = p () => (float[n] t) "
              "{t = Constant<value = float[1] {1.0}>()}, else_branch = q () => (float[n] u) "
              "{u = Constant<value = float[2] {1.0, 2.0}>()}> s = Size(e) d = Cast<to = 1>(s) y = Mul(x, d)",
              f=np.float32(9)), "If"),
    ],
)  # fmt: skip
def test_what_inputs_decide_is_refused_by_name(data: bytes, named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        load(data)


def test_rounds_without_measure_are_refused() -> None:
    data = made(f"{START} y, r = Loop(many, yes, h) {BODY}", many=np.array(2**62))
    with pytest.raises(UnsupportedModelError, match=r"Loop .*its rounds come to \d+ nodes, 16384 at most"):
        load(data)
    nothing = made(f"{START} u, y = Loop(zero, yes, h) {BODY}")
    with pytest.raises(UnsupportedModelError):
        load(nothing)


def test_shapes_within_a_loop_are_seen() -> None:
    """The shape of what a loop carries follows from shapes, unless a node of its body makes it depend on values."""
    after = f"{START} v, r = Loop(two, yes, h) {BODY} s = Size(v) d = Cast<to = 1>(s) y = Mul(x, d)"
    assert outline_of(made(after)).unsupported == ()
    inside = "m = Greater(s, zeros) c = Reshape(m, flat) t = Compress<axis = 1>(s, c) row = Identity(t)}>"
    body = BODY[: BODY.index("m = MatMul")] + inside
    refused = made(after.replace(BODY, body), zeros=np.float32(0), flat=np.array([-1]))
    with pytest.raises(UnsupportedModelError, match=r"Size|Loop|Compress"):
        load(refused)


def test_the_model_of_a_loop_is_its_body_as_often(tmp_path: Any) -> None:
    content = MODELS["a loop"]
    kinds = [node.op_type for node in onnx.load_from_string(content).graph.node]
    assert kinds.count("Loop") == 1
    assert [call.operator for call in load(content)._description.calls].count("Tanh") == 2
