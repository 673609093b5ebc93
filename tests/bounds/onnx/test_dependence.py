"""What is evaluated once, and what could depend on the input: branches, loops, shapes, random numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx_models import model, node, weights

from service.bounds.graph import UnsupportedModelError
from service.bounds.onnx import load
from service.bounds.onnx.model import check_at
from service.bounds.onnx.reading import Runtime, parse
from service.bounds.onnx.stored import store, stored
from service.formats.onnx import OnnxError, outline_of

TEN = np.float32(10)


def graph(nodes: Sequence[onnx.NodeProto], *outputs: str, **constants: Any) -> onnx.GraphProto:
    return helper.make_graph(
        list(nodes),
        "inner",
        [],
        [helper.make_empty_tensor_value_info(name) for name in outputs],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )


def bump(of: str, to: str) -> onnx.GraphProto:
    """``relu(of − 10)``, which is 0 around the origin."""
    return graph([node("Sub", [of, "ten"], "d"), node("Relu", ["d"], to)], to, ten=TEN)


def chosen(condition: str, then: onnx.GraphProto, other: onnx.GraphProto) -> onnx.NodeProto:
    return node("If", [condition], "z", then_branch=then, else_branch=other)


def plus_branch(condition: Any) -> bytes:
    """``x + relu(x − 10)`` or ``2 x``, whose branches read x from around."""
    nodes = [chosen("c", bump("x", "t"), graph([node("Identity", ["x"], "e")], "e")), node("Add", ["x", "z"])]
    return model(nodes, [1, 2], {"c": np.array(condition)})


def by_shape() -> bytes:
    """The ``If`` that torch writes for ``squeeze``, with another one in its branch that captures, too."""
    inner = chosen("c", bump("x", "t"), graph([node("Neg", ["x"], "n")], "n"))
    nodes = [
        node("Shape", ["x"], "s"),
        node("Gather", ["s", "one"], "l"),
        node("Equal", ["l", "two"], "c"),
        chosen("c", graph([inner], "z"), graph([node("Identity", ["x"], "e")], "e")),
        node("Add", ["x", "z"]),
    ]
    nodes[3].output[0], nodes[4].input[1] = "w", "w"
    return model(nodes, [1, 2], {"one": np.array(1), "two": np.array(2)})


def loop() -> bytes:
    body = graph([node("Identity", ["more"], "again"), *bump("x", "t").node], "again", "t", ten=TEN)
    body.input.extend(
        [
            helper.make_tensor_value_info("index", TensorProto.INT64, []),
            helper.make_tensor_value_info("more", TensorProto.BOOL, []),
            helper.make_tensor_value_info("carried", TensorProto.FLOAT, [1, 2]),
        ]
    )
    nodes = [node("Loop", ["count", "", "start"], "z", body=body), node("Add", ["x", "z"])]
    return model(nodes, [1, 2], {"count": np.array(1), "start": weights(1, 2)})


def as_onnxruntime(data: bytes, x: list[float]) -> None:
    expected = Runtime.of(parse(data)).flat(np.array(x))
    np.testing.assert_allclose(load(data)(torch.tensor([x]))[0].numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("data", [plus_branch(True), plus_branch(False), by_shape(), loop()])
def test_what_reads_the_input_from_around_is_no_constant(data: bytes, tmp_path: Path) -> None:
    as_onnxruntime(data, [20.0, 4.0])
    assert outline_of(data).unsupported == ()
    store(tmp_path / "model", data, torch.float32)
    x = torch.tensor([[20.0, 4.0]])
    assert torch.equal(stored(tmp_path / "model", torch.float32)(x), load(data)(x))


def test_nodes_in_another_order_are_no_constants() -> None:
    nodes = [node("Add", ["x", "z"]), node("Relu", ["d"], "z"), node("Sub", ["x", "ten"], "d")]
    as_onnxruntime(model(nodes, [1, 2], {"ten": TEN}), [20.0, 4.0])


def if_the_input_is_large() -> bytes:
    nodes = [
        node("ReduceMax", ["x"], "m", keepdims=0),
        node("Greater", ["m", "ten"], "c"),
        chosen("c", bump("x", "t"), graph([node("Identity", ["x"], "e")], "e")),
        node("Add", ["x", "z"]),
    ]
    return model(nodes, [1, 2], {"ten": TEN})


def counted(kind: str) -> bytes:
    """How many entries are not zero, by a shape that depends on them; at the origin it is 0."""
    nodes = [node("NonZero", ["x"], "i"), node(kind, ["i"], "s"), node("Cast", ["s"], "f", to=TensorProto.FLOAT)]
    nodes += [node("ReduceSum", ["f"], "n", keepdims=0), node("Mul", ["x", "n"])]
    return model(nodes, [1, 2])


def largest() -> bytes:
    """As many of the largest entries as an entry says; at the origin it is none."""
    nodes = [node("ReduceMax", ["x"], "m"), node("Cast", ["m"], "k", to=TensorProto.INT64)]
    nodes += [node("TopK", ["x", "k"], ["v", "i"]), node("Size", ["v"], "s")]
    return model([*nodes, node("Cast", ["s"], "f", to=TensorProto.FLOAT), node("Add", ["x", "f"])], [3])


def as_long_as_the_branch() -> bytes:
    """A constant of one entry or of two, as the input decides."""
    nodes = [node("ReduceMax", ["x"], "m", keepdims=0), node("Greater", ["m", "ten"], "c")]
    nodes += [chosen("c", graph([], "a", a=np.ones(1)), graph([], "b", b=np.ones(2))), node("Size", ["z"], "s")]
    return model([*nodes, node("Cast", ["s"], "f", to=TensorProto.FLOAT), node("Add", ["x", "f"])], [2], {"ten": TEN})


def cut() -> bytes:
    """A constant that is as long as an entry of the input says."""
    nodes = [node("Cast", ["x"], "l", to=TensorProto.INT64), node("Expand", ["one", "l"], "e")]
    nodes += [node("Size", ["e"], "s"), node("Cast", ["s"], "f", to=TensorProto.FLOAT), node("Add", ["x", "f"])]
    return model(nodes, [1], {"one": np.float32(1)})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (if_the_input_is_large(), "If.*graph within it depends on the input"),
        (counted("Shape"), "Shape"),
        (counted("Size"), "Size"),
        (cut(), "Size"),
        (largest(), "TopK|Size"),
        (as_long_as_the_branch(), "Size|If"),
        (model([node("RandomNormal", [], "n", shape=[2]), node("Add", ["x", "n"])], [2]), "draws random numbers"),
        (model([node("Dropout", ["x", "r", "t"])], [2], {"r": np.float32(0.5), "t": np.array(True)}), "training_mode"),
    ],
)
def test_what_could_depend_on_the_input_and_has_no_rule_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        load(data)
    try:
        named = outline_of(data).unsupported
    except OnnxError as error:
        named = (str(error),)
    assert any(part in " ".join(named) for part in re.split(r"\.\*|\|", message))


def test_the_points_of_a_property_show_what_random_inputs_do_not() -> None:
    data = plus_branch(True)
    as_if_constant = lambda x: x  # noqa: E731 - what folding the branch at 0 leaves
    check_at(as_if_constant, torch.zeros(1, 2), Runtime.of(parse(data)))
    with pytest.raises(UnsupportedModelError, match=r"differs from onnxruntime by 10 at the input \(20, 4"):
        check_at(as_if_constant, torch.tensor([[20.0, 4.0]]), Runtime.of(parse(data)))


def test_at_a_jump_both_sides_are_right() -> None:
    data = model([node("Floor", ["x"])], [1])
    check_at(lambda x: torch.floor(x - 1e-7), torch.tensor([[3.0]]), Runtime.of(parse(data)))
    with pytest.raises(UnsupportedModelError, match="differs"):
        check_at(lambda x: torch.floor(x - 1), torch.tensor([[3.0]]), Runtime.of(parse(data)))


def test_an_output_that_its_node_is_not_bounded_with_is_named() -> None:
    nodes = [node("Dropout", ["x"], "n"), node("Cast", ["mask"], "m", to=TensorProto.FLOAT), node("Add", ["n", "m"])]
    nodes[0].output.append("mask")
    with pytest.raises(UnsupportedModelError, match="'mask' is an output that its node is not bounded with"):
        load(model(nodes, [1, 2], opset=17))
