"""What can be asked of a model: one file and one line per form of property."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from service.jobs.spec.verify import BoxProperty, RobustnessProperty
from service.verification.properties.base import Property, PropertyError, Question
from service.verification.properties.box import one_box
from service.verification.properties.robustness import robust_samples

PROPERTIES: Mapping[type, Callable[[Any, int, int], Property]] = {
    RobustnessProperty: robust_samples,
    BoxProperty: one_box,
}


def read(spec: RobustnessProperty | BoxProperty, features: int, classes: int) -> Property:
    """The property of a specification for a model with that many inputs and outputs."""
    return PROPERTIES[type(spec)](spec, features, classes)


__all__ = ["PROPERTIES", "Property", "PropertyError", "Question", "read"]
