"""Functions that jump: counterexamples at corners, and between and beyond steps, are found, and no other is said."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch
from lanes import first_fast
from onnx_models import model, node
from search_problems import model_from, specification_of_cases
from torch import Tensor, nn

from service.bounds.graph_module import ExecutableGraph
from service.bounds.methods import CROWN
from service.bounds.onnx.reading import Runtime, parse
from service.formats.vnnlib import Disjunct, Halfspace, Query
from service.verification.bab.attack import attack
from service.verification.bab.driver import decide
from service.verification.bab.model import ModelUnderVerification, RampedGraph, has_steps
from service.verification.bab.settings import SearchSettings, StepSettings
from service.verification.bab.specification import Counterexample, specifications
from service.verification.bab.steps import attack_at_steps, step_sides
from service.verification.verdict import Verdict

CPU = torch.device("cpu")


def query(lower: list[float], upper: list[float], most: float, sign: float = 1.0) -> Query:
    """Ask for an input where ``sign · y ≤ sign · most``."""
    ends = tuple(np.float32(lower).tolist()), tuple(np.float32(upper).tolist())
    return Query(len(lower), 1, (Disjunct(*ends, (Halfspace(((0, sign),), sign * most),)),))


def searched(data: bytes, asked: Query, dtype: torch.dtype = torch.float32) -> Counterexample | None:
    under = ModelUnderVerification.of(data, dtype)
    (specification,) = specifications(asked, CPU)
    return attack_at_steps(under, specification, time.monotonic() + 300)


def reached(data: bytes, x: Counterexample) -> float:
    return float(Runtime.of(parse(data)).flat(np.array(x, dtype=np.float32))[0])


def beyond_a_corner(seed: int) -> tuple[bytes, list[float], list[float]]:
    """``floor(w · x + b)``, less than 0 within a few last bits of one corner alone."""
    draw = np.random.default_rng(seed)
    lower = draw.normal(size=2).astype(np.float32)
    upper = lower + np.float32(0.5)
    w = draw.normal(size=(2, 1)).astype(np.float32)
    corner = np.where(w[:, 0] > 0, lower, upper).astype(np.float64)
    b = -(corner @ w.astype(np.float64)) - 1e-6
    nodes = [node("Gemm", ["x", "w", "b"], "h"), node("Floor", ["h"])]
    return model(nodes, [1, 2], {"w": w, "b": b.astype(np.float32)}), lower.tolist(), upper.tolist()


@pytest.mark.parametrize("seed", first_fast(1, range(4)))
def test_what_is_beyond_a_step_at_one_corner_is_found(seed: int) -> None:
    data, lower, upper = beyond_a_corner(seed)
    found = searched(data, query(lower, upper, -0.5))
    assert found is not None
    assert reached(data, found) <= -0.5


def between(first: float, second: float) -> bytes:
    """1 where the second input is above ``first`` and not above ``second``."""
    nodes = [
        node("Gather", ["x", "i"], "z", axis=1),
        node("Greater", ["z", "a"], "p"),
        node("Greater", ["z", "b"], "q"),
        node("Cast", ["p"], "u", to=onnx.TensorProto.FLOAT),
        node("Cast", ["q"], "v", to=onnx.TensorProto.FLOAT),
        node("Sub", ["u", "v"]),
    ]
    constants = {"a": np.float32(first), "b": np.float32(second), "i": np.array([1], dtype=np.int64)}
    return model(nodes, [1, 2], constants)


def test_one_number_between_two_steps_is_found() -> None:
    first = np.float32(0.1)
    data = between(float(first), float(np.nextafter(first, np.float32(1))))
    found = searched(data, query([-1, -1], [1, 1], 0.5, -1.0))
    assert found is not None
    assert found[1] == np.nextafter(first, np.float32(1))


def test_a_sign_of_0_is_found() -> None:
    data = model([node("Sign", ["x"], "s"), node("Abs", ["s"], "t"), node("ReduceSum", ["t"], keepdims=1)], [1, 1])
    found = searched(data, query([-0.7], [0.9], 0.5))
    assert found is not None
    assert found[0] == 0


@pytest.mark.slow
def test_equal_inputs_are_found() -> None:
    nodes = [node("Split", ["x"], ["a", "b"], axis=1), node("Equal", ["a", "b"], "e")]
    data = model([*nodes, node("Cast", ["e"], to=onnx.TensorProto.FLOAT)], [1, 2], opset=11)
    found = searched(data, query([-0.7, 0.1], [0.9, 0.8], 0.5, -1.0))
    assert found is not None
    assert found[0] == found[1]


def test_an_attack_by_gradients_alone_finds_none_of_these() -> None:
    """As long as that is so the tests above show what looking at steps brings."""
    data, lower, upper = beyond_a_corner(0)
    under = ModelUnderVerification.of(data, torch.float32)
    (specification,) = specifications(query(lower, upper, -0.5), CPU)
    assert attack(under, specification, time.monotonic() + 300) is None


class Staircase(nn.Module):
    """A slope that only its steps have."""

    def forward(self, x: Tensor) -> Tensor:
        down = torch.floor(8 * x).sum(dim=1, keepdim=True)
        return torch.cat([down, torch.where(x[:, :1] - x[:, 1:2] > 0, down, -down)], dim=1)


@pytest.mark.slow
def test_a_staircase_is_gone_down() -> None:
    under = model_from(Staircase(), 12)
    specification = specification_of_cases([-1.0] * 12, [1.0] * 12, [({0: 1.0}, -95.5)])
    found = attack_at_steps(under, specification)
    assert found is not None
    assert all(each < -0.875 for each in found)


def test_a_search_looks_at_the_steps_of_its_boxes() -> None:
    """Without an attack, and with points that none of its own are near."""
    data, lower, upper = beyond_a_corner(1)
    under = ModelUnderVerification.of(data, torch.float32)
    decision = decide(under, query(lower, upper, -0.5), CROWN, 300, restarts=0)
    assert decision.verdict is Verdict.FALSIFIED
    assert decision.counterexample is not None
    assert reached(data, decision.counterexample) <= -0.5


def test_a_model_without_steps_is_not_looked_at() -> None:
    under = model_from(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), 2)
    specification = specification_of_cases([-1.0, -1.0], [1.0, 1.0], [({0: 1.0}, -9.0)])
    assert under.ramped is None
    assert step_sides(under, specification) is None
    assert attack_at_steps(under, specification) is None


def test_ramps_have_the_values_of_steps_and_a_slope() -> None:
    under = model_from(Staircase(), 2)
    assert has_steps(under.network.graph)
    ramped = RampedGraph(under.network.graph)
    x = torch.tensor([[0.3, 0.7], [0.7, 0.3], [-0.2, -0.2]], dtype=torch.float64, requires_grad=True)
    assert torch.equal(ramped(x), ExecutableGraph(under.network.graph)(x))
    assert torch.equal(ramped(x), Staircase()(x))
    (gradient,) = torch.autograd.grad(ramped(x)[:, 0].sum(), x)
    assert torch.equal(gradient, torch.full_like(x, 8.0))
    assert ramped.sides(x).shape == ramped.deciding(x).shape


def stepped(seed: int) -> tuple[bytes, list[float], list[float]]:
    """Two layers with steps between them and after, of three inputs; corners of the box are short numbers."""
    draw = np.random.default_rng(seed)
    operators = draw.choice(["Floor", "Ceil", "Round", "Sign", "Relu"], size=2)
    constants = {
        "w": draw.normal(size=(3, 4)).astype(np.float32),
        "b": draw.normal(size=4).astype(np.float32),
        "v": draw.normal(size=(4, 1)).astype(np.float32),
        "c": draw.normal(size=1).astype(np.float32),
    }
    nodes = [
        node("Gemm", ["x", "w", "b"], "h"),
        node(str(operators[0]), ["h"], "s"),
        node("Gemm", ["s", "v", "c"], "t"),
    ]
    lower = np.round(draw.normal(size=3), 2)
    return model([*nodes, node(str(operators[1]), ["t"])], [1, 3], constants), lower.tolist(), (lower + 0.25).tolist()


@pytest.mark.parametrize("seed", first_fast(1, range(5)))
def test_verdicts_about_steps_hold_in_onnxruntime_and_float64(seed: int) -> None:
    """About the least value that is reached, and less: none below a verdict, and each counterexample is one."""
    data, lower, upper = stepped(seed)
    low, high = np.float32(lower), np.float32(upper)
    draw, runtime = np.random.default_rng(seed), Runtime.of(parse(data))
    under = ModelUnderVerification.of(data, torch.float32)
    share = draw.random((400, 3))
    share[:100] = share[:100].round()
    x = np.clip((low + share * (high - low)).astype(np.float32), low, high)
    values = np.array([runtime.flat(each)[0] for each in x])
    exact = under.float64_module(torch.from_numpy(x).double())[:, 0].numpy()
    for most in (values.min(), values.min() - 0.3, values.min() - 1.0):
        decision = decide(under, query(lower, upper, float(most)), CROWN, 2)
        if decision.verdict is Verdict.VERIFIED:
            assert values.min() > most
            assert exact.min() > most
        if decision.verdict is Verdict.FALSIFIED:
            assert decision.counterexample is not None
            point = np.array(decision.counterexample)
            assert (low <= point).all()
            assert (point <= high).all()
            assert runtime.flat(point.astype(np.float32))[0] <= most
            assert under.float64_module(torch.from_numpy(point)[None])[0, 0] <= most


def test_nothing_is_found_where_nothing_is() -> None:
    """Of a step that is reached at no number of the box."""
    data = between(0.25, 0.25)
    assert searched(data, query([-1, -1], [1, 1], 0.5, -1.0)) is None


def test_fewer_rounds_look_at_less() -> None:
    data, lower, upper = beyond_a_corner(2)
    under = ModelUnderVerification.of(data, torch.float32)
    under = replace(under, settings=SearchSettings(steps=StepSettings(rounds=0)))
    (specification,) = specifications(query(lower, upper, -0.5), CPU)
    sides = step_sides(under, specification)
    assert sides is not None
    assert sides.of_all(time.monotonic() + 300) is not None
