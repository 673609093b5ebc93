"""Defines references to programs: modules with a loop of their own, from installed packages, and exported modules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from service.jobs.plugins import ProgramConfig, ProgramKind, Reason
from service.jobs.plugins.catalogue import catalogue
from service.jobs.spec.common import FileId


class ExportedProgram(ProgramConfig):
    """A module from a notebook, as ``client.compile_check(module, example)`` exports and uploads it: its graphs, its
    tensors and an example, in one safetensors file.
    """

    name: Literal["exported"] = "exported"
    file: FileId = Field(description="the id of an uploaded export")

    def check(self, spec: Any) -> list[Reason]:
        """Return why the job cannot run it: it has one rank, and steps towards random targets, which a compile check
        compares and nothing else needs.
        """
        if spec.kind != "compile":
            message = f"an exported module is for compile checks, and this job is of kind {spec.kind}"
            return [("program.name", message, self.name, "a program of an installed package")]
        if spec.parallel.world_size == 1:
            return []
        message = f"an exported module runs on one rank, and {spec.parallel.arithmetic}"
        return [("parallel", message, spec.parallel.world_size, "1")]


PROGRAMS = catalogue(
    ProgramKind, (ProgramKind(ExportedProgram, "service.compilation.program.exported:exported_program"),)
)


if TYPE_CHECKING:
    ProgramRef = ProgramConfig
else:
    _several = Field(discriminator=PROGRAMS.tag) if len(PROGRAMS.provided) > 1 else Field()
    ProgramRef = Annotated[
        PROGRAMS.union(),
        _several,
        BeforeValidator(PROGRAMS.refuse_unavailable),
        BeforeValidator(PROGRAMS.read_name),
    ]
