"""Outputs as rational numbers, against rational arithmetic by hand."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import Tensor, nn

from service.bounds.exact import exact_outputs
from service.bounds.network import prepare


class Everything(nn.Module):
    """Every kind of operator that has an exact form, at least by way of one that it becomes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution, self.linear = nn.Conv1d(1, 2, 2), nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.convolution(nn.functional.pad(x.unsqueeze(1), (0, 0)))).transpose(1, 2).flatten(1)
        hidden = self.linear(torch.cat([hidden[:, :2], hidden[:, 2:]], dim=1)) * self.scale
        hidden = torch.maximum(hidden, nn.functional.leaky_relu(-hidden, 0.25) - x[:, :1].expand(-1, 3))
        found: Tensor = torch.cat([hidden.abs(), torch.maximum(hidden, self.scale).sum(dim=1, keepdim=True)], dim=1)
        return found


def test_exact_outputs_are_those_of_float64_without_its_rounding() -> None:
    module = Everything().double().requires_grad_(False)
    network = prepare(module, (4,))
    for x in torch.randn(4, 4, dtype=torch.float64):
        found = exact_outputs(network, x)
        assert found is not None
        near = module(x[None])[0].tolist()
        assert [float(each) for each in found] == pytest.approx(near, rel=1e-12, abs=1e-12)


def test_what_rounding_would_lose_is_kept() -> None:
    """``2^60 (x + 2^-60) − 2^60 x = 1``, and 0 in float64 at x = 1."""

    class Vanishing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x + 2.0**-60) * 2.0**60 - x * 2.0**60

    x = torch.ones(1, dtype=torch.float64)
    assert Vanishing()(x[None]).item() == 0
    assert exact_outputs(prepare(Vanishing().double(), (1,)), x) == [Fraction(1)]


class Steps(nn.Module):
    """A floor, a ceiling, a sign by comparisons, and a choice, of one sum."""

    def forward(self, x: Tensor) -> Tensor:
        total = x.sum(dim=1, keepdim=True)
        one, zero = (torch.full((), number, dtype=x.dtype) for number in (1.0, 0.0))
        above, below = torch.where(total > 0, one, zero), torch.where(-total > 0, one, zero)
        return torch.cat(
            [torch.floor(total), torch.ceil(total), above - below, torch.where((total - 1).expand(-1, 3) > 0, x, -x)],
            dim=1,
        )


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        ([1.0, 2.0**-60, -(2.0**-60)], [1, 1, 1, -1, -(Fraction(1, 2**60)), Fraction(1, 2**60)]),
        ([1.0, 2.0**-60, 0.0], [1, 2, 1, 1, Fraction(1, 2**60), 0]),
        ([-1.0, 1.0, -(2.0**-60)], [-1, 0, -1, 1, -1, Fraction(1, 2**60)]),
    ],
    ids=["on a step", "beyond it", "below 0"],
)
def test_steps_are_taken_to_the_last_digit(x: list[float], expected: list[Fraction | int]) -> None:
    found = exact_outputs(prepare(Steps().double(), (3,)), torch.tensor(x, dtype=torch.float64))
    assert found is not None
    assert list(found) == expected


@pytest.mark.parametrize("function", [torch.tanh, lambda x: x.mean(dim=1, keepdim=True), lambda x: x / 3, torch.square])
def test_what_would_be_rounded_has_no_exact_form(function: object) -> None:
    class Rounding(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = function(x)  # type: ignore[operator]
            return found

    assert exact_outputs(prepare(Rounding(), (3,)), torch.ones(3, dtype=torch.float64)) is None
