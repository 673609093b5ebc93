"""Rows that go in several parts are bounded each for itself."""

import pytest
import torch
from lanes import first_fast
from torch import Tensor, nn

from service.bounds.interval import Interval
from service.bounds.methods import METHODS, BoundOptions
from service.bounds.network import prepare
from service.bounds.optimise import Ascent


def network(bias: float, width: int = 6) -> nn.Sequential:
    """With a large bias every sign before the second ReLU is known, so that there is no slope to optimise."""
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3))
    nn.init.constant_(module[0].bias, bias)
    return module.double().requires_grad_(False)


def sampled(module: nn.Module, rows: Tensor) -> Tensor:
    """The least values of rows over the box of :func:`test_bounds_of_parts_hold`, by many points."""
    points = 0.6 * torch.rand(4000, 3, dtype=torch.float64) - 0.3
    return (module(points) @ rows.T).amin(dim=0)


@pytest.mark.parametrize("method", ["alpha-crown", "alpha-crown (fixed intermediate bounds)"])
@pytest.mark.parametrize("bias", first_fast(1, [0.0, 10.0]))
def test_bounds_of_parts_hold(method: str, bias: float) -> None:
    module = network(bias)
    ends = torch.full((1, 3), 0.3, dtype=torch.float64)
    ascent = Ascent(iterations=4)
    rows = torch.cat([torch.eye(3), -torch.eye(3)]).double()
    ready, box = prepare(module, (3,)), Interval(-ends, ends)
    found, whole = (
        METHODS[method](ready, box, options).lower_bounds(rows[None])[0]
        for options in (BoundOptions(elements=1, ascent=ascent), BoundOptions(ascent=ascent))
    )
    assert (found <= sampled(module, rows) + 1e-9).all()
    assert torch.allclose(found, whole, atol=0.05)
