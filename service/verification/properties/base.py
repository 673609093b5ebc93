"""Defines a property as boxes and linear inequalities on the output, instance by instance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from service.bounds.interval import Interval
from service.formats.vnnlib import Halfspace, Query
from service.jobs.runtime import RefusedError


class PropertyError(RefusedError, ValueError):
    """The property does not fit the model or the data."""


@dataclass(frozen=True, eq=False)
class InstanceBatch:
    """A batch of instances: does ``rows · y ≥ thresholds`` hold for every row and every input of the box?

    ``box`` ``(batch, features)``, which may be a ball; ``rows`` ``(batch, rows, outputs)``; ``thresholds``
    ``(batch, rows)``; ``witnesses`` ``(batch, features)``, float64, one input of each exact box at which to look for a
    violation first. The box is rounded outwards, rows and thresholds to the nearest; ``violations`` are exact: outputs
    violate the property of an instance if one of its halfspaces contains them.
    """

    instances: Sequence[int]
    box: Interval
    rows: Tensor
    thresholds: Tensor
    witnesses: Tensor
    violations: Sequence[Sequence[Halfspace]]


class Property(Protocol):
    """All instances of one specification. ``eps`` is the radius, if there is one."""

    @property
    def count(self) -> int:
        """Return the number of instances."""

    @property
    def eps(self) -> float | None:
        """Return the radius, where there is one."""

    @property
    def has_labels(self) -> bool:
        """Return whether the witnesses are labelled samples, so that their violations measure accuracy."""

    def name(self, instance: int) -> str | None:
        """Return the user's name for the instance, if there is one."""

    def label(self, instance: int) -> int | None:
        """Return the class of its sample, if there is one."""

    def seconds(self, instance: int) -> float | None:
        """Return the seconds of search, if the property itself sets them."""

    def query(self, instance: int) -> Query | None:
        """Return the conditions of a counterexample of the instance; ``None`` if nothing has to hold."""

    def batch(self, instances: Sequence[int], like: Tensor) -> InstanceBatch:
        """Return these instances as tensors, in the dtype and on the device of ``like``."""


class Unnamed:
    """Instances of which nothing is known beside their boxes; a property answers what it knows more of."""

    def name(self, instance: int) -> str | None:
        return None

    def label(self, instance: int) -> int | None:
        return None

    def seconds(self, instance: int) -> float | None:
        return None


def below(coefficients: Mapping[int, float], threshold: float) -> Halfspace:
    """Return the halfspace ``Σ coefficients[j]·y[j] < threshold``."""
    return Halfspace(tuple(coefficients.items()), threshold, strict=True)
