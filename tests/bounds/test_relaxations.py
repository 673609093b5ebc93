"""Every relaxation holds on its interval: random, degenerate, huge and infinite ones, in both precisions."""

from __future__ import annotations

from collections.abc import Callable
from math import pi, sqrt

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lanes import examples
from scipy.special import erfc
from torch import Tensor
from torch.nn import functional

from service.bounds.graph import Node, Ref
from service.bounds.interval import Interval
from service.bounds.operators import OPERATORS
from service.bounds.operators.elementary import Tanh
from service.bounds.operators.elementwise import Activation
from service.bounds.operators.rectifiers import Gelu
from service.bounds.operators.relu import Relu
from service.bounds.operators.sin import Periodic, Sine
from service.bounds.operators.smooth import SmoothActivation
from service.bounds.rank_group import RankGroup
from service.bounds.relaxation import Relaxation


def exact_gelu(z: Tensor) -> Tensor:
    """By SciPy: torch's own GELU and normal distribution lose digits in the lower tail."""
    return z * torch.from_numpy(erfc(-z.numpy() / sqrt(2))) / 2


def gelu_of_tanh_form(z: Tensor) -> Tensor:
    """Torch's own, ``1 + tanh``, loses all digits in the lower tail."""
    return z * torch.sigmoid(2 * sqrt(2 / pi) * (z + 0.044715 * z**3))


SELU_ALPHA, SELU_SCALE = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946
PARTIAL: dict[str, tuple[Callable[[Tensor], Tensor], dict[str, object]]] = {
    "aten.log.default": (torch.log, {}),
    "aten.sqrt.default": (torch.sqrt, {}),
    "aten.rsqrt.default": (torch.rsqrt, {}),
    "aten.reciprocal.default": (torch.reciprocal, {}),
    "broken pow": (lambda z: z**1.5, {"exponent": 1.5}),
    "small pow": (lambda z: z**0.2, {"exponent": 0.2}),
    "inverse pow": (lambda z: z**-2, {"exponent": -2}),
}
"""Defined for positive numbers, some for 0 too."""
OVERLOADS = {"tanh form": "aten.gelu.default", "selu": "aten.elu.default"}
FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], dict[str, object]]] = {
    "aten.relu.default": (torch.relu, {}),
    "aten.leaky_relu.default": (lambda z: functional.leaky_relu(z, 0.2), {"negative_slope": 0.2}),
    "aten.tanh.default": (torch.tanh, {}),
    "aten.sigmoid.default": (torch.sigmoid, {}),
    "aten.gelu.default": (exact_gelu, {"approximate": "none"}),
    "aten.exp.default": (torch.exp, {}),
    "aten.silu.default": (lambda z: z * torch.sigmoid(z), {}),
    "aten.erf.default": (torch.erf, {}),
    "aten.sin.default": (torch.sin, {}),
    "aten.cos.default": (torch.cos, {}),
    "aten.abs.default": (torch.abs, {}),
    "aten.floor.default": (torch.floor, {}),
    "aten.pow.Tensor_Scalar": (lambda z: z**3, {"exponent": 3}),
    "square, as a pow": (lambda z: z**2, {"exponent": 2}),
    "fourth pow": (lambda z: z**4, {"exponent": 4}),
    "tanh form": (gelu_of_tanh_form, {"approximate": "tanh"}),
    "aten.atan.default": (torch.atan, {}),
    "aten.mish.default": (functional.mish, {}),
    "aten.hardswish.default": (functional.hardswish, {}),
    "aten.elu.default": (functional.elu, {"alpha": 1.0, "scale": 1.0, "input_scale": 1.0}),
    "selu": (functional.selu, {"alpha": SELU_ALPHA, "scale": SELU_SCALE, "input_scale": 1.0}),
    "aten.softplus.default": (lambda z: functional.softplus(z, 2.0, 700.0), {"beta": 2.0, "threshold": 700.0}),
}
ROUNDING = {torch.float64: 1e-13, torch.float32: 2e-6}
NOTHING = {torch.float64: 1e-20, torch.float32: 1e-12}
EDGE_CASES = [
    (0.0, 0.0), (-1.0, 0.0), (0.0, 1.0), (1.0, 1.0), (-1.0, -1.0), (-1e-30, 1e-30), (1.0, 1.0 + 1e-7),
    (-0.0, 0.0), (-1.0, 1.0), (-1e-3, 30.0), (-30.0, 1e-3), (-5.0, 5.0), (-1.5, -1.3), (-0.76, -0.75), (1.3, 1.5),
    (-60.0, 2.0), (-2.0, 60.0),
]  # fmt: skip
GIVE_UP = {"aten.gelu.default", "tanh form", "aten.silu.default", "aten.softplus.default", "aten.mish.default"}
"""Overflow within may leave them without a line on huge intervals."""
HUGE = [(-1e30, 1e30), (-3e38, 3e38), (1e30, 3e38), (-3e38, -1e30), (-1e30, 1.0), (-1.0, 1e30)]


def node_of(name: str) -> Node:
    operator = OVERLOADS.get(name, "aten.pow.Tensor_Scalar" if "pow" in name else name)
    return Node("f", operator, {"self": Ref("z"), **function_of(name)[1]}, (1,), ((1,),))


def function_of(name: str) -> tuple[Callable[[Tensor], Tensor], dict[str, object]]:
    return FUNCTIONS[name] if name in FUNCTIONS else PARTIAL[name]


def operator_of(name: str) -> Activation:
    rule = OPERATORS[node_of(name).operator]
    assert isinstance(rule, Activation)
    return rule


def is_smooth(name: str) -> bool:
    return isinstance(operator_of(name), SmoothActivation | Periodic)


def check(operator: str, ends: list[tuple[float, float]], dtype: torch.dtype, may_give_up: bool = False) -> None:
    """Lines and interval against the function on a grid, judged in float64 from the very ends that were used."""
    function = function_of(operator)[0]
    tensor = torch.tensor(ends, dtype=dtype)
    bounds = Interval(tensor[:, :1], tensor[:, 1:])
    relaxation = operator_of(operator).relax(node_of(operator), bounds)
    image = operator_of(operator).interval(node_of(operator), [bounds], RankGroup())
    steps = torch.linspace(0, 1, 801, dtype=torch.float64)
    grid = bounds.lower.double() * (1 - steps) + bounds.upper.double() * steps
    grid = grid.clamp(bounds.lower.double(), bounds.upper.double())
    values = function(grid)
    intercepts = (relaxation.lower_intercept, relaxation.upper_intercept)
    low, high = (torch.zeros_like(bounds.lower) if each is None else each for each in intercepts)
    lower_line = grid * relaxation.lower_slope.double() + low
    upper_line = grid * relaxation.upper_slope.double() + high
    slopes = relaxation.lower_slope.abs() + relaxation.upper_slope.abs()
    scale = values.abs().amax(dim=1, keepdim=True) + (slopes * bounds.lower.abs().maximum(bounds.upper.abs())).double()
    slack = ROUNDING[dtype] * scale + NOTHING[dtype]
    if may_give_up:  # not-a-number is no line; a pass takes it for an infinite bound
        lower_line, upper_line = lower_line.nan_to_num(-torch.inf), upper_line.nan_to_num(torch.inf)
    assert (lower_line <= values + slack).all(), (operator, ends, (lower_line - values - slack).amax(dim=1))
    assert (upper_line >= values - slack).all(), (operator, ends, (values - slack - upper_line).amax(dim=1))
    assert (image.lower <= values + slack).all(), (operator, ends)
    assert (image.upper >= values - slack).all(), (operator, ends)


ends_between = st.tuples(
    st.floats(-20, 20), st.one_of(st.just(0.0), st.floats(1e-12, 1e-3), st.floats(0, 1), st.floats(0, 40))
).map(lambda pair: (pair[0], pair[0] + pair[1]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("operator", FUNCTIONS)
@settings(max_examples=examples(5, 20), deadline=None)
@given(ends=st.lists(ends_between, min_size=1, max_size=24))
def test_random_intervals(operator: str, dtype: torch.dtype, ends: list[tuple[float, float]]) -> None:
    check(operator, ends, dtype)


positive_ends = st.tuples(st.floats(1e-3, 20), st.one_of(st.just(0.0), st.floats(1e-12, 1e-3), st.floats(0, 30))).map(
    lambda pair: (pair[0], pair[0] + pair[1])
)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("operator", PARTIAL)
@settings(max_examples=examples(5, 10), deadline=None)
@given(ends=st.lists(positive_ends, min_size=1, max_size=24))
def test_random_intervals_of_positive_numbers(
    operator: str, dtype: torch.dtype, ends: list[tuple[float, float]]
) -> None:
    check(operator, ends, dtype)


def sound_members(name: str, ends: list[tuple[float, float]], places: list[float], dtype: torch.dtype) -> None:
    """Lines at any parameters of a family, one row for each, against the function on a grid."""
    tensor = torch.tensor(ends, dtype=dtype)
    bounds = Interval(tensor[:, :1], tensor[:, 1:])
    family = operator_of(name).family(node_of(name), [bounds])
    parameters = tuple(
        torch.tensor(places, dtype=dtype).reshape(1, -1, *[1] * (each.ndim - 1)).expand(len(ends), -1, *each.shape[1:])
        for each in family.start
    )
    member = family.member(parameters)
    grid = torch.linspace(0, 1, 301, dtype=torch.float64)
    points = (bounds.lower.double() * (1 - grid) + bounds.upper.double() * grid)[:, None]
    points = points.clamp(bounds.lower.double()[:, None], bounds.upper.double()[:, None])
    values = function_of(name)[0](points)
    for sign in (1, -1):
        (slope,), intercept = member.backward(torch.full((1, len(places), 1), float(sign), dtype=dtype))
        bias = torch.zeros(()) if intercept is None else intercept.double().unsqueeze(2)
        line = points * slope.double() + bias
        reach = torch.maximum(bounds.lower.abs(), bounds.upper.abs()).double()[:, None]
        scale = values.abs().amax(dim=2, keepdim=True) + slope.abs().double() * reach
        above = line - sign * values - (ROUNDING[dtype] * scale + NOTHING[dtype])
        assert (above <= 0).all(), (name, sign, above.amax(dim=2))


POLES = ["aten.log.default", "aten.rsqrt.default", "aten.reciprocal.default", "inverse pow"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", POLES)
def test_lines_next_to_a_pole_are_as_tight_as_far_from_it(name: str, dtype: torch.dtype) -> None:
    """The rounding error of the largest value is not that of the others: each point is held to its own size."""
    ends = [(1e-18, 2.0), (1e-12, 2.0), (1e-6, 0.5), (1e-3, 2.0), (1e-15, 1e-3)]
    tensor, function = torch.tensor(ends, dtype=dtype), function_of(name)[0]
    bounds = Interval(tensor[:, :1], tensor[:, 1:])
    lines = operator_of(name).relax(node_of(name), bounds)
    assert lines.lower_intercept is not None
    assert lines.upper_intercept is not None
    z = torch.cat(
        [bounds.lower, bounds.lower + torch.linspace(1e-4, 1, 64, dtype=dtype) * bounds.width], dim=1
    ).double()
    z, values = z.clamp(bounds.lower.double(), bounds.upper.double()), function(z)
    below = lines.lower_slope.double() * z + lines.lower_intercept.double()
    above = lines.upper_slope.double() * z + lines.upper_intercept.double()
    size = values.abs() + (lines.lower_slope.abs().double() + lines.upper_slope.abs().double()) * z
    assert bool((below <= values + ROUNDING[dtype] * size).all())
    assert bool((above >= values - ROUNDING[dtype] * size).all())
    touching = above - values if name == "aten.log.default" else values - below
    assert bool((touching[:, 32] <= 0.15 * (1 + values[:, 32].abs())).all())


@pytest.mark.parametrize("name", POLES)
def test_tangents_next_to_a_pole_are_numbers(name: str) -> None:
    bounds = Interval(torch.tensor([[1e-38], [1e-30]]), torch.tensor([[2.0], [1e-3]]))
    bounds = bounds if name != "inverse pow" else bounds.map(torch.sqrt)
    family = operator_of(name).family(node_of(name), [bounds])
    places = torch.tensor([0.0, 0.5, 1.0]).reshape(1, 3, 1).expand(2, 3, 1).clone().requires_grad_()
    (slope,), intercept = family.member((places,)).backward(torch.full((1, 3, 1), -1.0 if "log" in name else 1.0))
    assert intercept is not None
    (slope.sum() + intercept.sum()).backward()
    assert places.grad is not None
    assert bool(slope.isfinite().all() and intercept.isfinite().all() and places.grad.isfinite().all())


places = st.lists(st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.5, 1.0])), min_size=1, max_size=6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", FUNCTIONS)
@settings(max_examples=examples(4, 10), deadline=None)
@given(ends=st.lists(ends_between, min_size=1, max_size=12), places=places)
def test_every_member_of_a_family_is_sound(
    name: str, dtype: torch.dtype, ends: list[tuple[float, float]], places: list[float]
) -> None:
    sound_members(name, ends, places, dtype)


@pytest.mark.parametrize("name", PARTIAL)
@settings(max_examples=examples(4, 10), deadline=None)
@given(ends=st.lists(positive_ends, min_size=1, max_size=12), places=places)
def test_every_member_is_sound_on_positive_numbers(
    name: str, ends: list[tuple[float, float]], places: list[float]
) -> None:
    sound_members(name, ends, places, torch.float64)


@pytest.mark.parametrize("name", [*FUNCTIONS, *PARTIAL])
def test_a_family_starts_at_the_plain_lines(name: str) -> None:
    bounds = Interval(torch.tensor([[0.1], [0.4]]), torch.tensor([[0.9], [3.0]])).map(torch.Tensor.double)
    rule, node = operator_of(name), node_of(name)
    family, plain = rule.family(node, [bounds]), rule.relax(node, bounds)
    member = family.member(tuple(each.unsqueeze(1) for each in family.start))
    for sign in (1.0, -1.0):
        ones = torch.full((1, 1, 1), sign, dtype=torch.float64)
        middle = bounds.centre[:, 0]
        (expected,), shift = plain.backward(ones)
        (slope,), intercept = member.backward(ones)
        before = expected[:, 0, 0] * middle + (0 if shift is None else shift[:, 0])
        after = slope[:, 0, 0] * middle + (0 if intercept is None else intercept[:, 0])
        assert (after >= before - 1e-3 * (1 + before.abs())).all()


@pytest.mark.parametrize("parent", [Gelu, Tanh, Sine, Relu])
def test_an_overridden_relaxation_is_the_start_of_the_family(parent: type[Activation]) -> None:
    """One method changes what CROWN takes and where α-CROWN begins: here lines without a slope, where signs differ."""

    class Flat(parent):  # type: ignore[misc, valid-type]
        overloads = ()

        def relax(self, node: Node, bounds: Interval) -> Relaxation:
            plain, value = super().relax(node, bounds), self.interval(node, [bounds], RankGroup())
            zero = torch.zeros_like(plain.lower_slope)
            lower = None if plain.lower_intercept is None else value.lower
            return Relaxation(zero, zero, lower, value.upper)

    bounds = Interval(torch.tensor([[-2.0]]), torch.tensor([[3.0]])).map(torch.Tensor.double)
    operator, node = Flat(), node_of(parent.overloads[0])
    family = operator.family(node, [bounds])
    member = family.member(tuple(each.reshape(1, 1, -1) for each in family.start))
    for sign in (1.0, -1.0):
        rows = torch.full((1, 1, 1), sign, dtype=torch.float64)
        (slope,), bias = member.backward(rows)
        _, expected = operator.relax_on(node, [bounds]).backward(rows)
        assert slope.item() == 0
        torch.testing.assert_close(bias, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("operator", FUNCTIONS)
def test_degenerate_intervals(operator: str, dtype: torch.dtype) -> None:
    check(operator, EDGE_CASES, dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("operator", [name for name in FUNCTIONS if "exp" not in name and "pow" not in name])
def test_huge_intervals(operator: str, dtype: torch.dtype) -> None:
    check(operator, HUGE, dtype, may_give_up=operator in GIVE_UP)


@pytest.mark.parametrize("ends", [(-torch.inf, 2.0), (-1.0, torch.inf), (-torch.inf, torch.inf)])
@pytest.mark.parametrize("operator", FUNCTIONS)
def test_an_infinite_interval_gives_a_true_line_or_none(operator: str, ends: tuple[float, float]) -> None:
    bounds = Interval(torch.tensor([[ends[0]]]), torch.tensor([[ends[1]]]))
    relaxation = operator_of(operator).relax(node_of(operator), bounds)
    points = torch.linspace(max(ends[0], -50), min(ends[1], 50), 201, dtype=torch.float64)
    values = function_of(operator)[0](points)
    for slope, intercept, sign in (
        (relaxation.lower_slope, relaxation.lower_intercept, 1),
        (relaxation.upper_slope, relaxation.upper_intercept, -1),
    ):
        line = points * slope.double().item() + (0.0 if intercept is None else intercept.double().item())
        broken = sign * (line - values) > 1e-6 * (1 + values.abs())
        assert not broken.any(), (operator, sign)  # not-a-number compares false: no line, which a pass takes as -inf


@pytest.mark.parametrize("name", ["aten.tanh.default", "aten.sigmoid.default", "aten.gelu.default", "aten.exp.default"])
@settings(max_examples=30, deadline=None)
@given(ends=ends_between, slopes=st.tuples(st.floats(-3, 3), st.floats(-3, 3)))
def test_any_slope_gives_sound_lines(name: str, ends: tuple[float, float], slopes: tuple[float, float]) -> None:
    rule = OPERATORS[name]
    assert isinstance(rule, SmoothActivation)
    bounds = Interval(*(torch.tensor([[end]], dtype=torch.float64) for end in ends))
    lower, upper = (torch.full_like(bounds.lower, slope) for slope in slopes)
    relaxation = rule.smooth(node_of(name)).with_slopes(bounds, lower, upper)
    grid = torch.linspace(ends[0], ends[1], 801, dtype=torch.float64)
    values = FUNCTIONS[name][0](grid)
    slack = 1e-12 * (values.abs().max() + 3 * grid.abs().max() + 1e-300)
    assert relaxation.lower_intercept is not None
    assert relaxation.upper_intercept is not None
    lower_line = grid * slopes[0] + relaxation.lower_intercept
    upper_line = grid * slopes[1] + relaxation.upper_intercept
    assert (lower_line <= values + slack).all()
    assert (upper_line >= values - slack).all()
    touching = 1e-3 * (1 + values.abs().max() + 3 * (ends[1] - ends[0]))
    assert (values - lower_line).min() <= touching, "the line could be moved up"
    assert (upper_line - values).min() <= touching, "the line could be moved down"


@pytest.mark.parametrize(
    ("name", "ends", "widest"),
    [
        ("aten.tanh.default", (-2.0, 2.0), 1.1),
        ("aten.sigmoid.default", (-3.0, 3.0), 0.4),
        ("aten.gelu.default", (-3.0, 3.0), 1.7),
        ("aten.exp.default", (-1.0, 1.0), 0.6),
        ("aten.tanh.default", (0.5, 0.6), 0.002),
    ],
)
def test_smooth_lines_are_near_each_other(name: str, ends: tuple[float, float], widest: float) -> None:
    """Soundness alone would allow useless lines; at the middle they are as close as the envelopes, or nearly."""
    bounds = Interval(*(torch.tensor([[end]], dtype=torch.float64) for end in ends))
    relaxation = operator_of(name).relax(node_of(name), bounds)
    middle = bounds.centre
    assert relaxation.lower_intercept is not None
    assert relaxation.upper_intercept is not None
    gap = (relaxation.upper_slope - relaxation.lower_slope) * middle
    gap = gap + relaxation.upper_intercept - relaxation.lower_intercept
    assert 0 <= gap.item() <= widest


@pytest.mark.parametrize("name", [each for each in [*FUNCTIONS, *PARTIAL] if is_smooth(each)])
def test_smooth_lines_touch_the_function(name: str) -> None:
    for ends in [(0.3, 1.4), (2.0, 2.2)] if name in PARTIAL else [(-2.5, -0.5), (-4.0, 1.0), (0.3, 0.4), (-1.0, 5.0)]:
        lines = operator_of(name).relax(node_of(name), Interval(*torch.tensor(ends, dtype=torch.float64).view(2, 1, 1)))
        below, above = lines.lower_intercept, lines.upper_intercept
        assert below is not None
        assert above is not None
        z = torch.linspace(*ends, 20001, dtype=torch.float64)
        values = function_of(name)[0](z)
        assert float((values - lines.lower_slope * z - below).amin()) < 1e-6
        assert float((lines.upper_slope * z + above - values).amin()) < 1e-6


def test_relu_takes_the_published_slopes() -> None:
    bounds = Interval(torch.tensor([[-1.0, -3.0, 1.0, -2.0, -1.0]]), torch.tensor([[3.0, 1.0, 2.0, -1.0, 1.0]]))
    relaxation = operator_of("aten.relu.default").relax(node_of("aten.relu.default"), bounds)
    assert relaxation.lower_slope.tolist() == [[1.0, 0.0, 1.0, 0.0, 0.0]]
    assert relaxation.upper_slope.tolist() == [[0.75, 0.25, 1.0, 0.0, 0.5]]
    assert relaxation.upper_intercept is not None
    assert relaxation.upper_intercept.tolist() == [[0.75, 0.75, 0.0, 0.0, 0.5]]


@pytest.mark.parametrize("slope", [-0.1, 1.5])
def test_leaky_relu_of_another_shape_is_refused(slope: float) -> None:
    node = Node("f", "aten.leaky_relu.default", {"self": Ref("z"), "negative_slope": slope}, (1,), ((1,),))
    assert f"negative_slope {slope}" in (OPERATORS[node.operator].refusal(node) or "")


def test_another_form_of_gelu_is_refused() -> None:
    node = Node("f", "aten.gelu.default", {"self": Ref("z"), "approximate": "sigmoid"}, (1,), ((1,),))
    assert "approximate='sigmoid'" in (OPERATORS[node.operator].refusal(node) or "")
