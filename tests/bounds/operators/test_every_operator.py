"""Every operator is asked every question: a new one that leaves an answer out, or gives a wrong one, fails by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import numpy as np
import pytest
import torch
from onnx_models import model
from onnx_models import node as onnx_node
from torch import Tensor, nn
from torch.nn import functional

from service.bounds.capture import capture
from service.bounds.graph import BatchSize, Graph, Node, Ref, Repeated
from service.bounds.graph_module import function_of
from service.bounds.interval import Interval
from service.bounds.onnx import load
from service.bounds.operators import LINEAR, NONLINEAR, OPERATORS, by_overload
from service.bounds.operators.base import Operator
from service.bounds.operators.elementary import Tanh
from service.bounds.operators.sharding import Cut, Whole
from service.bounds.operators.smooth import SmoothActivation
from service.bounds.rank_group import RankGroup

Function = Callable[[Tensor], Tensor]
DOUBLE = torch.float64
RANKS, BOXES, POINTS = 2, 6, 200
BY_NAME = {type(operator).__name__: operator for operator in OPERATORS.values()}
draw = torch.Generator().manual_seed(5)
MATRIX, SQUARE, VECTOR = (torch.randn(*shape, generator=draw, dtype=DOUBLE) for shape in ((6, 4), (4, 4), (4,)))
KERNEL = torch.randn(4, 4, 3, generator=draw, dtype=DOUBLE)
EXAMPLES: dict[str, Function] = {
    "Reshape": lambda x: x.reshape(-1, 2, 8),
    "Slice": lambda x: x[:, :, 1:3],
    "Linear": lambda x: functional.linear(x, MATRIX, MATRIX[:, 0]),
    "AddMatrixProduct": lambda x: torch.addmm(VECTOR, x[:, 0], SQUARE),
    "TwoDimensionalProduct": lambda x: torch.mm(x[:, 0], SQUARE),
    "MatrixProduct": lambda x: torch.matmul(x, SQUARE),
    "MatrixFromLeft": lambda x: torch.matmul(SQUARE, x),
    "MatrixOfTwo": lambda x: torch.matmul(x, x.sin()),
    "Convolution": lambda x: functional.conv1d(x, KERNEL, VECTOR, padding=1),
    "Addition": lambda x: torch.add(x, x.sin(), alpha=3),
    "Subtraction": lambda x: x - VECTOR,
    "Negation": lambda x: -x,
    "Multiple": lambda x: x * VECTOR,
    "Quotient": lambda x: x / VECTOR,
    "Product": lambda x: x * x.sin(),
    "Sum": lambda x: x.sum(dim=1),
    "Mean": lambda x: x.mean(dim=-1, keepdim=True),
    "Where": lambda x: torch.where(SQUARE > 0, x, VECTOR),
    "Relu": torch.relu,
    "LeakyRelu": lambda x: functional.leaky_relu(x, 0.1),
    "Absolute": torch.abs,
    "Floor": torch.floor,
    "Maximum": lambda x: torch.maximum(x, x.sin()),
    "UndecidedWhere": lambda x: torch.where(x > 0, x.sin(), VECTOR),
    "NumberTest": lambda x: torch.where(torch.isnan(x), x, 2 * x),
    "Tanh": torch.tanh,
    "Sigmoid": torch.sigmoid,
    "ArcTangent": torch.atan,
    "InverseHyperbolicSine": torch.asinh,
    "Gelu": functional.gelu,
    "Elu": lambda x: functional.elu(x, 0.7),
    "Mish": functional.mish,
    "Silu": functional.silu,
    "HardSwish": functional.hardswish,
    "Softplus": lambda x: functional.softplus(x, 2.0),
    "Exponential": torch.exp,
    "Logarithm": torch.log,
    "ErrorFunction": torch.erf,
    "Sine": torch.sin,
    "Cosine": torch.cos,
    "Power": lambda x: x**3,
    "SquareRoot": torch.sqrt,
    "ReciprocalSquareRoot": torch.rsqrt,
    "Reciprocal": torch.reciprocal,
    "Permute": lambda x: x.permute(0, 2, 1),
    "Expand": lambda x: x.unsqueeze(1).expand(-1, 3, 4, 4),
    "Select": lambda x: x.index_select(2, torch.tensor([3, 0, 3])),
    "Concatenate": lambda x: torch.cat([x, x.sin()], dim=1),
    "Pad": lambda x: functional.pad(x, (1, 2), value=0.5),
}
"""Of instances ``(4, 4)``: the operator is first met here."""
COLLECTIVES: dict[str, dict[str, Any]] = {
    "CopyToGroup": {},
    "ReduceFromGroup": {},
    "GatherFromGroup": {"dim": -1},
    "ScatterToGroup": {"dim": -1},
    "GatherWithReduce": {"dim": -1},
    "ReduceScatter": {"dim": -1},
}
"""Their arguments; of one rank each is the identity."""
POSITIVE = {"Logarithm", "SquareRoot", "ReciprocalSquareRoot", "Reciprocal"}
SHARDED = {
    *("Addition", "Subtraction", "Negation", "Multiple", "Quotient", "Product", "Where", "Sum", "Mean"),
    *("Reshape", "Permute", "Slice", "Select", "Pad"),
    *(type(operator).__name__ for operator in NONLINEAR.values()),
} - {"MatrixOfTwo"}
"""Those that go on with a value that is divided, along some dimension; a layer may be divided itself."""


class Together(nn.Module):
    """All examples side by side: tracing takes far longer than what is asked."""

    def forward(self, x: Tensor) -> Tensor:
        found = [example(x.exp() if name in POSITIVE else x) for name, example in EXAMPLES.items()]
        return torch.cat([each.flatten(1) for each in found], dim=1)


@cache
def traced() -> Graph:
    module = Together()
    module.register_buffer("type_of_all", torch.empty(0, dtype=DOUBLE))
    return capture(module, (4, 4))


@dataclass(frozen=True, eq=False)
class Case:
    """An operator in one of its nodes, on ``boxes`` and points in them, one tensor for each input."""

    operator: Operator
    node: Node
    boxes: tuple[Interval, ...]
    points: tuple[Tensor, ...]

    @cached_property
    def values(self) -> Tensor:
        """``(points, boxes, *shape)``."""
        flat = [each.flatten(0, 1) for each in self.points]
        return evaluated(self.node, flat).reshape(POINTS, BOXES, *self.node.shape)


def node_of(name: str) -> Node:
    if name in COLLECTIVES:
        (overload,) = BY_NAME[name].overloads
        return Node("y", overload, {"x": Ref("x"), "group": "", **COLLECTIVES[name]}, (4, 4), ((4, 4),))
    return next(node for node in traced().nodes if node.operator in BY_NAME[name].overloads)


def case_of(name: str) -> Case:
    node, generator = node_of(name), torch.Generator().manual_seed(7)
    widths = torch.tensor([0.0, 1e-3, 0.3, 1.0, 3.0, 8.0], dtype=DOUBLE)
    boxes, points = [], []
    for shape in node.input_shapes:
        ends = (BOXES, *(1 for _ in shape))
        centre = torch.randn(BOXES, *shape, generator=generator, dtype=DOUBLE)
        radius = widths.reshape(ends) * torch.rand(BOXES, *shape, generator=generator, dtype=DOUBLE)
        lower = centre.abs() + 0.05 if name in POSITIVE else centre - radius
        boxes.append(Interval(lower, lower + 2 * radius))
        share = torch.rand(POINTS, BOXES, *shape, generator=generator, dtype=DOUBLE)
        share[: POINTS // 4] = share[: POINTS // 4].round()
        points.append((lower + share * 2 * radius).clamp(boxes[-1].lower, boxes[-1].upper))
    if name == "Maximum":  # its first input is the difference of the others
        (_, left, right), (_, *operands) = boxes, points
        boxes[0], points[0] = Interval(left.lower - right.upper, left.upper - right.lower), operands[0] - operands[1]
    return Case(BY_NAME[name], node, tuple(boxes), tuple(points))


def evaluated(node: Node, inputs: list[Tensor]) -> Tensor:
    """The node's value, ``(batch, *shape)``."""
    if node.operator.startswith("trivet.") and "group" in node.operator:
        return inputs[0]
    remaining, batch = iter(inputs), len(inputs[0])

    def put_in(value: Any) -> Any:
        if isinstance(value, Ref):
            return next(remaining)
        if isinstance(value, BatchSize):
            return batch
        if isinstance(value, Repeated):
            return value.value.expand(batch, *value.value.shape[1:])
        return [put_in(each) for each in value] if isinstance(value, tuple) else value

    found: Tensor = function_of(node)(**{name: put_in(value) for name, value in node.arguments.items()})
    return found


@pytest.fixture(scope="module", params=sorted(BY_NAME))
def case(request: pytest.FixtureRequest) -> Case:
    return case_of(request.param)


def test_there_is_an_example_of_every_operator() -> None:
    assert {*EXAMPLES, *COLLECTIVES} == BY_NAME.keys()


def test_what_an_operator_leaves_out_is_named_when_it_is_registered() -> None:
    class Forgotten(Tanh):
        pass

    class Unnamed(SmoothActivation):
        pass

    with pytest.raises(TypeError, match=r"Tanh and Forgotten both stand for aten\.tanh\.default"):
        by_overload(Tanh(), Forgotten())
    with pytest.raises(TypeError, match=r"Unnamed does not declare overloads"):
        by_overload(Tanh(), Unnamed())


def test_every_operator_is_linear_or_is_relaxed() -> None:
    assert LINEAR.keys() | NONLINEAR.keys() == OPERATORS.keys()
    assert not LINEAR.keys() & NONLINEAR.keys()


def test_no_value_leaves_the_interval(case: Case) -> None:
    slack = 1e-12 * (1 + case.values.abs())
    for propagate in (case.operator.interval, case.operator.rigorous_interval):
        found = propagate(case.node, case.boxes, RankGroup())
        assert bool((case.values >= found.lower - slack).all())
        assert bool((case.values <= found.upper + slack).all())


def test_the_rigorous_interval_is_no_tighter(case: Case) -> None:
    plain = case.operator.interval(case.node, case.boxes, RankGroup())
    moved = case.operator.rigorous_interval(case.node, case.boxes, RankGroup())
    slack = 1e-13 * (1 + plain.lower.abs() + plain.upper.abs())
    assert bool((moved.lower <= plain.lower + slack).all())
    assert bool((moved.upper >= plain.upper - slack).all())


def rows_for(node: Node) -> Tensor:
    return torch.randn(BOXES, 5, *node.shape, generator=torch.Generator().manual_seed(9), dtype=DOUBLE)


def through(case: Case, propagated: tuple[Any, ...], bias: Tensor | None) -> Tensor:
    """Values ``(points, boxes, rows)`` of coefficients on the inputs."""
    pairs = zip(propagated, case.points, strict=True)
    terms = [torch.einsum("brn,pbn->pbr", a.expand(BOXES, *a.shape[1:]).flatten(2), x.flatten(2)) for a, x in pairs]
    total: Tensor = sum(terms[1:], start=terms[0])
    return total if bias is None else total + bias


def of_rows(case: Case, rows: Tensor) -> Tensor:
    return torch.einsum("brn,pbn->pbr", rows.flatten(2), case.values.flatten(2))


def test_linear_bounds_hold(case: Case) -> None:
    """Those of a linear operator are its value; so are they with the allowance for rounding, which is small."""
    rows = rows_for(case.node)
    exact, linear = of_rows(case, rows), LINEAR.get(case.node.operator)
    slack = 1e-10 * (1 + exact.abs())
    if linear is not None:
        propagated = linear.backward(case.node, rows, RankGroup())
        assert bool(((through(case, propagated.coefficients, propagated.bias) - exact).abs() <= slack).all())
        step = linear.rigorous_step(case.node, case.boxes, RankGroup())
        assert bool((step.error >= 0).all())
        assert bool((step.error < 1e-9).all())
        return
    nonlinear = NONLINEAR[case.node.operator]
    plain = nonlinear.relax_on(case.node, case.boxes)
    family = nonlinear.family(case.node, case.boxes)
    chosen = tuple(torch.rand_like(start).unsqueeze(1).expand(-1, 5, *start.shape[1:]) for start in family.start)
    step = nonlinear.rigorous_step(case.node, case.boxes, plain)
    assert step.relaxed is not None
    for relaxed in (plain, family.member(chosen), step.relaxed):
        propagated, bias = relaxed.backward(rows)
        assert bool((through(case, propagated, bias) <= exact + slack).all())


def test_a_split_at_the_breakpoint_leaves_nothing_to_relax(case: Case) -> None:
    """Lower and upper bounds are the same, and are the piece that the operator names."""
    nonlinear = NONLINEAR.get(case.node.operator)
    breakpoint_ = None if nonlinear is None else nonlinear.breakpoint(case.node, 0)
    if nonlinear is None or breakpoint_ is None:
        return
    at, ones = torch.full_like(case.boxes[0].lower, breakpoint_), torch.ones(BOXES, 1, *case.node.shape, dtype=DOUBLE)
    for half, above in ((Interval(at - 2, at), False), (Interval(at, at + 3), True)):
        # Operands that overlap, so that only the half tells which piece it is.
        bounds = [half, *(Interval(each.lower - 20, each.upper + 20) for each in case.boxes[1:])]
        assert not bool(nonlinear.unstable_on(case.node, bounds)[0].any())
        relaxed = nonlinear.relax_on(case.node, bounds)
        (least, below), (most, over) = relaxed.backward(ones), relaxed.backward(-ones)
        for first, second in zip(least, most, strict=True):
            assert torch.equal(first, -second)
        assert below is None or not bool((below + over).any())
        inputs = [each.centre for each in bounds]
        value = nonlinear.piece(case.node, inputs, torch.full_like(at, above, dtype=torch.bool))
        sums = [(onto[:, 0] * x).flatten(1).sum(dim=1) for onto, x in zip(least, inputs, strict=True)]
        torch.testing.assert_close(sum(sums), value.flatten(1).sum(dim=1))


def test_each_rank_computes_its_part(case: Case) -> None:
    """Along every dimension the operator divides the value, and ranks have its parts, or says why not."""
    node, divided = case.node, False
    smallest = min(len(shape) for shape in node.input_shapes)
    for from_the_end in range(1, smallest + 1):
        if any(shape[-from_the_end] % RANKS for shape in node.input_shapes):
            continue
        cuts = {
            name: Cut(len(shape) - from_the_end, shape[-from_the_end], shape[-from_the_end] // RANKS)
            for name, shape in zip(node.inputs, node.input_shapes, strict=True)
        }
        cut = case.operator.shard(node, cuts, RANKS)
        if isinstance(cut, Whole):
            assert cut.because
            continue
        divided = True
        parts = [part_of(case, cuts, cut, rank) for rank in range(RANKS)]
        whole = case.values.flatten(0, 1)
        torch.testing.assert_close(torch.cat(parts, dim=cut.dim + 1), whole, rtol=1e-12, atol=1e-12)
    assert divided == (type(case.operator).__name__ in SHARDED)


def part_of(case: Case, cuts: dict[str, Cut], cut: Cut, rank: int) -> Tensor:
    node, inputs = case.node, [each.flatten(0, 1) for each in case.points]

    def share(constant: Tensor, dim: int, cut: Cut, padding: float) -> Tensor:
        return constant.narrow(dim, rank * cut.share, cut.share)

    shapes = tuple(cuts[name].local(shape) for name, shape in zip(node.inputs, node.input_shapes, strict=True))
    local = replace(
        node,
        arguments=case.operator.local_arguments(node, cut, share),
        shape=cut.local(node.shape),
        input_shapes=shapes,
    )
    own = [
        each.narrow(cuts[name].dim + 1, rank * cuts[name].share, cuts[name].share)
        for name, each in zip(node.inputs, inputs, strict=True)
    ]
    return evaluated(local, own)


CONSTANTS: dict[str, dict[str, Any]] = {
    "Pow": {"c": np.float32(3.0)},
    "Where": {"c": (SQUARE > 0).numpy(), "d": VECTOR.float().numpy()},
    **{name: {"c": VECTOR.float().numpy()} for name in ("Add", "Sum", "Sub", "Mul", "Div", "Max")},
}
"""Of the ONNX operators of more than one input: those besides ``x``."""
ONNX = sorted((name, converted) for name, operator in BY_NAME.items() for converted in operator.onnx)


def test_onnx_operators_become_these() -> None:
    """``load`` compares them with onnxruntime."""
    nodes, constants = [onnx_node("Exp", ["x"], "e")], {}
    for name, converted in ONNX:
        own = {f"{converted}_{key}": value for key, value in CONSTANTS.get(converted, {}).items()}
        inputs = ["e" if name in POSITIVE else "x", *own]
        constants |= own
        order = [1, 0, 2] if converted == "Where" else range(len(inputs))
        nodes.append(onnx_node(converted, [inputs[index] for index in order], f"{converted}_y"))
    outputs = [f"{converted}_y" for _, converted in ONNX]
    loaded = load(model(nodes, [1, 4, 4], constants, outputs, opset=20))
    met = {type(OPERATORS[node.operator]).__name__ for node in capture(loaded, (16,)).nodes[1:]}
    assert {name for name, _ in ONNX} <= met
