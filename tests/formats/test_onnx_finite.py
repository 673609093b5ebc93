"""Questions whether values are finite numbers."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx_models import model, node

from service.bounds.onnx import load
from service.formats.onnx import outline_of

C = {"c": np.array([[1.0, -2.0, 0.5]], np.float32), "two": np.float32(2), "eps": np.float32(1e-3), "big": np.float32(9)}
DEVIATION = [
    node("ReduceMean", ["x"], "mean", axes=[1]),
    node("Sub", ["x", "mean"], "centred"),
    node("Pow", ["centred", "two"], "square"),
    node("ReduceMean", ["square"], "variance", axes=[1]),
    node("Add", ["variance", "eps"], "above"),
]
FINITE: dict[str, list[onnx.NodeProto]] = {
    "a product": [node("Mul", ["x", "c"], "v")],
    "a normalised value": [*DEVIATION, node("Sqrt", ["above"], "root"), node("Div", ["centred", "root"], "v")],
    "a logarithm of what is above 0": [*DEVIATION, node("Log", ["above"], "v")],
    "a quotient by constants": [node("Div", ["x", "c"], "v")],
    "the input": [node("Identity", ["x"], "v")],
}
OPEN: dict[str, list[onnx.NodeProto]] = {
    "a root": [node("Sqrt", ["x"], "v")],
    "a logarithm": [node("Relu", ["x"], "r"), node("Log", ["r"], "v")],
    "a quotient": [node("Div", ["c", "x"], "v")],
    "an exponential": [node("Exp", ["x"], "v")],
    "a reciprocal of squares": [node("Mul", ["x", "x"], "s"), node("Reciprocal", ["s"], "v")],
}


def guarded(before: list[onnx.NodeProto], asking: str) -> bytes:
    return model([*before, node(asking, ["v"], "asked"), node("Where", ["asked", "big", "v"])], [1, 3], C)


@pytest.mark.parametrize("asking", ["IsNaN", "IsInf"])
@pytest.mark.parametrize("name", FINITE)
def test_what_is_always_finite_is_not_asked_about(name: str, asking: str) -> None:
    content = guarded(FINITE[name], asking)
    assert outline_of(content).unsupported == ()
    x = torch.tensor([[0.5, -1.0, 2.0]])
    assert torch.isfinite(load(content)(x)).all()
    assert not (load(content)(x) == 9).any()


@pytest.mark.parametrize("name", OPEN)
def test_what_may_be_something_else_is_refused_in_words(name: str) -> None:
    (words,) = outline_of(guarded(OPEN[name], "IsNaN")).unsupported
    assert words.startswith("ONNX IsNaN")
    assert words.endswith("asks whether 'v' is a finite number, which cannot be told of it beforehand")
