"""Build an objective from its configuration."""

from __future__ import annotations

from service.jobs.plugins import ObjectiveConfig
from service.jobs.spec.objective import OBJECTIVES
from service.models.dotted import dotted
from service.training.objective.base import Factory, Objective, ObjectiveContext


def objective_for(config: ObjectiveConfig, context: ObjectiveContext) -> Objective:
    """Return the objective of that name; raises ``ValueError`` for one that this process does not know."""
    if config.name not in OBJECTIVES.provided:
        raise ValueError(f"no objective {config.name!r}; expected one of {', '.join(OBJECTIVES.provided)}")
    factory: Factory = dotted(OBJECTIVES.provided[config.name].declaration.factory)
    return factory(config, context)
