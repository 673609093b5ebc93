"""The larger of two values, by itself, in clamps, extremes and pools: exact however large the values beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch
from nets import output_bounds, prepared
from rigorous_problems import rigorous_lower_bounds
from torch import Tensor, nn

from service.bounds.interval import Interval
from service.bounds.network import Network

METHODS = ["ibp", "crown-ibp", "crown", "alpha-crown"]
Function = Callable[[Tensor], Tensor]


class Beside(nn.Module):
    """``3 f(x)`` for functions that are the identity, side by side: tracing takes longer than what is asked."""

    def __init__(self, functions: Sequence[Function], dtype: torch.dtype) -> None:
        super().__init__()
        self.functions = functions
        self.register_buffer("type_of_all", torch.empty(0, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return 3 * torch.cat([function(x) for function in self.functions], dim=1)


def number(value: float, x: Tensor) -> Tensor:
    return torch.tensor(value, dtype=x.dtype)


UNCHANGED: dict[str, Function] = {
    "a clamp that never acts": lambda x: x.clamp(-1e10, 1e10),
    "a clamp by infinity": lambda x: x.clamp(-torch.inf, torch.inf),
    "a clamp by the largest number": lambda x: x.clamp(-torch.finfo(x.dtype).max, torch.finfo(x.dtype).max),
    "a limit of infinity": lambda x: torch.minimum(x, number(torch.inf, x)),
    "a large limit": lambda x: torch.maximum(number(-1e30, x), x),
    "a masked largest": lambda x: torch.cat([x, x - 1e9], dim=1).amax(dim=1, keepdim=True),
    "a masked smallest": lambda x: torch.cat([x + 1e9, x, x + 1e9], dim=1).amin(dim=1, keepdim=True),
    "a masked pool": lambda x: nn.functional.max_pool1d(torch.cat([x, x - 1e9], dim=1).unsqueeze(1), 2).squeeze(1),
}


@cache
def network(dtype: torch.dtype) -> Network:
    return prepared(Beside(list(UNCHANGED.values()), dtype), 1)


@pytest.mark.parametrize("method", METHODS)
def test_what_is_beside_large_values_keeps_its_digits(method: str) -> None:
    box = Interval(torch.tensor([[-0.75], [0.25]]), torch.tensor([[1.0], [0.5]]))
    found = output_bounds(network(torch.float32), box, method)
    torch.testing.assert_close(found.lower, 3 * box.lower.expand_as(found.lower), rtol=1e-6, atol=0)
    torch.testing.assert_close(found.upper, 3 * box.upper.expand_as(found.upper), rtol=1e-6, atol=0)


def test_rigorous_bounds_allow_for_no_large_value_that_is_not_taken() -> None:
    box = Interval(torch.tensor([[0.25]]).double(), torch.tensor([[0.5]]).double())
    identity = torch.eye(len(UNCHANGED)).double()
    found = rigorous_lower_bounds(network(torch.float64), box, torch.cat([identity, -identity])[None])
    expected = torch.tensor([0.75, -1.5]).double().repeat_interleave(len(UNCHANGED))[None]
    assert (found <= expected).all()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_values_too_large_to_be_compared_are_bounded_by_the_range() -> None:
    box = Interval(torch.tensor([[-1.0]]), torch.tensor([[3e38]]))
    prepared_once = prepared(Beside([lambda x: torch.maximum(x, number(2e38, x)) / 4], torch.float32), 1)
    for method in METHODS:
        found = output_bounds(prepared_once, box, method)
        assert found.lower <= 1.5e38
        assert found.upper >= 2.2e38


def test_linear_bounds_are_those_of_relu_of_the_difference() -> None:
    """As they were by ``y + relu(x − y)`` in float64, where nothing is lost."""
    torch.manual_seed(3)
    first, last = nn.Linear(3, 8).double(), nn.Linear(4, 2).double()

    class Of(nn.Module):
        def __init__(self, *, directly: bool) -> None:
            super().__init__()
            self.first, self.last, self.directly = first, last, directly

        def forward(self, x: Tensor) -> Tensor:
            left, right = self.first(x).chunk(2, dim=1)
            larger = torch.maximum(left, right) if self.directly else right + torch.relu(left - right)
            found: Tensor = self.last(larger)
            return found

    box = Interval(torch.full((1, 3), -1.0).double(), torch.full((1, 3), 1.0).double())
    one, other = (prepared(Of(directly=each), 3) for each in (True, False))
    for method in METHODS:
        ours, composed = output_bounds(one, box, method), output_bounds(other, box, method)
        assert (ours.width <= composed.width * (1 + 1e-6)).all()
        if method == "crown":
            torch.testing.assert_close(ours.lower, composed.lower)
