"""Every operator, alone between two layers: no input of a random box leaves the bounds, in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nets import output_bounds, prepared, samples
from operator_groups import GROUPS, Operator, blame, made

from service.bounds.graph import Node, Ref
from service.bounds.interval import Interval
from service.bounds.methods import BoundOptions
from service.bounds.operators import OPERATORS
from service.bounds.operators.elementary import InverseHyperbolicSine
from service.bounds.optimise import Ascent

PLAIN = ("ibp", "crown-ibp", "crown")


@pytest.mark.parametrize(
    "group",
    [pytest.param(group, marks=() if group == "nonlinear" else pytest.mark.slow) for group in GROUPS],
)
def test_no_input_leaves_the_bounds(group: str) -> None:
    hold(group, 1, 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**31), radius=st.sampled_from([0.0, 1e-3, 0.1, 0.5, 3.0]))
def test_no_input_leaves_the_bounds_of_any_box(group: str, seed: int, radius: float) -> None:
    hold(group, seed, radius)


def hold(group: str, seed: int, radius: float) -> None:
    module, network = made(group)
    generator = torch.Generator().manual_seed(seed)
    centre = torch.randn(2, 6, generator=generator, dtype=torch.float64)
    radii = radius * torch.rand(2, 6, generator=generator, dtype=torch.float64)
    box = Interval(centre - radii, centre + radii)
    drawn = samples(box, 60, generator)
    values = module(drawn.flatten(0, 1)).unflatten(0, drawn.shape[:2]).detach()
    for method in PLAIN:
        bounds = output_bounds(network, box, method)
        slack = 1e-11 * (1 + values.abs())
        assert not blame(module, bounds.lower > values + slack), method
        assert not blame(module, bounds.upper < values - slack), method


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("method", PLAIN)
def test_bounds_shrink_to_the_value(group: str, method: str) -> None:
    """Soundness alone would allow infinite bounds; around a point they must close in."""
    module, network = made(group)
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    value, bounds = module(x), output_bounds(network, Interval(x - 1e-9, x + 1e-9), method)
    loose = bounds.width > 1e-5 * (1 + value.abs())
    assert not blame(module, loose)


@pytest.mark.slow
def test_optimised_bounds_hold_and_are_no_looser() -> None:
    """Of all operators at once, each with its family."""
    module, network = made("nonlinear")
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(1, 6, generator=generator, dtype=torch.float64)
    box = Interval(x - 0.3, x + 0.3)
    values = module(samples(box, 200, generator).flatten(0, 1)).unflatten(0, (200, -1)).detach()
    options = BoundOptions(ascent=Ascent(iterations=6))
    plain, found = (
        output_bounds(network, box, "crown"),
        output_bounds(network, box, "alpha-crown (fixed intermediate bounds)", options),
    )
    slack = 1e-11 * (1 + values.abs())
    assert not blame(module, found.lower > values + slack)
    assert not blame(module, found.upper < values - slack)
    # A family may start at another line than the plain one, a little looser; most get tighter.
    loose = 0.02 * plain.width + 1e-9 * (1 + plain.lower.abs())
    assert not blame(module, found.lower < plain.lower - loose)
    assert not blame(module, found.upper > plain.upper + loose)
    assert (found.width < 0.99 * plain.width).sum() > 20


def test_linear_operators_are_exact() -> None:
    module, network = made("linear")
    assert not network.nonlinear
    x = torch.randn(2, 6, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    jacobian = torch.func.vmap(torch.func.jacrev(lambda each: module(each[None])[0]))(x)
    bounds, value = output_bounds(network, Interval(x - 0.3, x + 0.3), "crown"), module(x)
    reach = 0.3 * jacobian.abs().sum(dim=2)
    assert not blame(module, (bounds.lower - value + reach).abs() > 1e-11 * (1 + value.abs() + reach))
    assert not blame(module, (bounds.upper - value - reach).abs() > 1e-11 * (1 + value.abs() + reach))


def test_a_root_of_what_may_be_negative_has_no_bounds() -> None:
    network = prepared(Operator(lambda m, x: torch.sqrt(m.first(x))).double(), 6)
    box = Interval(torch.full((1, 6), -9.0, dtype=torch.float64), torch.full((1, 6), 9.0, dtype=torch.float64))
    for method in PLAIN:
        assert (output_bounds(network, box, method).lower == -torch.inf).all()


def test_every_rule_is_covered() -> None:
    reached = {node.operator for group in GROUPS for node in made(group)[1].graph.nodes[1:]}
    elsewhere = {
        "tanh",
        "sigmoid",
        "gelu",
        "leaky_relu",
        "addmm",
        "mm",
        "_to_copy",
        "alias",
        "detach",
        "clone",
        "squeeze",
    }
    known = {name for name in OPERATORS if name.startswith("aten.") and name.split(".")[1] not in elsewhere}
    assert known - reached <= {
        "aten._unsafe_view.default", "aten.reshape.default", "aten.unsqueeze.default", "aten.permute.default",
        "aten.neg.default", "aten.expand.default", "aten.rsqrt.default",
    }, known - reached  # fmt: skip


def test_a_slope_far_out_is_there_although_its_square_overflows() -> None:
    """Without the slope of asinh its line would be flat, and below the function at the far end."""
    bounds = Interval(torch.tensor([[2.4e20]]), torch.tensor([[1.68e33]]))
    node = Node("f", "aten.asinh.default", {"self": Ref("z")}, (1,), ((1,),))
    lines = InverseHyperbolicSine().relax(node, bounds)
    assert lines.upper_intercept is not None
    grid = torch.logspace(20.4, 33.2, 2000, dtype=torch.float64)
    upper = grid * lines.upper_slope.double() + lines.upper_intercept.double()
    assert float((grid.asinh() - upper).amax()) < 1e-3
