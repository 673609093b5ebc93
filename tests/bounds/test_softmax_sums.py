"""Parts of a sum add up to one: bounds that know it hold, and lose nothing where that is all there is to know."""

from __future__ import annotations

import time
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lanes import examples
from nets import redraw
from torch import Tensor, nn

from service.bounds.interval import Interval
from service.bounds.methods import METHODS, BoundOptions
from service.bounds.network import Network, prepare
from service.bounds.optimise import Ascent
from service.bounds.softmax_sums import with_softmax_sums
from service.bounds.split import Preactivations
from service.verification.bab.activations.intermediate_bounds import optimise_intermediate_bounds
from service.verification.bab.settings import SearchSettings


class Attention(nn.Module):
    """Three tokens of four numbers, two of them looked at: softmax along one dimension."""

    def __init__(self, seed: int, axis: int = -1) -> None:
        super().__init__()
        self.axis = axis
        self.query, self.value, self.last = nn.Linear(4, 9), nn.Linear(4, 6), nn.Linear(6, 2)
        redraw(self, torch.Generator().manual_seed(seed))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x).reshape(-1, 3, 3).softmax(dim=self.axis)
        mixed = scores @ self.value(x).reshape(-1, 3, 2)
        return self.last(torch.relu(mixed.reshape(-1, 6)))


class Shares(nn.Module):
    """Squares of three numbers as parts of their sum, or of another one."""

    def __init__(self, *, other: bool) -> None:
        super().__init__()
        self.other = other

    def forward(self, x: Tensor) -> Tensor:
        positive = torch.exp(x)
        total = torch.exp(2 * x) if self.other else positive
        return positive / total.sum(dim=1, keepdim=True)


@cache
def attention(axis: int = -1) -> tuple[nn.Module, Network]:
    return network_of(Attention(0, axis), 4)


def network_of(module: nn.Module, inputs: int) -> tuple[nn.Module, Network]:
    module = module.double().eval().requires_grad_(False)
    return module, prepare(module, (inputs,))


def boxed(seed: int, inputs: int, radius: float) -> tuple[Interval, Tensor]:
    """A box of one instance, and points of it, corners among them."""
    generator = torch.Generator().manual_seed(seed)
    centre = torch.randn(1, inputs, generator=generator, dtype=torch.float64)
    box = Interval(centre - radius, centre + radius)
    share = torch.rand(256, inputs, generator=generator, dtype=torch.float64)
    share[:64] = share[:64].round()
    return box, box.lower + share * box.width


@given(st.integers(0, 10**6), st.sampled_from([-1, 1]), st.sampled_from([0.01, 0.2, 1.0]))
@settings(max_examples=examples(3, 5), deadline=None)
@pytest.mark.parametrize("method", ["crown", "alpha-crown"])
def test_bounds_that_know_of_parts_hold(method: str, seed: int, axis: int, radius: float) -> None:
    module, network = attention(axis)
    box, points = boxed(seed, 4, radius)
    rows = torch.randn(1, 5, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    analysis = METHODS[method](with_softmax_sums(network), box, BoundOptions(ascent=Ascent(iterations=3)))
    found = analysis.lower_bounds(rows)[0]
    assert bool((found <= (module(points) @ rows[0].T).amin(dim=0) + 1e-9).all())


def test_equal_coefficients_of_all_parts_are_exact() -> None:
    _, network = network_of(Shares(other=False), 3)
    box, _ = boxed(0, 3, 0.7)
    rows = torch.tensor([[[2.0, 2.0, 2.0], [-1.0, -1.0, -1.0]]], dtype=torch.float64)
    known = METHODS["crown"](with_softmax_sums(network), box, BoundOptions()).lower_bounds(rows)
    torch.testing.assert_close(known, torch.tensor([[2.0, -1.0]], dtype=torch.float64))
    plain = METHODS["crown"](network, box, BoundOptions()).lower_bounds(rows)
    assert bool((plain < known - 0.1).all())


def test_parts_of_another_sum_are_none() -> None:
    _, network = network_of(Shares(other=True), 3)
    assert with_softmax_sums(network) is network


@given(st.integers(0, 10**6), st.sampled_from([0.05, 0.5]), st.sampled_from([-1.0, 60.0]))
@settings(max_examples=3, deadline=None)
def test_optimised_bounds_of_hidden_values_hold_whatever_time_is_left(seed: int, radius: float, left: float) -> None:
    _, network = attention()
    box, points = boxed(seed, 4, radius)
    first = Preactivations.of(network).bounds(METHODS["ibp"](network, box, BoundOptions()).inputs)
    deadline = time.monotonic() + left
    found = optimise_intermediate_bounds(
        with_softmax_sums(network), box, first, deadline, BoundOptions(), settings=SearchSettings()
    )
    assert bool((found.lower >= first.lower - 1e-9).all())
    assert bool((found.upper <= first.upper + 1e-9).all())
    point = METHODS["ibp"](network, Interval.point(points), BoundOptions())
    values = Preactivations.of(network).bounds(point.inputs)
    assert bool((values.lower >= found.lower - 1e-6).all())
    assert bool((values.upper <= found.upper + 1e-6).all())


class Masked(Attention):
    """Attention to what came before, by a summand."""

    def __init__(self, excluded: float) -> None:
        super().__init__(0)
        self.register_buffer("mask", torch.full((3, 3), excluded).triu(1).nan_to_num(nan=0.0, neginf=excluded))

    def forward(self, x: Tensor) -> Tensor:
        scores = (self.query(x).reshape(-1, 3, 3) + self.mask).softmax(dim=-1)
        return self.last(torch.relu((scores @ self.value(x).reshape(-1, 3, 2)).reshape(-1, 6)))


@pytest.mark.parametrize("method", ["crown", "alpha-crown"])
def test_scores_of_minus_infinity_cost_nothing(method: str) -> None:
    box, _ = boxed(1, 4, 0.1)
    rows = torch.cat([torch.eye(2), -torch.eye(2)]).double()[None]
    found, known = (
        METHODS[method](network_of(Masked(excluded), 4)[1], box, BoundOptions()).lower_bounds(rows)
        for excluded in (-torch.inf, -1e9)
    )
    assert bool(found.isfinite().all())
    torch.testing.assert_close(found, known, rtol=1e-6, atol=1e-9)
