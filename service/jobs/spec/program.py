"""Defines references to programs: modules with a loop of their own, which only installed packages bring."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from service.jobs.plugins import ProgramConfig, ProgramKind
from service.jobs.plugins.catalogue import catalogue

PROGRAMS = catalogue(ProgramKind, ())


class NoProgram(ProgramConfig):
    """Stands for programs if no installed package has one."""

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, value: Any) -> Any:
        raise ValueError("no installed package brings a program (entry points of trivet.programs)")


def _named(value: Any) -> Any:
    """Read a bare name as the program of that name with nothing to set."""
    return {"name": value} if isinstance(value, str) else value


if TYPE_CHECKING:
    ProgramRef = ProgramConfig
else:
    _several = Field(discriminator=PROGRAMS.tag) if len(PROGRAMS.provided) > 1 else Field()
    ProgramRef = Annotated[
        PROGRAMS.union() if PROGRAMS.provided else NoProgram,
        _several,
        BeforeValidator(PROGRAMS.refuse_unavailable),
        BeforeValidator(_named),
    ]
