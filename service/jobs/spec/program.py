"""Defines references to programs: modules with a loop of their own, from installed packages, and exported modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from service.jobs.plugins import ProgramConfig, ProgramKind, Reason
from service.jobs.plugins.catalogue import catalogue
from service.jobs.plugins.declarations import one_of
from service.jobs.spec.common import FileId


class ExportedProgram(ProgramConfig):
    """A module from a notebook, as ``client.compile_check(module, example)`` exports and uploads it: its graphs, its
    tensors and an example, in one safetensors file.
    """

    name: Literal["exported"] = "exported"
    file: FileId = Field(description="the id of an uploaded export")

    def check(self, spec: Any) -> list[Reason]:
        """Return why the job cannot run it: it has one rank."""
        if spec.parallel.world_size == 1:
            return []
        message = f"an exported module runs on one rank, and {spec.parallel.arithmetic}"
        return [("parallel", message, spec.parallel.world_size, "1")]


PROGRAMS = catalogue(
    ProgramKind, (ProgramKind(ExportedProgram, "service.compilation.program.exported:exported_program"),)
)


class NoProgram(ProgramConfig):
    """Stands for programs if no installed package has one."""

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, value: Any) -> Any:
        raise ValueError("no installed package brings a program (entry points of trivet.programs)")


def _reference(forms: Sequence[Any]) -> Any:
    several = Field(discriminator=PROGRAMS.tag) if len(forms) > 1 else Field()
    return Annotated[
        one_of(tuple(forms)), several, BeforeValidator(PROGRAMS.refuse_unavailable), BeforeValidator(PROGRAMS.read_name)
    ]


if TYPE_CHECKING:
    ProgramRef = ProgramConfig
    InstalledProgramRef = ProgramConfig
else:
    ProgramRef = _reference([each.declaration.form for each in PROGRAMS.provided.values()])
    InstalledProgramRef = _reference(
        [each.declaration.form for name, each in PROGRAMS.provided.items() if name != "exported"] or [NoProgram]
    )
    """A program to be trained or run: the steps of an exported module have random targets, for compile checks alone."""
