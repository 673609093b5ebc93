"""Planes that bound products of two bounded values, entry by entry or of matrices."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from service.bounds.graph import Node, Ref
from service.bounds.interval import Interval
from service.bounds.operators import OPERATORS
from service.bounds.operators.base import NonlinearOperator

SHAPES = {
    "trivet.product": ((3, 1, 4), (2, 1), (3, 2, 4)),
    "trivet.matrix_product": ((2, 3, 4), (2, 4, 5), (2, 3, 5)),
}


@pytest.mark.parametrize("operator", SHAPES)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), width=st.sampled_from([0.0, 1e-6, 1.0, 100.0]))
def test_every_blend_of_planes_is_sound(operator: str, seed: int, width: float) -> None:
    """Rows, corners, parameters and coefficients at random, the plain planes among them."""
    first, second, shape = SHAPES[operator]
    generator = torch.Generator().manual_seed(seed)

    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    bounds = []
    for each in (first, second):
        centre, radius = 3 * random(2, *each), width * random(2, *each).abs()
        bounds.append(Interval(centre - radius, centre + radius))
    node = Node("f", operator, {"self": Ref("x"), "other": Ref("y")}, shape, (first, second))
    rule = OPERATORS[operator]
    assert isinstance(rule, NonlinearOperator)
    family = rule.family(node, bounds)
    chosen = tuple(torch.rand(2, 5, *each.shape[1:], generator=generator, dtype=torch.float64) for each in family.start)
    coefficients = random(2, 5, *shape)
    for relaxed in (rule.relax_on(node, bounds), family.member(chosen)):
        (onto_x, onto_y), bias = relaxed.backward(coefficients)
        assert bias is not None
        for _ in range(30):
            x, y = (
                each.lower + torch.rand(each.lower.shape, generator=generator, dtype=torch.float64).round() * each.width
                for each in bounds
            )
            product = x * y.unsqueeze(1) if operator == "trivet.product" else x @ y
            value = (coefficients * product.unsqueeze(1)).flatten(2).sum(dim=2)
            line = (onto_x * x.unsqueeze(1)).flatten(2).sum(dim=2) + (onto_y * y.unsqueeze(1)).flatten(2).sum(dim=2)
            assert (line + bias <= value + 1e-11 * (1 + value.abs() + bias.abs() + line.abs())).all()
