"""Proofs by rational arithmetic, where bounds are attained."""

from __future__ import annotations

from fractions import Fraction
from math import inf

import pytest
import torch
from torch import Tensor, nn

from service.bounds.exact import exact_outputs
from service.bounds.exact_forms import Plane, keeps_to, may_keep
from service.bounds.network import prepare
from service.bounds.progress import OutOfTimeError


class Identity(nn.Module):
    """The input by way of ReLUs, and the larger of two entries."""

    def forward(self, x: Tensor) -> Tensor:
        same = torch.relu(x) - torch.relu(-x)
        return torch.cat([same, torch.maximum(same[:, :1], torch.full((1, 1), 0.25, dtype=x.dtype))], dim=1)


def below(output: int, most: Fraction | int, *, attained: bool) -> Plane:
    return Plane(((output, Fraction(-1)),), -Fraction(most), attained)


def proved(lower: list[int], upper: list[int], *planes: Plane) -> bool:
    box = tuple(map(Fraction, lower)), tuple(map(Fraction, upper))
    return keeps_to(prepare(Identity().double(), (2,)), box, [planes])


@pytest.mark.parametrize("lower", [[0, 0], [-1, -1]], ids=["one piece", "cut at 0"])
def test_what_is_attained_is_told_from_what_is_passed(lower: list[int]) -> None:
    assert proved(lower, [1, 1], below(0, 1, attained=True))
    assert not proved(lower, [1, 1], below(0, 1, attained=False))
    assert not proved(lower, [1, 1], below(0, 1 - Fraction(1, 10**30), attained=True))
    assert proved(lower, [1, 1], below(2, 1, attained=True))
    assert not proved(lower, [1, 1], below(2, Fraction(99, 100), attained=True))


def test_one_plane_of_several_does() -> None:
    assert proved([0, 0], [1, 1], below(0, 0, attained=True), below(1, 1, attained=True))


def test_what_several_inputs_decide_is_left_open() -> None:
    class Sum(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x.sum(dim=1, keepdim=True))

    box = (Fraction(-1),) * 2, (Fraction(1),) * 2
    network = prepare(Sum().double(), (2,))
    assert not keeps_to(network, box, [[below(0, 2, attained=True)]])
    assert not may_keep(network, box)


def test_an_infinite_constant_has_no_exact_form() -> None:
    class Least(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.minimum(x, torch.full((1, 2), torch.inf, dtype=x.dtype))

    box = (Fraction(-1),) * 2, (Fraction(1),) * 2
    network = prepare(Least().double(), (2,))
    assert not keeps_to(network, box, [[below(0, 2, attained=True)]])
    assert not may_keep(network, box)


@pytest.mark.parametrize("function", [torch.floor, lambda x: torch.where(x > 0, x, x - 1)])
def test_what_jumps_has_no_exact_form_in_a_box(function: object) -> None:
    """A step at the very end of a box would be on both of its sides."""

    class Jumping(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = function(x)  # type: ignore[operator]
            return found

    box = (Fraction(0),) * 2, (Fraction(1),) * 2
    assert not keeps_to(prepare(Jumping().double(), (2,)), box, [[below(0, 5, attained=True)]])


@pytest.mark.parametrize("beyond", [Fraction(0), Fraction(1, 10**7), Fraction(1, 10**4)])
def test_what_rounding_could_decide_is_not_given_up_on(beyond: Fraction) -> None:
    """In float32 a sum's end may lie on the other side of 0 than in float64."""

    class Sum(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x.sum(dim=1, keepdim=True) - 2)

    box = (Fraction(-1),) * 2, (Fraction(1) + beyond,) * 2
    assert may_keep(prepare(Sum().double(), (2,)), box)


def test_rational_arithmetic_ends_at_its_deadline() -> None:
    network, box = prepare(Identity().double(), (2,)), ((Fraction(0),) * 2, (Fraction(1),) * 2)
    with pytest.raises(OutOfTimeError):
        keeps_to(network, box, [[below(0, 1, attained=True)]], -inf)
    with pytest.raises(OutOfTimeError):
        may_keep(network, box, -inf)
    assert exact_outputs(network, torch.zeros(2), -inf) is None
    assert exact_outputs(network, torch.zeros(2)) == [0, 0, Fraction(1, 4)]


def test_every_case_must_be_kept_to() -> None:
    network, box = prepare(Identity().double(), (2,)), ((Fraction(0),) * 2, (Fraction(1),) * 2)
    kept, passed = [below(0, 1, attained=True)], [below(2, Fraction(1, 2), attained=True)]
    assert keeps_to(network, box, [kept, kept])
    assert not keeps_to(network, box, [kept, passed])
