"""Graphs that are written and read are the same graphs, down to how their constants lie in memory."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from onnx_models import dense, model, node
from torch import Tensor

from service.bounds.capture import capture
from service.bounds.graph import BatchSize, Graph, Node, Ref, Repeated
from service.bounds.graph_module import ExecutableGraph
from service.bounds.onnx import load
from service.bounds.stored_graph import NotStorableError, from_bytes, to_bytes

IMAGES = model(
    [
        node("Conv", ["x", "k"], "c", pads=[1, 1, 1, 1], strides=[2, 2]),
        node("Clip", ["c", "low"], "d"),
        node("Concat", ["d", "added"], "e", axis=1),
        node("Flatten", ["e"], "f"),
        node("MatMul", ["f", "w"], "g"),
        node("Softmax", ["g"], axis=1),
    ],
    ["batch", 1, 4, 4],
    {
        "k": np.arange(18, dtype=np.float32).reshape(2, 1, 3, 3) / 9,
        "low": np.float32(-1),
        "added": np.ones((1, 1, 2, 2), dtype=np.float32),
        "w": np.linspace(-1, 1, 36, dtype=np.float32).reshape(12, 3),
    },
)
STORED = to_bytes(capture(load(dense([3, 4, 2])), (3,)))


def same(own: Any, other: Any) -> bool:
    """Whether two arguments are the same, in type and memory too."""
    if isinstance(own, Repeated):
        return isinstance(other, Repeated) and same(own.value, other.value)
    if isinstance(own, tuple | list):
        return type(own) is type(other) and len(own) == len(other) and all(map(same, own, other))
    if isinstance(own, Tensor):
        return own.dtype == other.dtype and own.stride() == other.stride() and torch.equal(own, other)
    return type(own) is type(other) and own == other


@pytest.mark.parametrize(("content", "shape"), [(dense([3, 4, 2]), (3,)), (IMAGES, (16,))], ids=["dense", "images"])
def test_a_graph_is_what_it_was(content: bytes, shape: tuple[int, ...]) -> None:
    graph = capture(load(content), shape)
    read = from_bytes(to_bytes(graph))
    for own, other in zip(graph.nodes, read.nodes, strict=True):
        for each in fields(Node):
            if each.name != "arguments":
                assert getattr(own, each.name) == getattr(other, each.name)
        assert list(own.arguments) == list(other.arguments)
        assert all(same(own.arguments[name], other.arguments[name]) for name in own.arguments), own
    x = torch.rand(2, *graph.input.shape)
    assert torch.equal(ExecutableGraph(graph)(x), ExecutableGraph(read)(x))


def test_every_kind_of_argument_is_kept() -> None:
    shared = torch.arange(6.0).reshape(2, 3)
    arguments = {
        "refs": (Ref("x"), (Ref("x"), BatchSize())),
        "plain": (None, True, 3, -0.0, float("inf"), "text"),
        "of_torch": (torch.float64, torch.strided, torch.contiguous_format, torch.device("cpu")),
        "transposed": shared.mT,
        "expanded": torch.tensor([[1.0], [2.0]]).expand(2, 4),
        "shared": shared,
        "again": [shared, torch.tensor(7), torch.tensor([True, False])],
        "repeated": Repeated(torch.zeros(1, 2)),
        "empty": torch.empty(0, 3),
    }
    (read,) = from_bytes(to_bytes(Graph((Node("x", "input", arguments, (2,)),)))).nodes
    assert {name: same(value, read.arguments[name]) for name, value in arguments.items()} == dict.fromkeys(
        arguments, True
    )
    assert read.arguments["again"][0] is read.arguments["shared"]
    assert read.arguments["expanded"].untyped_storage().nbytes() == 2 * 4


def test_what_graphs_never_hold_is_not_stored() -> None:
    with pytest.raises(NotStorableError, match="an argument is complex"):
        to_bytes(Graph((Node("x", "input", {"alpha": 1j}, (2,)),)))


@given(st.integers(0, len(STORED) - 1), st.integers(1, 255))
def test_bytes_that_are_not_those_that_were_written_are_told(place: int, change: int) -> None:
    damaged = bytearray(STORED)
    damaged[place] ^= change
    with pytest.raises(NotStorableError):
        from_bytes(bytes(damaged))
    with pytest.raises(NotStorableError):
        from_bytes(STORED[:place])
