"""Guards against rows that are not a number, behind a softmax."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from service.bounds.interval import Interval
from service.bounds.methods import METHODS, BoundOptions
from service.bounds.network import prepare
from service.bounds.onnx import load

HALF, NOTHING = [0.0, -np.inf, 0.0], [-np.inf] * 3
GUARD = [helper.make_node("IsNaN", ["p"], ["asked"]), helper.make_node("Where", ["asked", "zero", "p"], ["y"])]


def attention(mask: list[float], before: list[onnx.NodeProto], *, is_node: bool = False) -> bytes:
    """Shares of three scores ``s``, masked and guarded, after what makes the scores of ``x``; 0 may be a node's."""
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 3]) for name in "xy"]
    nodes = [*before, helper.make_node("Add", ["s", "mask"], ["m"]), helper.make_node("Softmax", ["m"], ["p"]), *GUARD]
    constants = [
        numpy_helper.from_array(np.array(each, np.float32), name) for each, name in ((mask, "mask"), (0, "zero"))
    ]
    if is_node:
        nodes.append(helper.make_node("Constant", [], ["zero"], value=constants.pop()))
    graph = helper.make_graph(nodes, "g", value[:1], value[1:], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    content: bytes = model.SerializeToString()
    return content


@pytest.mark.parametrize("is_node", [False, True], ids=["weight", "node"])
def test_a_guard_that_no_input_needs_is_the_softmax(is_node: bool) -> None:
    """0 is one of the file's weights, or what torch's older exporter writes: a node."""
    model = load(attention(HALF, [helper.make_node("Neg", ["x"], ["s"])], is_node=is_node))
    assert model(torch.tensor([[1.0, 5.0, 1.0]])).tolist() == [[0.5, 0.0, 0.5]]


def test_nothing_is_claimed_where_a_guard_is_needed() -> None:
    masked = load(attention(NOTHING, [helper.make_node("Neg", ["x"], ["s"])]))
    box = Interval(torch.zeros(1, 3), torch.ones(1, 3))
    bounds = METHODS["ibp"](prepare(masked, (3,)), box, BoundOptions())
    assert not bounds.lower_bounds(torch.eye(3)[None]).isfinite().any()


def test_a_guard_behind_a_logarithm_of_0_is_needed() -> None:
    logarithms = [helper.make_node("Relu", ["x"], ["r"]), helper.make_node("Log", ["r"], ["s"])]
    network = prepare(load(attention(HALF, logarithms)), (3,))
    for least in (0.0, 0.5):
        box = Interval(torch.full((1, 3), least), torch.ones(1, 3))
        bounds = METHODS["crown"](network, box, BoundOptions()).lower_bounds(torch.eye(3)[None])[0]
        assert bool((bounds[[0, 2]] > 0.1).all()) == (least > 0)
