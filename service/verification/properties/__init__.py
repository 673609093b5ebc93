"""Reads properties of models: one file and one line per form of property."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from service.jobs.files import DataLayout
from service.jobs.spec.verify import BoxProperty, RobustnessProperty, VnnlibProperty
from service.verification.properties.base import InstanceBatch, Property, PropertyError
from service.verification.properties.box import one_box
from service.verification.properties.queried import queried
from service.verification.properties.robustness import robust_samples

PROPERTIES: Mapping[type, Callable[[Any, int, int, DataLayout | None], Property]] = {
    RobustnessProperty: robust_samples,
    BoxProperty: one_box,
    VnnlibProperty: queried,
}


def read(
    spec: RobustnessProperty | BoxProperty | VnnlibProperty,
    features: int,
    classes: int,
    layout: DataLayout | None = None,
) -> Property:
    """Return the property for a model with that many inputs and outputs; ``layout`` has uploaded files."""
    return PROPERTIES[type(spec)](spec, features, classes, layout)


__all__ = ["InstanceBatch", "Property", "PropertyError", "read"]
