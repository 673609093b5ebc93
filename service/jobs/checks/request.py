"""A check as a message: what is asked of the process that checks, and what it answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from service.jobs.checks import check
from service.jobs.checks.dependencies import related
from service.jobs.checks.subject import AnySpec, Lookup
from service.jobs.layout import DataLayout
from service.jobs.llama import uploaded_config
from service.jobs.plugins import ModelConfig
from service.jobs.records import Job, Problem, Record
from service.jobs.spec import JobSpec

MOST_PROBLEMS = 100
"""In one answer; a job with more is refused for the first ones."""


class CheckLimits(Record):
    """What one check may use: bytes of memory and seconds of processor time."""

    memory_bytes: int
    processor_s: int


class CheckRequest(BaseModel):
    """A spec with all that its check asks for: the fleet, the jobs that it names, and the folder of uploaded files."""

    model_config = ConfigDict(frozen=True)

    spec: Annotated[JobSpec, Field()]
    fleet: dict[str, int] | None
    jobs: dict[str, Job]
    data: Path

    @classmethod
    def of(cls, spec: AnySpec, fleet: dict[str, int] | None, lookup: Lookup, data: DataLayout) -> CheckRequest:
        """The request about a spec; ``lookup`` is asked for every job that the check may need."""
        return cls(spec=spec, fleet=fleet, jobs=related(spec, lookup), data=data.root)

    def problems(self, opening: Callable[[str], None] = lambda _: None) -> list[Problem]:
        """Every reason why the job could never run, up to a number of them. ``opening`` is told the id of each
        uploaded file before it is read."""
        layout = DataLayout(self.data)

        def path_of(file_id: str) -> Path | None:
            path = layout.file(file_id)
            if not path.is_file():
                return None
            opening(file_id)
            return path

        def uploaded(file_id: str) -> ModelConfig | None:
            path = path_of(file_id)
            return None if path is None else uploaded_config(path)

        found = check(
            self.spec,
            self.fleet,
            self.jobs.get,
            lambda file_id: layout.file(file_id).is_file(),
            uploaded,
            path_of=path_of,
        )
        return [problem.shortened() for problem in found[:MOST_PROBLEMS]]
