"""Lists kinds of jobs and all that specs can name, built in or installed."""

from __future__ import annotations

import inspect
from typing import Any

from pydantic import TypeAdapter

from service.jobs.kinds.registry import KINDS
from service.jobs.plugins.catalogue import Catalogue
from service.jobs.records.kinds import Choice, KindEntry, Kinds
from service.jobs.spec.data import SOURCES
from service.jobs.spec.families import FAMILIES
from service.jobs.spec.objective import OBJECTIVES
from service.jobs.spec.optimizer import OPTIMIZERS
from service.jobs.spec.program import PROGRAMS
from service.jobs.spec.rate import SCHEDULES


def all_kinds() -> Kinds:
    """Return the choices that this process found when it started."""
    groups: tuple[Catalogue[Any], ...] = (FAMILIES, SOURCES, OBJECTIVES, OPTIMIZERS, SCHEDULES, PROGRAMS, KINDS)
    return Kinds(
        items=tuple(
            KindEntry(
                kind=name,
                description=_description(provided.declaration.config),
                distribution=provided.distribution,
                version=provided.version,
            )
            for name, provided in KINDS.provided.items()
        ),
        families=_choices(FAMILIES),
        sources=_choices(SOURCES),
        objectives=_choices(OBJECTIVES),
        optimizers=_choices(OPTIMIZERS),
        schedules=_choices(SCHEDULES),
        programs=_choices(PROGRAMS),
        unavailable=tuple(broken for group in groups for broken in group.unavailable),
    )


def _choices(catalogue: Catalogue[Any]) -> tuple[Choice, ...]:
    return tuple(
        Choice(
            name=name,
            description=_description(each.declaration.config),
            distribution=each.distribution,
            version=each.version,
            schema=TypeAdapter(each.declaration.form).json_schema(),
        )
        for name, each in catalogue.provided.items()
    )


def _description(documented: type) -> str:
    return inspect.cleandoc(documented.__doc__ or "")
