"""Questions whether values are numbers: a case distinction, unless their bounds in the file's own arithmetic answer."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto
from onnx_models import model, node

from service.bounds.finite import undefined_nodes
from service.bounds.graph import UnsupportedModelError
from service.bounds.interval import Interval
from service.bounds.methods import METHODS, BoundOptions
from service.bounds.network import prepare
from service.bounds.onnx import load
from service.bounds.onnx.reading import Runtime, parse

INSTEAD = 9.0
C = {
    "c": np.array([[1.0, -2.0, 0.5]], np.float32),
    "two": np.float32(2),
    "eps": np.float32(1e-3),
    "big": np.float32(INSTEAD),
    "one": np.float32(1),
    "huge": np.float32(3e19),
    "ones": np.ones(3, np.float32),
    "zeros": np.zeros(3, np.float32),
    "mask": np.array([[0, -np.inf, 0]], np.float32),
    "least": np.array([[0, np.finfo(np.float32).min, 0]], np.float32),
}
DEVIATION = [
    node("ReduceMean", ["x"], "mean", axes=[1]),
    node("Sub", ["x", "mean"], "centred"),
    node("Pow", ["centred", "two"], "square"),
    node("ReduceMean", ["square"], "variance", axes=[1]),
    node("Add", ["variance", "eps"], "above"),
]
LEFT_OUT = [node("Clip", ["x", "", "one"], "clipped"), node("Log", ["clipped"], "v")]
CUT = [node("Exp", ["x"], "e"), node("Cast", ["e"], "i", to=TensorProto.INT64),
       node("Cast", ["i"], "f", to=TensorProto.FLOAT), node("Log", ["f"], "v")]  # fmt: skip
FILLED = [
    node("Shape", ["x"], "shape"),
    node("ConstantOfShape", ["shape"], "infinite", value=onnx.helper.make_tensor("value", 1, [1], [-np.inf])),
]
FINITE: dict[str, list[onnx.NodeProto]] = {
    "a product": [node("Mul", ["x", "c"], "v")],
    "a normalised value": [*DEVIATION, node("Sqrt", ["above"], "root"), node("Div", ["centred", "root"], "v")],
    "a logarithm of what is above 0": [*DEVIATION, node("Log", ["above"], "v")],
    "a quotient by constants": [node("Div", ["x", "c"], "v")],
    "the input": [node("Identity", ["x"], "v")],
    "an exponential": [node("Exp", ["x"], "v")],
    "a layer norm": [node("LayerNormalization", ["x", "ones", "zeros"], "v", epsilon=1e-5)],
    "a softmax": [node("Softmax", ["x"], "v")],
    "a masked softmax": [node("Add", ["x", "mask"], "m"), node("Softmax", ["m"], "v")],
    "a softmax masked by the least number": [node("Add", ["x", "least"], "m"), node("Softmax", ["m"], "v")],
    "a logarithm of a sum of powers": [node("ReduceLogSumExp", ["x"], "v", axes=[1])],
}
OPEN: dict[str, list[onnx.NodeProto]] = {
    "a root": [node("Sqrt", ["x"], "v")],
    "a logarithm": [node("Relu", ["x"], "r"), node("Log", ["r"], "v")],
    "a logarithm behind an input that is left out": LEFT_OUT,
    "a logarithm of whole numbers": CUT,
    "a quotient": [node("Div", ["c", "x"], "v")],
    "a reciprocal of squares": [node("Mul", ["x", "x"], "s"), node("Reciprocal", ["s"], "v")],
    "a square that overflows": [node("Mul", ["x", "huge"], "h"), node("Mul", ["h", "h"], "v")],
    "a sum that overflows": [node("Mul", ["x", "huge"], "h"), node("ReduceSumSquare", ["h"], "v", axes=[1])],
    "a layer norm without a summand": [node("LayerNormalization", ["x", "ones", "zeros"], "v", epsilon=0.0)],
    "what hides an infinite value": [node("Log", ["x"], "l"), node("Sigmoid", ["l"], "v")],
    "a root behind a sigmoid that onnxruntime rounds above 1": [
        node("Mul", ["x", "huge"], "h"),
        node("Sigmoid", ["h"], "s"),
        node("Sub", ["one", "s"], "d"),
        node("Sqrt", ["d"], "v"),
    ],
    "powers that overflow": [node("Mul", ["x", "huge"], "h"), node("Exp", ["h"], "v")],
    "quotients of powers that overflow": [
        node("Mul", ["x", "huge"], "h"),
        node("Exp", ["h"], "e"),
        node("ReduceSum", ["e"], "total"),
        node("Div", ["e", "total"], "v"),
    ],
}


ASKING = ("IsNaN", "IsInf")


def guarded(before: list[onnx.NodeProto], asking: str) -> bytes:
    return model([*before, node(asking, ["v"], "asked"), node("Where", ["asked", "big", "x"])], [1, 3], C)


def beside_each_other(cases: dict[str, list[onnx.NodeProto]]) -> bytes:
    """One model, since reading one takes far longer than bounding it: outputs for each case, by either question."""
    nodes = list[onnx.NodeProto]()
    for index, before in enumerate(cases.values()):
        own = {name: f"{name}_{index}" for each in before for name in each.output}
        for each in before:
            copied = onnx.NodeProto.FromString(each.SerializeToString())
            copied.name, copied.input[:] = f"{each.name}_{index}", [own.get(name, name) for name in each.input]
            copied.output[:] = [own[name] for name in each.output]
            nodes.append(copied)
        for asking in ASKING:
            nodes.append(node(asking, [own.get("v", "v")], f"{asking}_{index}"))
            nodes.append(node("Where", [f"{asking}_{index}", "big", "x"], f"y_{asking}_{index}"))
    outputs = [f"y_{asking}_{index}" for index in range(len(cases)) for asking in ASKING]
    return model(nodes, [1, 3], C, outputs)


def ends(cases: dict[str, list[onnx.NodeProto]]) -> dict[str, torch.Tensor]:
    """Bounds ``(questions, 2, 3)`` of the outputs for each case, where every input is between −1 and 1."""
    loaded = load(beside_each_other(cases))
    network, box = prepare(loaded, (3,)), Interval(-torch.ones(1, 3), torch.ones(1, 3))
    rows = torch.cat([torch.eye(loaded.outputs), -torch.eye(loaded.outputs)])[None]
    found = dict[str, torch.Tensor]()
    for method in ("ibp", "crown"):
        lower, negated = METHODS[method](network, box, BoundOptions()).lower_bounds(rows)[0].chunk(2)
        each = torch.stack([lower, -negated]).reshape(2, len(cases), len(ASKING), 3).permute(1, 2, 0, 3)
        found |= {f"{name}, {method}": one for name, one in zip(cases, each, strict=True)}
    return found


def test_what_is_a_number_in_the_whole_box_is_not_asked_about() -> None:
    assert [name for name, each in ends(FINITE).items() if not bool((each[:, 1] <= 1).all())] == []


def test_what_may_be_something_else_has_both_answers() -> None:
    found = ends(OPEN)
    assert [name for name, each in found.items() if not bool((each[:, 1] >= INSTEAD).all())] == []
    assert [name for name, each in found.items() if not bool((each[:, 0] <= -1).all())] == []


def test_what_is_infinite_everywhere_is_no_nan() -> None:
    for each in ends({"infinite": [*FILLED, node("Add", ["x", "infinite"], "v")]}).values():
        assert bool((each[0, 1] <= 1).all())
        assert bool((each[1, 1] >= INSTEAD).all())


def test_a_part_of_the_box_may_have_the_answer() -> None:
    loaded = load(guarded(OPEN["a logarithm"], "IsNaN"))
    box = Interval(torch.tensor([[0.1] * 3, [-0.1] * 3]), torch.ones(2, 3))
    bounds = METHODS["crown"](prepare(loaded, (3,)), box, BoundOptions()).lower_bounds(-torch.eye(3)[None])
    assert bool((-bounds[0] <= 1.001).all())
    assert bool((-bounds[1] >= INSTEAD).all())


def test_a_question_about_what_has_no_value_has_an_answer() -> None:
    network = prepare(load(guarded(OPEN["a logarithm"], "IsNaN")), (3,))
    box = Interval(-torch.ones(1, 3), torch.ones(1, 3))
    assert undefined_nodes(network.graph, box, METHODS["ibp"](network, box, BoundOptions()).inputs) == {}


@pytest.mark.parametrize("asking", ["IsNaN", "IsInf"])
def test_the_model_asks_as_onnxruntime_does(asking: str) -> None:
    content = guarded(LEFT_OUT, asking)
    runtime, loaded = Runtime.of(parse(content)), load(content)
    for entry in (-0.5, 0.0, 0.5):
        x = np.full(3, entry, np.float32)
        assert loaded(torch.from_numpy(x)[None])[0].tolist() == pytest.approx(runtime.flat(x).tolist())


def test_one_sign_of_infinity_may_be_asked_for() -> None:
    nodes = [node("Log", ["x"], "v"), node("IsInf", ["v"], "asked", detect_negative=0),
             node("Where", ["asked", "big", "x"])]  # fmt: skip
    assert load(model(nodes, [1, 3], C))(torch.zeros(1, 3)).tolist() == [[0.0] * 3]


def test_where_halves_overflow_is_refused_in_words() -> None:
    constants = {"big": np.float16(9)}
    content = model([node("IsNaN", ["x"], "asked"), node("Where", ["asked", "big", "x"])], [1, 3], constants,
                    kind=TensorProto.FLOAT16)  # fmt: skip
    with pytest.raises(UnsupportedModelError, match="where float16 overflows is not bounded; expected the model in"):
        load(content)
