"""Robustness within the range that inputs have."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from service.jobs.spec.verify import Robustness, RobustnessProperty
from service.verification.properties.base import PropertyError
from service.verification.properties.robustness import RobustSamples, robust_samples

OF_THREE = {"norm": 0, "entries": 3}


def asked(**changes: Any) -> RobustSamples:
    given = {"data": {"source": "digits"}, "count": 4, "eps": 0.25, **changes}
    return robust_samples(RobustnessProperty(robustness=Robustness.model_validate(given)), 64, 10)


@pytest.mark.parametrize(
    ("clip", "norm"), [("data", {}), ([0, 1], {}), ("data", {"norm": 2}), ([0, 1], {"norm": 1}), ("data", OF_THREE)]
)
def test_no_input_beyond_the_range_is_looked_at(clip: Any, norm: dict[str, Any]) -> None:
    whole, clipped = asked(**norm), asked(clip=clip, **norm)
    like = torch.empty(0)
    box, around = clipped.batch(range(4), like).box, whole.batch(range(4), like).box
    assert box.lower.min() == 0
    assert box.upper.max() == 1
    assert around.lower.min() == -0.25
    inside = (around.lower >= 0) & (around.upper <= 1)
    assert inside.any()
    assert torch.equal(box.lower[inside], around.lower[inside])
    slopes = torch.randn(1, 20, 64, generator=torch.Generator().manual_seed(0))
    assert (box.least(slopes) >= around.least(slopes)).all()
    assert (box.least(slopes) > around.least(slopes) + 1e-3).any()
    disjunct = clipped.query(0).disjuncts[0]
    assert min(disjunct.lower) == 0
    assert max(disjunct.upper) == Fraction(1)


def test_a_sample_beyond_the_range_is_refused() -> None:
    with pytest.raises(PropertyError, match=r"clip=\[0.0, 0.5\], but the samples have numbers from 0 to 1"):
        asked(clip=[0, 0.5])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"data": {"source": "synthetic"}}, "the range of source=synthetic is not known"),
        ({"data": {"source": "tokens"}}, "embeddings of tokens"),
        ({"clip": [1, 1]}, "the range is empty"),
    ],
)
def test_a_range_that_does_not_go_with_the_rest_is_refused(changes: dict[str, Any], reason: str) -> None:
    given = {"data": {"source": "digits"}, "eps": 0.1, "clip": "data", **changes}
    with pytest.raises(ValidationError, match=reason):
        Robustness.model_validate(given)
