"""Tables whose rows are chosen by whole numbers that depend on the input."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from lanes import slow_but_for
from onnx import TensorProto
from onnx_models import model, node

from service.bounds.graph import UnsupportedModelError
from service.bounds.interval import Interval
from service.bounds.methods import METHODS, BoundOptions
from service.bounds.network import prepare
from service.bounds.onnx import load
from service.formats.onnx import outline_of

TABLE = np.random.default_rng(3).normal(size=(5, 2)).astype(np.float32)


def rows_of(axis: int = 0) -> bytes:
    """Rows, or columns, of a table for three numbers that are cast to integers."""
    nodes = [node("Cast", ["x"], "i", to=TensorProto.INT64), node("Gather", ["E", "i"], axis=axis)]
    return model(nodes, [1, 3], {"E": TABLE if axis == 0 else TABLE.T.copy()})


@pytest.mark.parametrize("axis", [0, 1])
def test_rows_are_those_that_onnxruntime_gives(axis: int) -> None:
    found = load(rows_of(axis))(torch.tensor([[0.0, 4.9, -1.2], [3.0, -0.9, -5.0]]))
    rows = torch.from_numpy(TABLE)[torch.tensor([[0, 4, -1], [3, 0, 0]])]
    columns = rows.movedim(-1, 1).unsqueeze(2)  # (instances, 2, 1, 3): one index for each of the input's places
    assert torch.equal(found, (rows if axis == 0 else columns).flatten(1))


@pytest.mark.parametrize("method", slow_but_for(["ibp", "crown", "alpha-crown"], "crown"))
def test_bounds_are_the_hull_of_the_rows_that_are_left(method: str) -> None:
    box = Interval(torch.tensor([[0.0, 1.2, 2.5]]), torch.tensor([[4.5, 1.8, 3.5]]))
    both = torch.cat([torch.eye(6), -torch.eye(6)])[None]
    found = METHODS[method](prepare(load(rows_of()), (3,)), box, BoundOptions()).lower_bounds(both)[0]
    left = [TABLE, TABLE[1:2], TABLE[2:4]]
    assert torch.allclose(found[:6], torch.from_numpy(np.concatenate([each.min(0) for each in left])))
    assert torch.allclose(found[6:], -torch.from_numpy(np.concatenate([each.max(0) for each in left])))


def test_integers_of_the_model_are_whole_to_the_ends_of_a_box() -> None:
    proto = onnx.load_from_string(model([node("Gather", ["E", "x"])], [1, 3], {"E": TABLE}))
    proto.graph.input[0].type.tensor_type.elem_type = TensorProto.INT64
    made = proto.SerializeToString()
    exact = torch.tensor([[2.0, 0.0, 4.0]])
    both = torch.cat([torch.eye(6), -torch.eye(6)])[None]
    found = METHODS["ibp"](prepare(load(made), (3,)), Interval(exact, exact), BoundOptions()).lower_bounds(both)[0]
    assert torch.equal(found[:6], torch.from_numpy(TABLE[[2, 0, 4]].reshape(-1)))
    assert torch.equal(found[:6], -found[6:])


def test_arithmetic_of_such_numbers_is_refused_in_words() -> None:
    nodes = [node("Cast", ["x"], "i", to=TensorProto.INT64), node("Div", ["i", "two"], "h"), node("Gather", ["E", "h"])]
    with pytest.raises(UnsupportedModelError, match=r"ONNX Div .* computes with whole numbers, 'i', that depend on"):
        load(model(nodes, [1, 3], {"E": TABLE, "two": np.array(2)}))


def test_a_large_table_says_what_can_be_done() -> None:
    nodes = [node("Cast", ["x"], "i", to=TensorProto.INT64), node("Gather", ["E", "i"])]
    content = model(nodes, [1, 3], {"E": np.zeros((2**19, 4), np.float32)})
    assert outline_of(content).inputs == 3
    with pytest.raises(UnsupportedModelError, match=r"fix the indices \(model.inputs\), or make the rows the input"):
        load(content)
