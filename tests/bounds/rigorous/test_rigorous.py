"""Rigorous bounds against exact arithmetic: rational numbers for ReLU networks, many digits for smooth functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lanes import examples
from nets import ball_around, box_around, mlp, output_bounds, prepared, samples, tokens, transformer
from operator_groups import blame, made
from rigorous_problems import DOUBLE, both_sides, cancelling, check_exactly, corners, exactly, rigorous_lower_bounds
from torch import Tensor, nn

from service.bounds.graph import FLOOR_OF_SIGNED, Node, Ref
from service.bounds.interval import Interval
from service.bounds.linear.propagation import Propagated
from service.bounds.methods import METHODS, BoundOptions
from service.bounds.operators import OPERATORS
from service.bounds.operators.allowance import lines_step
from service.bounds.operators.base import LinearOperator
from service.bounds.operators.elementwise import Activation
from service.bounds.operators.smooth import SmoothActivation
from service.bounds.optimise import Ascent
from service.bounds.rank_group import RankGroup
from service.bounds.relaxation import Lines, Relaxation
from service.bounds.rigorous import rigorous_alpha_crown, rigorous_crown
from service.bounds.rigorous.method import OptimisedLowerBounds
from service.models.transformer import AfterEmbedding, embedded

mpmath.mp.dps = 60


@settings(max_examples=examples(2, 25), deadline=None)
@given(seed=st.integers(0, 2**31), radius=st.sampled_from([0.0, 1e-12, 1e-3, 0.3]))
def test_no_rational_value_leaves_the_bounds(seed: int, radius: float) -> None:
    net, _, network = cancelling(seed % 4)
    generator = torch.Generator().manual_seed(seed)
    centre = torch.randn(1, 4, generator=generator, dtype=DOUBLE)
    box = Interval(centre - radius, centre + radius)
    check_exactly(net, corners(box, 3, seed), rigorous_lower_bounds(network, box, both_sides(2)))


def test_plain_bounds_are_passed_by_an_exact_value_and_rigorous_ones_are_not() -> None:
    """Both of the plain ones, in float32 and in float64; the box is a point and the weights the same numbers."""
    passed = {torch.float32: 0, DOUBLE: 0}
    for seed in range(8):
        net, single, double = cancelling(seed % 4)
        x = torch.randn(1, 4, generator=torch.Generator().manual_seed(seed))
        box = Interval(x.double(), x.double())
        plain32 = output_bounds(single, Interval(x, x), "crown").lower[0].tolist()
        plain64 = output_bounds(double, box, "crown").lower[0].tolist()
        rigorous = rigorous_lower_bounds(double, box, both_sides(2))[0, :2].tolist()
        value = exactly(net, x[0].tolist())
        passed[torch.float32] += sum(Fraction(b) > v for b, v in zip(plain32, value, strict=True))
        passed[DOUBLE] += sum(Fraction(b) > v for b, v in zip(plain64, value, strict=True))
        assert all(Fraction(b) <= v for b, v in zip(rigorous, value, strict=True))
    assert passed[torch.float32] > 0
    assert passed[DOUBLE] > 0


@pytest.mark.slow
@pytest.mark.parametrize(("group", "radius"), [("linear", 0.3), ("nonlinear", 0.3), ("composed", 0.1)])
def test_what_rounding_costs_is_small(group: str, radius: float) -> None:
    """On every operator: rigorous widths are those of plain float64 bounds but for a millionth."""
    module, network = made(group)
    x = torch.randn(2, 6, generator=torch.Generator().manual_seed(4), dtype=DOUBLE)
    box, size = Interval(x - radius, x + radius), network.graph.output.size
    plain = output_bounds(network, box, "crown")
    bounds = rigorous_crown(network, box, BoundOptions()).lower_bounds(both_sides(size))
    lower, upper = bounds[:, :size], -bounds[:, size:]
    slack = 1e-6 * plain.width + 1e-12 * (1 + plain.lower.abs())
    assert not blame(module, lower > plain.lower + slack)
    assert not blame(module, upper < plain.upper - slack)
    assert not blame(module, lower < plain.lower - slack)
    assert not blame(module, upper > plain.upper + slack)


Exact = Callable[[mpmath.mpf], mpmath.mpf]


def elu(alpha: float, scale: float, input_scale: float) -> Exact:
    return lambda z: mpmath.mpf(scale) * (z if z > 0 else mpmath.mpf(alpha) * mpmath.expm1(mpmath.mpf(input_scale) * z))


def mpmath_softplus(beta: float) -> Exact:
    return lambda z: mpmath.log1p(mpmath.exp(beta * z)) / beta


EXACT: dict[str, tuple[Exact, dict[str, object]]] = {
    "aten.relu.default": (lambda z: max(z, mpmath.mpf(0)), {}),
    "aten.leaky_relu.default": (lambda z: z if z > 0 else z * mpmath.mpf(0.1), {"negative_slope": 0.1}),
    "aten.abs.default": (abs, {}),
    "aten.floor.default": (mpmath.floor, {}),
    "floor of signed": (mpmath.floor, {}),
    "aten.tanh.default": (mpmath.tanh, {}),
    "aten.sigmoid.default": (lambda z: 1 / (1 + mpmath.exp(-z)), {}),
    "aten.silu.default": (lambda z: z / (1 + mpmath.exp(-z)), {}),
    "aten.gelu.default": (lambda z: z * mpmath.erfc(-z / mpmath.sqrt(2)) / 2, {"approximate": "none"}),
    "tanh form": (
        # 1 + tanh(u) as a quotient: for u below -69 the sum would be nothing of 60 digits.
        lambda z: z / (1 + mpmath.exp(-2 * mpmath.sqrt(2 / mpmath.pi) * (z + mpmath.mpf(0.044715) * z**3))),
        {"approximate": "tanh"},
    ),
    "aten.atan.default": (mpmath.atan, {}),
    "aten.asinh.default": (mpmath.asinh, {}),
    "aten.elu.default": (elu(1.0, 1.0, 1.0), {"alpha": 1.0, "scale": 1.0, "input_scale": 1.0}),
    "selu": (elu(1.67, 1.05, 1.0), {"alpha": 1.67, "scale": 1.05, "input_scale": 1.0}),
    "celu": (elu(1.5, 1.0, 1 / 1.5), {"alpha": 1.5, "scale": 1.0, "input_scale": 1 / 1.5}),
    "aten.mish.default": (lambda z: z * mpmath.tanh(mpmath.log1p(mpmath.exp(z))), {}),
    "aten.hardswish.default": (lambda z: z * min(max(z + 3, mpmath.mpf(0)), mpmath.mpf(6)) / 6, {}),
    "aten.softplus.default": (mpmath_softplus(1.0), {"beta": 1.0, "threshold": 20.0}),
    "steep softplus": (mpmath_softplus(3.0), {"beta": 3.0, "threshold": 20.0}),
    "aten.erf.default": (mpmath.erf, {}),
    "aten.exp.default": (mpmath.exp, {}),
    "aten.log.default": (mpmath.log, {}),
    "aten.sin.default": (mpmath.sin, {}),
    "aten.cos.default": (mpmath.cos, {}),
    "aten.sqrt.default": (mpmath.sqrt, {}),
    "aten.rsqrt.default": (lambda z: 1 / mpmath.sqrt(z), {}),
    "aten.reciprocal.default": (lambda z: 1 / z, {}),
    "aten.pow.Tensor_Scalar": (lambda z: z**3, {"exponent": 3}),
    "square": (lambda z: z**2, {"exponent": 2}),
    "broken power": (lambda z: mpmath.power(z, mpmath.mpf(1.7)), {"exponent": 1.7}),
    "small root": (lambda z: mpmath.power(z, mpmath.mpf(0.1)), {"exponent": 0.1}),
    "inverse square": (lambda z: z**-2, {"exponent": -2}),
}
OVERLOADS = {
    "floor of signed": FLOOR_OF_SIGNED,
    "tanh form": "aten.gelu.default",
    "selu": "aten.elu.default",
    "celu": "aten.elu.default",
    "steep softplus": "aten.softplus.default",
}
POSITIVE = {"aten.log.default", "aten.rsqrt.default", "aten.reciprocal.default", "inverse square"}
NOT_NEGATIVE = {"aten.sqrt.default", "broken power", "small root"}


def node_of(name: str) -> Node:
    operator = name if name.startswith("aten.") else OVERLOADS.get(name, "aten.pow.Tensor_Scalar")
    return Node("f", operator, {"self": Ref("z"), **EXACT[name][1]}, (1,), ((1,),))


def ends_for(name: str, pair: tuple[float, float]) -> tuple[float, float]:
    low, width = pair
    if name in POSITIVE | NOT_NEGATIVE:
        low = abs(low) + (1e-3 if name in POSITIVE else 0.0)
    return low, low + width


pairs = st.tuples(
    st.one_of(st.floats(-12, 12), st.sampled_from([0.0, -1.0, -3.0, 1.5])),
    st.one_of(st.just(0.0), st.floats(1e-14, 1e-6), st.floats(0, 1), st.floats(0, 20)),
)


def holds(name: str, pair: tuple[float, float], change: tuple[float, float]) -> None:
    """The relaxation, with its slopes changed too, and the range, at 40 points to 60 digits."""
    node, (low, high) = node_of(name), ends_for(name, pair)
    rule = OPERATORS[node.operator]
    assert isinstance(rule, Activation)
    bounds = Interval(torch.tensor([[low]], dtype=DOUBLE), torch.tensor([[high]], dtype=DOUBLE))
    given_lines = rule.relax(node, bounds)
    tilted = Relaxation(given_lines.lower_slope + change[0], given_lines.upper_slope + change[1])
    image = rule.rigorous_interval(node, [bounds], RankGroup())
    steps = [rule.rigorous_step(node, [bounds], lines) for lines in (given_lines, tilted)]
    points = [mpmath.mpf(low) + (mpmath.mpf(high) - mpmath.mpf(low)) * k / 39 for k in range(40)]
    values = [EXACT[name][0](point) for point in points]
    assert all(image.lower.item() <= value <= image.upper.item() for value in values)
    for step in steps:
        assert step.relaxed is not None
        for sign in (1, -1):
            (slope,), intercept = step.relaxed.backward(torch.full((1, 1, 1), float(sign), dtype=DOUBLE))
            bias = mpmath.mpf(0 if intercept is None else intercept.item())
            for point, value in zip(points, values, strict=True):
                assert mpmath.mpf(slope.item()) * point + bias <= sign * value, (name, sign, point)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
@settings(max_examples=examples(2, 12), deadline=None)
@given(pair=pairs, change=st.tuples(st.sampled_from([0.0, 1e-3, -0.4, 2.0]), st.sampled_from([0.0, 1e-3, -0.4, 2.0])))
def test_lines_and_ranges_hold_to_many_digits(
    name: str, pair: tuple[float, float], change: tuple[float, float]
) -> None:
    holds(name, pair, change)


@pytest.mark.parametrize("name", EXACT)
def test_lines_and_ranges_hold_at_edges(name: str) -> None:
    edges = ((0.0, 0.0), (-1.0, 1.0), (-20.0, 40.0), (0.0, 1e-300), (1.0, 0.0), (5.0, 1e-9))
    for pair in edges[: examples(3, 6)]:
        holds(name, pair, (0.0, 0.0))


@pytest.mark.parametrize(("name", "at"), [("aten.atan.default", 1e17), ("tanh form", -18.25458118881438)])
def test_ranges_hold_where_a_function_is_nearly_level(name: str, at: float) -> None:
    holds(name, (at, 0.0), (0.0, 0.0))


def test_every_curve_is_covered() -> None:
    activations = {name for name, operator in OPERATORS.items() if isinstance(operator, Activation)}
    steps = {"aten.floor.default", "trivet.is_nan", "trivet.is_infinity", "trivet.is_minus_infinity"}
    assert activations - steps - {"aten.sin.default", "aten.cos.default"} <= {node_of(name).operator for name in EXACT}


def test_a_line_moves_outwards_by_rounding_only() -> None:
    bounds = Interval(torch.tensor([[-1.0]], dtype=DOUBLE), torch.tensor([[0.5]], dtype=DOUBLE))
    rule = OPERATORS["aten.tanh.default"]
    assert isinstance(rule, SmoothActivation)
    plain = rule.relax(node_of("aten.tanh.default"), bounds)
    moved = rule.smooth(node_of("aten.tanh.default")).curve.lines(bounds, plain.lower_slope, plain.upper_slope)
    for before, after in (
        (plain.lower_intercept, moved.lower_intercept),
        (plain.upper_intercept, moved.upper_intercept),
    ):
        assert before is not None
        assert after is not None
        torch.testing.assert_close(before, after, rtol=0, atol=1e-13)


def test_the_far_end_next_to_a_pole_costs_the_near_one_nothing() -> None:
    """A quotient between 1/2 and 10²⁰ is at least 1/2, but for its own rounding."""
    network = prepared(nn.Sequential(nn.ReLU(), Inverse()).double(), 1)
    box = Interval(torch.full((1, 1), -1.0, dtype=DOUBLE), torch.full((1, 1), 2.0, dtype=DOUBLE))
    found = rigorous_crown(network, box, BoundOptions()).lower_bounds(both_sides(1))
    assert 0.5 - 1e-12 <= float(found[0, 0]) <= 0.5
    assert 1e20 <= -float(found[0, 1]) <= 1.001e20


class Inverse(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.reciprocal(x + 1e-20)


def test_lines_have_an_allowance_for_products_that_are_not_fused() -> None:
    """A coefficient through lines of opposite slopes, four times rounded to the same side."""
    ends = ("-0x1.0007fabb34026p+0", "-0x1.0021436e272d4p+0", "0x1.002931d7318ffp+0")
    coefficient, lower, upper = (float.fromhex(each) for each in ends)
    one = torch.ones(1, 1, 1, dtype=DOUBLE)
    step = lines_step(Interval(-one, one), Lines(lower * one, upper * one))
    computed = coefficient * lower + coefficient * (upper - lower)
    off = abs(Fraction(computed) - Fraction(coefficient) * Fraction(upper))
    assert off > 4 * Fraction(2) ** -53 * Fraction(upper) * Fraction(-coefficient)
    assert off <= Fraction(float(step.error)) * Fraction(-coefficient)


def test_bounds_of_layers_are_those_without_rigour_whatever_else_is_in_the_batch() -> None:
    net = prepared(mlp([4, 30, 30, 3], nn.ReLU(), 1).double(), 4)
    centres = torch.randn(6, 4, generator=torch.Generator().manual_seed(3), dtype=DOUBLE)
    batch = box_around(centres, 0.1)
    rigorous, plain = (each(net, batch, BoundOptions()).inputs for each in (rigorous_crown, METHODS["crown"]))
    alone = rigorous_crown(net, batch.map(lambda end: end[2:3]), BoundOptions()).inputs
    for name, (found,) in rigorous.items():
        for end in ("lower", "upper"):
            torch.testing.assert_close(getattr(found, end), getattr(plain[name][0], end), rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(getattr(found, end)[2:3], getattr(alone[name][0], end), rtol=1e-9, atol=1e-9)


def test_optimised_bounds_are_rigorous_too() -> None:
    """Of networks whose relaxations have parameters of every kind: tighter than CROWN's, and never passed."""
    net, _, network = cancelling(1)
    x = torch.randn(1, 4, generator=torch.Generator().manual_seed(5), dtype=DOUBLE)
    box, options = Interval(x - 20, x + 20), BoundOptions(ascent=Ascent(iterations=10))
    plain = rigorous_crown(network, box, options).lower_bounds(both_sides(2))
    found = rigorous_alpha_crown(network, box, options).lower_bounds(both_sides(2))
    usual = METHODS["alpha-crown"](network, box, options).lower_bounds(both_sides(2)).detach()
    assert (found >= plain).all()
    assert (found > plain + 1e-3 * plain.abs()).any()
    torch.testing.assert_close(found, usual, rtol=0.05, atol=0)
    check_exactly(net, corners(box, 20), found)


@pytest.mark.slow
def test_optimised_bounds_of_every_operator_hold() -> None:
    module, network = made("nonlinear")
    x = torch.randn(1, 6, generator=torch.Generator().manual_seed(4), dtype=DOUBLE)
    box, rows = Interval(x - 0.1, x + 0.1), both_sides(network.graph.output.size)[:, ::7]
    analysis = rigorous_crown(network, box, BoundOptions())
    found = OptimisedLowerBounds(Ascent(iterations=3))(analysis.backward, network.graph.output.name, rows)
    values = module(box.lower + torch.rand(200, 6, dtype=DOUBLE) * box.width) @ rows[0].mT
    assert (found <= values + 1e-11 * (1 + values.abs())).all()
    assert (found > analysis.lower_bounds(rows) + 1e-6).any()


def test_a_ball_is_bounded_tighter_than_its_box() -> None:
    net, _, network = cancelling(2)
    middle = torch.randn(1, 4, generator=torch.Generator().manual_seed(5), dtype=DOUBLE)
    ball = ball_around(middle, 0.1)
    within_box = rigorous_lower_bounds(network, Interval(ball.lower, ball.upper), both_sides(2))
    found = rigorous_lower_bounds(network, ball, both_sides(2))
    assert (found >= within_box).all()
    assert (found > within_box).any()
    directions = torch.nn.functional.normalize(torch.randn(50, 4, dtype=DOUBLE), dim=1)
    check_exactly(net, middle + 0.0999 * directions, found)


@pytest.mark.slow
def test_what_attention_masks_counts_for_nothing() -> None:
    """Scores of −∞, which no coefficient reaches: as tight as plain bounds, and never passed by outputs."""
    model = transformer(heads=2, kv_heads=2)
    module, x = AfterEmbedding(model, 3), embedded(model, tokens(3))
    network, box = prepared(module, 3, 8), box_around(x, 1e-3)
    for method in ("crown-ibp", "crown"):
        lower, negated = (
            METHODS[method].rigorous(network, box, BoundOptions()).lower_bounds(both_sides(16)).chunk(2, dim=1)
        )
        plain = output_bounds(network, box, method)
        torch.testing.assert_close(lower, plain.lower, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(-negated, plain.upper, rtol=1e-6, atol=1e-9)
        for outputs in module(samples(box, 50, torch.Generator().manual_seed(1)).flatten(0, 1)).unflatten(0, (50, 2)):
            assert (outputs >= lower - 1e-12).all()
            assert (outputs <= -negated + 1e-12).all()


def test_what_is_not_supported_is_refused() -> None:
    network = prepared(mlp([4, 6, 2], nn.ReLU(), 0), 4)
    with pytest.raises(ValueError, match="float32"):
        rigorous_lower_bounds(network, Interval(torch.zeros(1, 4), torch.ones(1, 4)), both_sides(2))


def test_an_operator_without_allowance_is_refused_by_name() -> None:
    """When it is made: the registry makes every operator when it is imported."""

    class Quiet(Activation):
        def interval(self, node: Node, inputs: Sequence[Interval], tp_group: RankGroup) -> Interval:
            return inputs[0]

        def relax(self, node: Node, bounds: Interval) -> Relaxation:
            raise NotImplementedError

        def unstable(self, node: Node, bounds: Interval) -> Tensor:
            raise NotImplementedError

    class Careless(LinearOperator):
        def interval(self, node: Node, inputs: Sequence[Interval], tp_group: RankGroup) -> Interval:
            return inputs[0]

        def backward(self, node: Node, coefficients: Tensor, tp_group: RankGroup) -> Propagated:
            raise NotImplementedError

    with pytest.raises(TypeError, match=r"Quiet.*rigorous_lines"):
        Quiet()  # type: ignore[abstract]
    with pytest.raises(TypeError, match=r"Careless.*roundings"):
        Careless()  # type: ignore[abstract]
