"""Comparisons, truths and choices by them: against onnxruntime, and inside of their bounds."""

from __future__ import annotations

from typing import Any

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
from service.bounds.onnx.reading import Runtime, parse
from service.bounds.optimise import Ascent

C = np.array([[0.5, -0.25, 0.0]], dtype=np.float32)
ONE = np.array([[1.0]], dtype=np.float32)


def asking(kind: str, *then: onnx.NodeProto) -> bytes:
    return model([node("Sin", ["x"], "s"), node(kind, ["s", "c"], "t"), *then], [1, 3], {"c": C, "one": ONE})


def chosen(name: str = "t") -> onnx.NodeProto:
    return node("Where", [name, "x", "s"])


def truth(name: str = "t") -> onnx.NodeProto:
    return node("Cast", [name], to=TensorProto.FLOAT)


def classifier(rows: int) -> bytes:
    """A label before its scores, both as one output."""
    given = {"coefficients": [1.0, -2.0, 0.5] * rows, "intercepts": [0.1, -0.2, 0.3][:rows]}
    labels = {"classlabels_ints": [7, -1, 4][: max(2, rows)], "post_transform": "LOGISTIC"}
    nodes = [
        node("LinearClassifier", ["x"], ["label", "p"], domain="ai.onnx.ml", **given, **labels),
        node("Cast", ["label"], "f", to=TensorProto.FLOAT),
        node("Unsqueeze", ["f"], "u", axes=[1]),
        node("Concat", ["u", "p"], axis=1),
    ]
    return model(nodes, [1, 3], opset=12)


TWO = [node("Less", ["x", "one"], "u"), node("Not", ["u"], "n")]
MODELS: dict[str, bytes] = {
    **{kind: asking(kind, chosen()) for kind in ("Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal")},
    **{kind: asking("Greater", *TWO, node(kind, ["t", "n"], "b"), truth("b")) for kind in ("And", "Or", "Xor")},
    "Sign": model([node("Sign", ["x"])], [1, 3]),
    "Shrink": model([node("Shrink", ["x"], lambd=0.6)], [1, 3]),
    "Shrink to overlap": model([node("Shrink", ["x"], lambd=-0.4, bias=0.3)], [1, 3]),
    "ThresholdedRelu": model([node("ThresholdedRelu", ["x"])], [1, 3]),
    **{
        name: model([node("Sin", ["x"], "s"), node(kind, ["s"], "t", axis=-1, **given), truth()], [1, 3])
        for name, kind, given in (
            ("ArgMax", "ArgMax", {}),
            ("ArgMin", "ArgMin", {"keepdims": 0}),
            ("last ArgMax", "ArgMax", {"select_last_index": 1}),
        )
    },
    "LinearClassifier": classifier(3),
    "LinearClassifier of two": classifier(1),
    "Mask": model(
        [node("Less", ["x", "c"], "t"), node("Where", ["t", "huge", "x"], "m"), node("ReduceMax", ["m"], axes=[1])],
        [1, 3],
        {"c": C, "huge": np.array([-1e9], dtype=np.float32)},
        opset=13,
    ),
    "Elu by hand": model(
        [
            node("Greater", ["x", "z"], "t"),
            node("Exp", ["x"], "e"),
            node("Sub", ["e", "one"], "f"),
            node("Where", ["t", "x", "f"]),
        ],
        [1, 3],
        {"z": np.float32(0), "one": ONE},
    ),
    "Cast to truth": model([node("Relu", ["x"], "r"), node("Cast", ["r"], "t", to=TensorProto.BOOL), truth()], [1, 3]),
    "Pow of a constant": model([node("Pow", ["b", "x"])], [1, 3], {"b": np.float32(1.7)}),
    "Pow of a value": model([node("Exp", ["x"], "e"), node("Pow", ["e", "x"])], [1, 3]),
}


@pytest.mark.parametrize("name", slow_but_for(list(MODELS), "Equal", "Mask", "Shrink", "Xor", "ArgMax"))
def test_points_lie_inside_of_the_bounds(name: str) -> None:
    data = MODELS[name]
    runtime, network = Runtime.of(parse(data)), prepare(load(data), (3,))
    precise = prepare(load(data).double(), (3,))
    generator = torch.Generator().manual_seed(0)
    for radius in (0.01, 0.3, 2.0):
        centre = torch.randn(4, 3, generator=generator).round(decimals=1)
        box = Interval(centre - radius, centre + radius)
        x = box.lower + torch.rand(25, 4, 3, generator=generator) * (box.upper - box.lower)
        reached = np.stack([[runtime.flat(each.numpy()) for each in points] for points in x])
        identity = torch.eye(reached.shape[-1])
        for method in ("ibp", "crown", "alpha-crown"):
            bounds(METHODS[method], network, box, identity, reached)
        rows, double = torch.cat([identity, -identity])[None].double(), box.map(torch.Tensor.double)
        found = METHODS["crown"].rigorous(precise, double, BoundOptions()).lower_bounds(rows)
        inside(found, reached)


def bounds(method: Any, network: Any, box: Interval, identity: torch.Tensor, reached: Any) -> None:
    with torch.no_grad():
        options = BoundOptions(ascent=Ascent(iterations=8))
        inside(method(network, box, options).lower_bounds(torch.cat([identity, -identity])[None]), reached)


def inside(found: torch.Tensor, reached: Any) -> None:
    low, negated = found.double().numpy().reshape(len(found), 2, -1).swapaxes(0, 1)
    slack = 1e-4 * (1 + np.abs(reached))
    assert (low <= reached + slack).all()
    assert (reached <= -negated + slack).all()


def test_a_choice_whose_condition_is_known_is_that_operand_beside_a_mask() -> None:
    """A mask of −1e9 that is not taken costs no digit."""
    network = prepare(load(MODELS["Mask"]), (3,))
    box = Interval(torch.tensor([[2.0, 3.0, 4.0]]), torch.tensor([[2.5, 3.5, 4.5]]))
    for method in ("ibp", "crown"):
        with torch.no_grad():
            found = METHODS[method](network, box, BoundOptions()).lower_bounds(torch.tensor([[[1.0], [-1.0]]]))[0]
        assert found.tolist() == pytest.approx([4.0, -4.5], abs=1e-4)


def test_what_a_comparison_cannot_choose_is_refused_by_name() -> None:
    chosen = [node("Where", ["t", "i", "i"], "w"), node("Cast", ["w"], to=TensorProto.FLOAT)]
    whole = model([node("Less", ["x", "c"], "t"), *chosen], [1, 3], {"c": C, "i": np.array([[1]])})
    with pytest.raises(UnsupportedModelError, match="it chooses integers"):
        load(whole)
