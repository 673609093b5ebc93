"""Defines the kinds of jobs and all that specs can name, as a service lists them."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from service.jobs.records import FrozenModel


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
