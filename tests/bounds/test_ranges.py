"""Ranges that values have by nature: exact for softmax, limits for what is normalised, in every method."""

from __future__ import annotations

from functools import cache
from itertools import product

import mpmath
import pytest
import torch
from lanes import first_fast
from nets import output_bounds, prepared, samples
from torch import Tensor, nn
from torch.nn import functional

from service.bounds.interval import Interval
from service.bounds.network import Network
from service.bounds.ranges import LogSumExp, Range, Softmax

METHODS = ["ibp", "crown-ibp", "crown", "alpha-crown"]
WIDTH = 6
MASK = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 0.0])


class Natural(nn.Module):
    """Softmax, one with a mask, three normalisations and the logarithm of a sum, side by side."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("mask", MASK.to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        powers = torch.exp(x) * self.mask
        parts = [
            x.softmax(1),
            powers / powers.sum(1, keepdim=True),
            functional.layer_norm(x, (WIDTH,)),
            functional.rms_norm(x, (WIDTH,)),
            functional.group_norm(x.reshape(-1, 3, 2), 3).flatten(1),
            x.logsumexp(1, keepdim=True),
        ]
        return torch.cat(parts, dim=1)


@cache
def network(dtype: torch.dtype) -> Network:
    return prepared(Natural(dtype), WIDTH)


def box(eps: float, dtype: torch.dtype) -> Interval:
    centre = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    return Interval(centre - eps, centre + eps)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("eps", first_fast(2, [0.1, 3.0, 10.0, 500.0]))
def test_every_method_keeps_to_them_in_float32(method: str, eps: float) -> None:
    given = box(eps, torch.float32)
    found = output_bounds(network(torch.float32), given, method)
    values = Natural(torch.float64)(samples(given, 200, torch.Generator().manual_seed(1)).double().flatten(0, 1))
    least, most = (
        each.values for each in (values.reshape(200, 2, -1).min(dim=0), values.reshape(200, 2, -1).max(dim=0))
    )
    finite = least.isfinite() & most.isfinite()  # a softmax by hand overflows, and its bounds do not
    slack = 1e-5 * (1 + most.abs())
    assert (found.lower <= least + slack)[finite].all()
    assert (found.upper >= most - slack)[finite].all()
    assert found.lower.isfinite().all()
    assert found.upper.isfinite().all()
    shares, normed = slice(0, 2 * WIDTH), slice(2 * WIDTH, 5 * WIDTH)
    assert (found.lower[:, shares] >= -1e-6).all()
    assert (found.upper[:, shares] <= 1 + 1e-6).all()
    limits = torch.tensor([5**0.5, 6**0.5, 1.0]).repeat_interleave(WIDTH) * (1 + 1e-5)
    assert (found.upper[:, normed] <= limits).all()
    assert (found.lower[:, normed] >= -limits).all()


def test_softmax_and_log_sum_are_exact() -> None:
    """Against all corners, of which some take the least and the greatest value of each entry."""
    given = box(1.5, torch.float64)
    found = output_bounds(network(torch.float64), given, "ibp")
    signs = torch.tensor(list(product([0.0, 1.0], repeat=WIDTH)), dtype=torch.float64)
    corners = given.lower + signs[:, None] * given.width
    values = Natural(torch.float64)(corners.flatten(0, 1)).reshape(len(signs), 2, -1)
    exact = [*range(2 * WIDTH), 5 * WIDTH]
    for ends, ours in ((values.amin(dim=0), found.lower), (values.amax(dim=0), found.upper)):
        torch.testing.assert_close(ours[:, exact], ends[:, exact], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("weights", [None, torch.tensor([0.3, 2.7, 1e-9], dtype=torch.float64)])
def test_ranges_at_a_point_hold_to_many_digits(weights: Tensor | None) -> None:
    """Of scores whose own rounding is a thousand times what a share of them may lose."""
    for seed in range(20):
        x = torch.randn(1, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 700 * (-1) ** seed
        powers = [mpmath.exp(mpmath.mpf(each)) for each in x[0].tolist()]
        if weights is not None:
            powers = [power * mpmath.mpf(each) for power, each in zip(powers, weights.tolist(), strict=True)]
        total = mpmath.fsum(powers)
        shares = [power / total for power in powers]
        asked: list[tuple[Range, list[mpmath.mpf]]] = [(Softmax("x", (0,), weights), shares)]
        if weights is None:
            asked.append((LogSumExp("x", (0,), keepdim=True), [mpmath.log(total)]))
        for each, values in asked:
            unknown = torch.full((1, len(values)), torch.inf, dtype=torch.float64)
            found = each.narrowed(Interval(-unknown, unknown), {"x": Interval.point(x)})
            assert all(mpmath.mpf(low) <= value for low, value in zip(found.lower[0].tolist(), values, strict=True))
            assert all(mpmath.mpf(high) >= value for high, value in zip(found.upper[0].tolist(), values, strict=True))


class Gated(nn.Module):
    """Eight steps of ``new + share · (h − new)``, or of its two products; the share is from 0 to 1, or up to 2."""

    def __init__(self, most: float, *, of_products: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.of_products = of_products
        self.most, self.layer = most, nn.Linear(2 * WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(x)
        for _ in range(8):
            gate, new = self.layer(torch.cat([x, h], dim=1)).chunk(2, dim=1)
            new, share = torch.tanh(3 * new), torch.sigmoid(gate)
            share = share if self.most == 1 else self.most * share
            h = (1 - share) * new + share * h if self.of_products else new + share * (h - new)
        return h


@pytest.mark.parametrize("of_products", [False, True])
@pytest.mark.parametrize("most", [1.0, 2.0])
def test_a_weighted_mean_stays_between_its_two_values(most: float, *, of_products: bool) -> None:
    module, given = Gated(most, of_products=of_products).double(), box(3.0, torch.float64)
    found = output_bounds(prepared(module, WIDTH), given, "ibp")
    values = module(samples(given, 400, torch.Generator().manual_seed(1)).flatten(0, 1)).detach().reshape(400, 2, -1)
    assert bool((found.lower <= values.amin(dim=0) + 1e-9).all())
    assert bool((found.upper >= values.amax(dim=0) - 1e-9).all())
    assert bool((found.width < 2 + 1e-9).all()) is (most == 1)
