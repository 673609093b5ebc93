"""Reads the property of one box: bounds of the outputs, with or without halfspaces that must hold there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from service.bounds.interval import Interval
from service.formats.vnnlib import Disjunct, Halfspace, Query
from service.jobs.files import DataLayout
from service.jobs.spec.verify import Box, BoxProperty
from service.verification.properties.base import InstanceBatch, PropertyError, Unnamed, below


@dataclass(frozen=True, eq=False)
class OneBox(Unnamed):
    """One instance; the witness is the centre. Without halfspaces there is nothing to prove, only bounds."""

    box: Box
    classes: int
    count: int = 1
    eps: float | None = None
    has_labels: bool = False

    def query(self, instance: int) -> Query | None:
        """Return the query for a violation; equality is not a violation."""
        disjuncts = tuple(Disjunct(self.box.lower, self.box.upper, (each,)) for each in self._violations)
        return Query(len(self.box.lower), self.classes, disjuncts) if disjuncts else None

    def batch(self, instances: Sequence[int], like: Tensor) -> InstanceBatch:
        lower, upper = (
            torch.tensor([end], dtype=torch.float64, device=like.device) for end in (self.box.lower, self.box.upper)
        )
        rows = like.new_tensor([halfspace.coefficients for halfspace in self.box.output])
        thresholds = like.new_tensor([halfspace.threshold for halfspace in self.box.output])
        exact = Interval(lower, upper)
        return InstanceBatch(
            instances,
            Interval.enclosing(lower, upper, like.dtype),
            rows.reshape(1, -1, self.classes),
            thresholds.reshape(1, -1),
            exact.nearest(exact.centre),
            [self._violations],
        )

    @property
    def _violations(self) -> tuple[Halfspace, ...]:
        return tuple(below(dict(enumerate(each.coefficients)), each.threshold) for each in self.box.output)


def one_box(spec: BoxProperty, features: int, classes: int, layout: DataLayout | None = None) -> OneBox:
    """Return the property; raise :class:`PropertyError` if the box or a halfspace does not fit the model."""
    if len(spec.box.lower) != features:
        raise PropertyError(f"property.box.lower has {len(spec.box.lower)} entries, the model takes {features}")
    for index, halfspace in enumerate(spec.box.output):
        if len(halfspace.coefficients) != classes:
            raise PropertyError(
                f"property.box.output.{index}.coefficients has {len(halfspace.coefficients)} entries, "
                f"the model gives {classes} outputs"
            )
    return OneBox(spec.box, classes)
