"""Lists kinds of jobs and all that specs can name, built in or installed."""

from __future__ import annotations

import inspect
from typing import Any

from pydantic import Field, TypeAdapter

from service.jobs.kinds.registry import KINDS
from service.jobs.plugins.catalogue import Catalogue
from service.jobs.records import FrozenModel
from service.jobs.spec.compile import PROGRAMS
from service.jobs.spec.data import SOURCES
from service.jobs.spec.families import FAMILIES
from service.jobs.spec.objective import OBJECTIVES
from service.jobs.spec.optimizer import OPTIMIZERS
from service.jobs.spec.rate import SCHEDULES


class KindEntry(FrozenModel):
    """A kind of job, and the installed distribution that provides it; ``/kinds/{kind}/schema`` has its JSON Schema."""

    kind: str
    description: str
    distribution: str
    version: str


class Choice(FrozenModel):
    """Something that a spec can name, and the installed distribution that provides it."""

    name: str
    description: str
    distribution: str
    version: str
    schema_: dict[str, Any] = Field(alias="schema", description="JSON Schema of its configuration")


class BrokenChoice(FrozenModel):
    """An installed entry point that cannot be used, and why."""

    group: str
    name: str
    distribution: str
    version: str
    reason: str


class Kinds(FrozenModel):
    items: tuple[KindEntry, ...]
    families: tuple[Choice, ...]
    sources: tuple[Choice, ...]
    objectives: tuple[Choice, ...]
    optimizers: tuple[Choice, ...] = ()
    schedules: tuple[Choice, ...] = ()
    programs: tuple[Choice, ...]
    unavailable: tuple[BrokenChoice, ...]


def all_kinds() -> Kinds:
    """Return the choices that this process found when it started."""
    groups: tuple[Catalogue[Any], ...] = (FAMILIES, SOURCES, OBJECTIVES, OPTIMIZERS, SCHEDULES, PROGRAMS, KINDS)
    broken = [entry for group in groups for entry in group.unavailable]
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
        unavailable=tuple(BrokenChoice(**vars(each)) for each in broken),
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
