"""Entries at the places of the largest ones, as routers choose experts."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from nets import output_bounds, prepared, samples
from onnx_models import model, node

from service.bounds.graph import UnsupportedModelError
from service.bounds.interval import Interval
from service.bounds.network import Network
from service.bounds.onnx import load

EXPERTS = 4
TWO = {"k": np.array([2]), "z": np.zeros((1, EXPERTS), np.float32), "u": np.float32([[3.0, 5.0]])}


def chosen(*nodes: object, opset: int = 18, shape: tuple[int, ...] = (1, EXPERTS), **more: np.ndarray) -> bytes:
    """The two largest of four scores, and what is made of their places."""
    every = [node("TopK", ["x", "k"], ["v", "i"]), *nodes]
    read = {name for each in every for name in each.input}
    return model(every, shape, {name: each for name, each in (TWO | more).items() if name in read}, opset=opset)


MADE = {
    "put": chosen(node("ScatterElements", ["z", "i", "u"], axis=1)),
    "taken": chosen(node("GatherElements", ["x", "i"], axis=1)),
    "largest": chosen(node("Identity", ["v"])),
    "places": chosen(node("Cast", ["i"], to=1)),
}


@cache
def network(name: str) -> Network:
    return prepared(load(MADE[name]).double(), EXPERTS)


def bounds_of(
    name: str, lower: list[float], upper: list[float], method: str = "ibp"
) -> tuple[list[float], list[float]]:
    box = Interval(*(torch.tensor([each], dtype=torch.float64) for each in (lower, upper)))
    found = output_bounds(network(name), box, method)
    return found.lower[0].tolist(), found.upper[0].tolist()


@pytest.mark.parametrize("method", ["ibp", "crown"])
def test_a_ranking_that_is_certain_is_a_constant_choice(method: str) -> None:
    box = [0.0, 4.0, -1.0, 6.0], [1.0, 5.0, 0.5, 7.0]
    assert bounds_of("put", *box, method) == ([0.0, 5.0, 0.0, 3.0], [0.0, 5.0, 0.0, 3.0])
    assert bounds_of("taken", *box, method) == ([6.0, 4.0], [7.0, 5.0])
    assert bounds_of("places", *box, method) == ([3.0, 1.0], [3.0, 1.0])


def test_only_what_may_be_chosen_is_touched() -> None:
    """The first and the last are the largest, in either order: the two between stay as they are."""
    assert bounds_of("put", [4.0, 0.0, 0.0, 4.0], [6.0, 1.0, 1.0, 6.0]) == ([0.0, 0.0, 0.0, 0.0], [5.0, 0.0, 0.0, 5.0])


def test_bounds_of_the_largest_are_those_of_the_ends() -> None:
    lower, upper = [0.0, 4.0, -1.0, 2.0], [9.0, 5.0, 0.5, 4.5]
    assert bounds_of("largest", lower, upper) == ([4.0, 2.0], [9.0, 5.0])


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("method", ["ibp", "crown"])
def test_no_value_leaves_the_bounds(name: str, method: str) -> None:
    generator = torch.Generator().manual_seed(2)
    centre = torch.randn(40, EXPERTS, generator=generator, dtype=torch.float64)
    centre[:5] = centre[:5].round()
    box = Interval(centre - 0.4, centre + 0.4)
    points = samples(box, 60, generator)
    values = load(MADE[name]).double()(points.flatten(0, 1)).reshape(60, 40, -1)
    found = output_bounds(network(name), box, method)
    assert bool((found.lower <= values.amin(dim=0) + 1e-9).all())
    assert bool((found.upper >= values.amax(dim=0) - 1e-9).all())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            chosen(
                node("ScatterElements", ["z", "i", "u"], axis=1), shape=(1, EXPERTS), z=np.zeros((2, 4), np.float32)
            ),
            r"ScatterElements .* leave out entries of other dimensions than its axis",
        ),
        (
            model([node("TopK", ["x", "k"], ["v", "i"]), node("Cast", ["i"], to=1)], [1, 100], {"k": np.array([2])}),
            r"'i' is an output that its node is not bounded with",
        ),
        (
            chosen(
                node("Unsqueeze", ["i", "one"], "n"),
                node("ScatterND", ["x", "n", "u"]),
                shape=(EXPERTS,),
                one=np.array([1]),
                u=np.float32([3.0, 5.0]),
            ),
            r"ScatterND .* its indices depend on the input",
        ),
    ],
)
def test_what_is_left_is_refused_by_name(data: bytes, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        load(data)
