"""The ends of boxes: halves that lose nothing, and sums that are rounded outwards, against rational numbers."""

from __future__ import annotations

from fractions import Fraction

import torch

from service.bounds.interval import Interval, sum_above


def test_centre_and_radius_reach_both_ends() -> None:
    draw = torch.Generator().manual_seed(0)
    ends = torch.randn(2, 500, 3, generator=draw, dtype=torch.float64)
    box = Interval(ends.amin(dim=0), ends.amax(dim=0))
    torch.testing.assert_close(box.centre - box.radius, box.lower)
    torch.testing.assert_close(box.centre + box.radius, box.upper)
    largest = torch.finfo(torch.float64).max
    whole = Interval(*torch.tensor([[-largest], [largest]], dtype=torch.float64))
    assert (whole.centre.item(), whole.radius.item()) == (0.0, largest)


def test_a_sum_is_the_least_number_that_is_not_below_it() -> None:
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(2000, generator=draw, dtype=torch.float64) * 10.0 ** torch.randint(
        -9, 9, (2000,), generator=draw
    )
    for more in (0.1, 1e-12, 3e5):
        exact = [Fraction(value) + Fraction(more) for value in values.tolist()]
        found = sum_above(values, more)
        below = torch.nextafter(found, torch.full_like(found, -torch.inf))
        assert all(Fraction(each) >= truth for each, truth in zip(found.tolist(), exact, strict=True))
        assert all(Fraction(each) < truth for each, truth in zip(below.tolist(), exact, strict=True))
