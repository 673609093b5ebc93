"""Means of constants under a softmax: as tight as they can be over a box of scores, however a model spells them."""

from __future__ import annotations

from functools import cache
from itertools import product

import mpmath
import pytest
import torch
from nets import output_bounds, prepared, samples
from torch import Tensor, nn

from service.bounds.expectations import Expectation, expectations_of
from service.bounds.interval import Interval
from service.bounds.methods import METHODS, BoundOptions
from service.bounds.network import Network
from service.bounds.ranges import Softmax
from service.bounds.rigorous import rigorous_crown

BINS, SUMS = 4, 2
FORMS = ["kernel", "matrix", "matrix from the left", "product and sum", "masked"]


class Head(nn.Module):
    """Two softmaxes over four scores each, and the mean of their bins in one of the forms."""

    def __init__(self, form: str, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form = form
        self.register_buffer("bins", torch.tensor([[-1.0, 0.0, 2.5, 3.0], [4.0, 1.0, 1.0, -7.0]], dtype=dtype))
        self.register_buffer("mask", torch.tensor([[1.0, 0.5, 0.0, 1.0]], dtype=dtype))
        self.kernel, self.matrix = nn.Conv2d(BINS, 2, 1, dtype=dtype), nn.Linear(BINS, 2, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        scores = x.reshape(-1, SUMS, BINS)
        if self.form == "kernel":
            return self.kernel(scores.transpose(1, 2).unsqueeze(-1).softmax(1)).flatten(1)
        if self.form == "matrix from the left":
            return (self.bins @ scores.transpose(1, 2).softmax(1)).flatten(1)
        if self.form == "masked":
            powers = scores.exp() * self.mask
            return self.matrix(powers / powers.sum(-1, keepdim=True)).flatten(1)
        shares = scores.softmax(-1)
        return self.matrix(shares).flatten(1) if self.form == "matrix" else (shares * self.bins[0]).sum(-1)


@cache
def network(form: str, dtype: torch.dtype = torch.float64) -> Network:
    return prepared(Head(form, dtype).requires_grad_(False), SUMS * BINS)


def boxed(radius: float, dtype: torch.dtype = torch.float64) -> Interval:
    centre = torch.randn(2, SUMS * BINS, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(dtype)
    return Interval(centre - radius, centre + radius)


@pytest.mark.parametrize("form", FORMS)
def test_they_are_exact_over_a_box_of_scores(form: str) -> None:
    """Against all corners of the box: two sums of four scores each."""
    module, box = Head(form).requires_grad_(False), boxed(1.5)
    found = output_bounds(network(form), box, "ibp")
    signs = torch.tensor(list(product([0.0, 1.0], repeat=SUMS * BINS)), dtype=torch.float64)
    values = module((box.lower + signs[:, None] * box.width).flatten(0, 1)).reshape(len(signs), 2, -1)
    torch.testing.assert_close(found.lower, values.amin(dim=0), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.upper, values.amax(dim=0), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("radius", [0.0, 0.3, 40.0, 2000.0])
def test_no_value_leaves_them_in_float32(form: str, radius: float) -> None:
    """Nor are they wider than the bins are apart, unless powers overflow: by hand no largest score is subtracted."""
    box = boxed(radius, torch.float32)
    points = samples(box, 100, torch.Generator().manual_seed(1)).flatten(0, 1).double()
    values = Head(form, torch.float32).requires_grad_(False).double()(points).reshape(100, 2, -1)
    known = values.isfinite()
    for method in ("ibp", "crown"):
        found = output_bounds(network(form, torch.float32), box, method)
        assert bool((found.lower - 1e-4 <= values)[known].all())
        assert bool((found.upper + 1e-4 >= values)[known].all())
        if form != "masked" or radius < 80:
            assert bool((found.width <= 11.1).all())


@pytest.mark.parametrize("form", FORMS)
def test_they_hold_rigorously(form: str) -> None:
    size, box = network(form).graph.output.size, boxed(2.0)
    rows = torch.cat([torch.eye(size), -torch.eye(size)])[None].double()
    found = rigorous_crown(network(form), box, BoundOptions()).lower_bounds(rows)
    plain = METHODS["ibp"](network(form), box, BoundOptions()).lower_bounds(rows)
    assert bool((found >= plain - 1e-9).all())


def test_a_mean_holds_to_many_digits() -> None:
    """Of single points, whose own rounding is a thousand times what a mean of their powers may lose."""
    weights = torch.tensor([[[3.7, -0.2, 11.0]]], dtype=torch.float64)
    for seed in range(20):
        x = torch.randn(1, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 700 * (-1) ** seed
        powers = [mpmath.exp(mpmath.mpf(each)) for each in x[0].tolist()]
        terms = (mpmath.mpf(w) * power for w, power in zip(weights.flatten().tolist(), powers, strict=True))
        value = mpmath.fsum(terms) / mpmath.fsum(powers)
        mean = Expectation(Softmax("x", (0,), None), "p", torch.tensor([[0, 1, 2]]), weights, None, (), 0)
        unknown = torch.full((1, 1), torch.inf, dtype=torch.float64)
        found = mean.narrowed(Interval(-unknown, unknown), {"x": Interval.point(x)})
        assert mpmath.mpf(found.lower.item()) <= value <= mpmath.mpf(found.upper.item())
        assert found.width.item() < 1e-12


class Others(nn.Module):
    """Sums that are no means: over a part of the shares, over another dimension, of what depends on the input, and at
    other places.
    """

    def forward(self, x: Tensor) -> Tensor:
        scores, bins = x.reshape(-1, SUMS, BINS), torch.arange(3.0, dtype=x.dtype)
        shares = scores.softmax(-1)
        part, other = (shares[..., :3] * bins).sum(-1), (shares * bins[:2, None]).sum(1)
        moved = nn.functional.conv1d(scores.softmax(1), bins[:2].view(1, 2, 1), stride=2, padding=2).flatten(1)
        return torch.cat([part, other, (shares * scores).sum(-1), (shares * bins[1:2]).mean(-1), moved], dim=1)


def test_other_sums_of_shares_are_none() -> None:
    assert expectations_of(prepared(Others(), SUMS * BINS).graph) == {}
