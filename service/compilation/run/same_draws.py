"""Distinguishes results in another precision from results of other random numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from torch import Tensor

from service.compilation.run.built_program import StepRecord
from service.compilation.run.parity import scale_of
from service.compilation.run.sampling import Key

_ROUNDING = 1e-5
"""The distance, relative to their size, at which results are the same except for rounding."""


def draw_alike(eager: StepRecord, truth: StepRecord, redrawn: StepRecord) -> bool:
    """Return whether float64 is much nearer to eager than eager is to itself with other draws, unless these do not
    matter.
    """
    by_draws, by_type = (_apart(eager.tensors, each.tensors) for each in (redrawn, truth))
    return not by_draws or by_type <= max(by_draws / 4, _ROUNDING)


def _apart(one: Mapping[Key, Tensor], other: Mapping[Key, Tensor]) -> float:
    """Return how far results of an iteration are apart at most, as a part of the largest of their kind."""
    shared = [key for key in one.keys() & other.keys() if one[key].shape == other[key].shape]
    largest: dict[str, float] = defaultdict(float)
    for kind, name in shared:
        largest[kind] = max(largest[kind], scale_of(one[kind, name]))
    parts = (scale_of(one[key].double() - other[key].double()) / largest[key[0]] for key in shared if largest[key[0]])
    return max(parts, default=0.0)
