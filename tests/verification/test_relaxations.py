"""Every relaxation holds on its interval: random, degenerate, huge and infinite ones, in both precisions."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import erfc
from torch import Tensor
from torch.nn import functional

from service.bounds.exchange import Exchange
from service.bounds.graph import Node, Ref
from service.bounds.interval import Interval
from service.bounds.rules import RULES
from service.bounds.rules.base import NonlinearRule
from service.bounds.rules.parametric import Parametric
from service.bounds.rules.smooth import Smooth


def exact_gelu(z: Tensor) -> Tensor:
    """By SciPy: torch's own GELU and normal distribution lose digits in the lower tail."""
    return z * torch.from_numpy(erfc(-z.numpy() / sqrt(2))) / 2


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
}
ROUNDING = {torch.float64: 1e-13, torch.float32: 2e-6}
NOTHING = {torch.float64: 1e-20, torch.float32: 1e-12}
EDGE_CASES = [
    (0.0, 0.0), (-1.0, 0.0), (0.0, 1.0), (1.0, 1.0), (-1.0, -1.0), (-1e-30, 1e-30), (1.0, 1.0 + 1e-7),
    (-0.0, 0.0), (-1.0, 1.0), (-1e-3, 30.0), (-30.0, 1e-3), (-5.0, 5.0), (-1.5, -1.3), (-0.76, -0.75), (1.3, 1.5),
    (-60.0, 2.0), (-2.0, 60.0),
]  # fmt: skip
HUGE = [(-1e30, 1e30), (-3e38, 3e38), (1e30, 3e38), (-3e38, -1e30), (-1e30, 1.0), (-1.0, 1e30)]


def node_of(operator: str) -> Node:
    return Node("f", operator, {"self": Ref("z"), **FUNCTIONS[operator][1]}, (1,), ((1,),))


def rule_of(operator: str) -> NonlinearRule:
    rule = RULES[operator]
    assert isinstance(rule, NonlinearRule)
    return rule


def check(operator: str, ends: list[tuple[float, float]], dtype: torch.dtype, may_give_up: bool = False) -> None:
    """Lines and interval against the function on a grid, judged in float64 from the very ends that were used."""
    function = FUNCTIONS[operator][0]
    tensor = torch.tensor(ends, dtype=dtype)
    bounds = Interval(tensor[:, :1], tensor[:, 1:])
    relaxation = rule_of(operator).relax(node_of(operator), bounds)
    image = rule_of(operator).interval(node_of(operator), [bounds], Exchange())
    steps = torch.linspace(0, 1, 801, dtype=torch.float64)
    grid = bounds.lower.double() * (1 - steps) + bounds.upper.double() * steps
    grid = grid.clamp(bounds.lower.double(), bounds.upper.double())
    values = function(grid)
    zero = torch.zeros_like(bounds.lower)
    lower_line = grid * relaxation.lower_slope.double() + (
        zero if relaxation.lower_intercept is None else relaxation.lower_intercept
    )
    upper_line = grid * relaxation.upper_slope.double() + (
        zero if relaxation.upper_intercept is None else relaxation.upper_intercept
    )
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
@settings(max_examples=40, deadline=None)
@given(ends=st.lists(ends_between, min_size=1, max_size=12))
def test_random_intervals(operator: str, dtype: torch.dtype, ends: list[tuple[float, float]]) -> None:
    check(operator, ends, dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("operator", FUNCTIONS)
def test_degenerate_intervals(operator: str, dtype: torch.dtype) -> None:
    check(operator, EDGE_CASES, dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("operator", [name for name in FUNCTIONS if "exp" not in name and "pow" not in name])
def test_huge_intervals(operator: str, dtype: torch.dtype) -> None:
    check(operator, HUGE, dtype, may_give_up=operator in {"aten.gelu.default", "aten.silu.default"})


@pytest.mark.parametrize("ends", [(-torch.inf, 2.0), (-1.0, torch.inf), (-torch.inf, torch.inf)])
@pytest.mark.parametrize("operator", FUNCTIONS)
def test_an_infinite_interval_gives_a_true_line_or_none(operator: str, ends: tuple[float, float]) -> None:
    bounds = Interval(torch.tensor([[ends[0]]]), torch.tensor([[ends[1]]]))
    relaxation = rule_of(operator).relax(node_of(operator), bounds)
    points = torch.linspace(max(ends[0], -50), min(ends[1], 50), 201, dtype=torch.float64)
    values = FUNCTIONS[operator][0](points)
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
    rule = RULES[name]
    rule = rule.smooth(node_of(name)) if isinstance(rule, Parametric) else rule
    assert isinstance(rule, Smooth)
    bounds = Interval(*(torch.tensor([[end]], dtype=torch.float64) for end in ends))
    lower, upper = (torch.full_like(bounds.lower, slope) for slope in slopes)
    relaxation = rule.with_slopes(bounds, lower, upper)
    grid = torch.linspace(ends[0], ends[1], 801, dtype=torch.float64)
    values = FUNCTIONS[name][0](grid)
    slack = 1e-12 * (values.abs().max() + 3 * grid.abs().max() + 1e-300)
    assert relaxation.lower_intercept is not None
    assert relaxation.upper_intercept is not None
    lower_line, upper_line = (
        grid * slopes[0] + relaxation.lower_intercept,
        grid * slopes[1] + relaxation.upper_intercept,
    )
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
    relaxation = rule_of(name).relax(node_of(name), bounds)
    middle = bounds.centre
    assert relaxation.lower_intercept is not None
    assert relaxation.upper_intercept is not None
    gap = (relaxation.upper_slope - relaxation.lower_slope) * middle
    gap = gap + relaxation.upper_intercept - relaxation.lower_intercept
    assert 0 <= gap.item() <= widest


def test_relu_takes_the_published_slopes() -> None:
    bounds = Interval(torch.tensor([[-1.0, -3.0, 1.0, -2.0, -1.0]]), torch.tensor([[3.0, 1.0, 2.0, -1.0, 1.0]]))
    relaxation = rule_of("aten.relu.default").relax(node_of("aten.relu.default"), bounds)
    assert relaxation.lower_slope.tolist() == [[1.0, 0.0, 1.0, 0.0, 0.0]]
    assert relaxation.upper_slope.tolist() == [[0.75, 0.25, 1.0, 0.0, 0.5]]
    assert relaxation.upper_intercept is not None
    assert relaxation.upper_intercept.tolist() == [[0.75, 0.75, 0.0, 0.0, 0.5]]


@pytest.mark.parametrize("slope", [-0.1, 1.5])
def test_leaky_relu_of_another_shape_is_refused(slope: float) -> None:
    node = Node("f", "aten.leaky_relu.default", {"self": Ref("z"), "negative_slope": slope}, (1,), ((1,),))
    assert f"negative_slope {slope}" in (RULES[node.operator].refusal(node) or "")


def test_another_form_of_gelu_is_refused() -> None:
    node = Node("f", "aten.gelu.default", {"self": Ref("z"), "approximate": "sigmoid"}, (1,), ((1,),))
    assert "approximate='sigmoid'" in (RULES[node.operator].refusal(node) or "")
