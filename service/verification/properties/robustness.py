"""Reads the robustness of a classifier on the samples of a test split, by any of the norms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from service.bounds.balls import BALLS
from service.bounds.interval import Interval
from service.formats.vnnlib import BALLS as EXACT_BALLS
from service.formats.vnnlib import Disjunct, ExactBall, Halfspace, Query
from service.jobs.files import DataLayout
from service.jobs.plugins import Features
from service.jobs.spec.verify import Norm, RobustnessProperty
from service.verification.properties.base import InstanceBatch, PropertyError, Unnamed, below

if TYPE_CHECKING:
    from service.models.data import Split


@dataclass(frozen=True, eq=False)
class RobustSamples(Unnamed):
    """Margins ``y[label] − y[j] ≥ 0`` for every other class j, on ``|x − sample| ≤ eps`` entrywise or by norm; by the
    norm 0, where ``x`` and the sample differ in at most ``entries`` entries, by at most eps.

    The ball is clipped to ``limits``, the least and the greatest number of an input, which no sample exceeds; without
    them, the whole ball is certified. The witness is the sample itself, so a misclassified one is its own
    counterexample.
    """

    samples: Split
    classes: int
    eps: float
    norm: Norm = "inf"
    has_labels: bool = True
    limits: tuple[float, float] | None = None
    entries: int | None = None

    def __post_init__(self) -> None:
        if self.classes < 2:
            raise PropertyError(
                f"property.robustness: the model gives {self.classes} output, expected 2 classes or more"
            )
        inputs = self.samples.inputs.shape[1]
        if self.entries is not None and self.entries > inputs:
            raise PropertyError(
                f"property.robustness.entries={self.entries}, but a sample has {inputs} entries; all may change by "
                "norm=inf"
            )

    @property
    def count(self) -> int:
        return len(self.samples)

    def label(self, instance: int) -> int:
        return int(self.samples.take(torch.tensor([instance])).targets[0])

    def query(self, instance: int) -> Query:
        """Return a disjunct for each other class that comes above the label. A tie changes no class."""
        exact = self.samples.take(torch.tensor([instance])).inputs[0].double().tolist()
        eps = Fraction(self.eps)
        lower, upper = [Fraction(x) - eps for x in exact], [Fraction(x) + eps for x in exact]
        if self.limits is not None:
            least, most = map(Fraction, self.limits)
            lower, upper = [max(each, least) for each in lower], [min(each, most) for each in upper]
        disjuncts = tuple(
            Disjunct(tuple(lower), tuple(upper), (each,)) for each in self._violations(self.label(instance))
        )
        return Query(len(lower), self.classes, disjuncts, self._exact_ball(tuple(exact)))

    def batch(self, instances: Sequence[int], like: Tensor) -> InstanceBatch:
        chosen = self.samples.take(torch.tensor(list(instances)))
        exact = chosen.inputs.to(like.device, torch.float64)
        rows = margin_rows(chosen.targets.to(like.device), self.classes, like.dtype)
        ends = self._ends(exact)
        if self.norm == "inf":
            box = Interval.enclosing(ends.lower, ends.upper, like.dtype)
        else:
            box = BALLS[self.norm].within(exact, self._size, ends, like.dtype)
        violations = [self._violations(label) for label in chosen.targets.tolist()]
        return InstanceBatch(instances, box, rows, rows.new_zeros(rows.shape[:2]), exact, violations)

    @property
    def _size(self) -> float:
        return self.eps if self.entries is None else self.entries

    def _exact_ball(self, sample: tuple[float, ...]) -> ExactBall | None:
        return None if self.norm == "inf" else EXACT_BALLS[self.norm](sample, self._size)

    def _ends(self, exact: Tensor) -> Interval:
        """Return the smallest float64 box that holds the ball in the maximum norm, clipped to the limits."""
        box = Interval.about(exact, self.eps)
        if self.limits is None:
            return box
        least, most = self.limits
        return box.map(lambda end: end.clamp(least, most))

    def _violations(self, label: int) -> tuple[Halfspace, ...]:
        others = (each for each in range(self.classes) if each != label)
        return tuple(below({label: 1.0, other: -1.0}, 0.0) for other in others)


def margin_rows(labels: Tensor, classes: int, dtype: torch.dtype) -> Tensor:
    """Return ``e_label − e_j`` for every other j in ascending order, ``(batch, classes − 1, classes)``."""
    identity = torch.eye(classes, dtype=dtype, device=labels.device)
    others = (labels.unsqueeze(1) != torch.arange(classes, device=labels.device)).unsqueeze(-1)
    margins = identity[labels].unsqueeze(1) - identity.unsqueeze(0)
    return margins.masked_select(others).reshape(len(labels), classes - 1, classes)


def robust_samples(
    spec: RobustnessProperty, features: int, classes: int, layout: DataLayout | None = None
) -> RobustSamples:
    """Return the first ``count`` test samples; raise :class:`PropertyError` if the data does not fit.

    ``layout`` has uploaded files.
    """
    asked = spec.robustness
    samples = first_samples(spec, layout)
    own, gives = samples.inputs.shape[1], asked.data.gives
    if own != features:
        raise PropertyError(f"property.robustness.data has {own} features, the model takes {features}")
    if not isinstance(gives, Features):
        raise PropertyError(f"property.robustness.data.source {asked.data.source} has no classes")
    if gives.classes > classes:
        raise PropertyError(
            f"property.robustness.data has class {gives.classes - 1}, the model gives {classes} outputs"
        )
    if asked.limits is not None:
        _check_within(samples.inputs, asked.limits)
    return RobustSamples(samples, classes, asked.eps, asked.norm, limits=asked.limits, entries=asked.entries)


def first_samples(spec: RobustnessProperty, layout: DataLayout | None) -> Split:
    """Return the samples that the property is about. Raises :class:`PropertyError` if there are fewer."""
    from service.models.data import load, without_ignored  # noqa: PLC0415 - other properties need no data

    asked = spec.robustness
    test = without_ignored(load(asked.data, layout), "property.robustness").test
    if asked.count > len(test):
        raise PropertyError(f"property.robustness.count={asked.count}, but the test split has {len(test)} samples")
    return test.take(torch.arange(asked.count))


def _check_within(inputs: Tensor, limits: tuple[float, float]) -> None:
    least, most = float(inputs.min()), float(inputs.max())
    if least < limits[0] or most > limits[1]:
        raise PropertyError(
            f"property.robustness.clip={list(limits)}, but the samples have numbers from {least:g} to {most:g}"
        )
