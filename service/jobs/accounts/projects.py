"""Defines projects, which own keys, jobs and uploads, and the roles of their members."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

DEFAULT_PROJECT = "default"
"""The project of every key, job and upload that names none."""

PROJECT_PATTERN = r"^[a-z0-9][a-z0-9._-]{0,62}$"
ProjectName = Annotated[str, StringConstraints(pattern=PROJECT_PATTERN)]

Scope = Literal["read", "submit", "admin"]
"""The scopes of keys. Each includes those before it."""

Role = Literal["viewer", "submitter", "maintainer"]
"""The roles of members: read; also submit, and change their own jobs; also change all jobs of the project."""

SCOPES: tuple[Scope, ...] = ("read", "submit", "admin")
ROLES: tuple[Role, ...] = ("viewer", "submitter", "maintainer")

LONGEST_DESCRIPTION = 500


def owner_in(project: str, name: str) -> str:
    """Return one name for each owner: the same name in two projects may be two people."""
    return name if project == DEFAULT_PROJECT else f"{project}/{name}"


class Quotas(BaseModel):
    """Limits of a project; absent ones do not apply."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    queued_jobs: int | None = Field(None, ge=0, description="jobs that wait for devices or for other jobs")
    devices: int | None = Field(None, ge=0, description="devices that its jobs hold at once")
    device_hours: float | None = Field(
        None, ge=0, description="device-hours of its jobs in the last TRIVET_QUOTA_WINDOW_H hours"
    )
    highest_priority: int | None = Field(None, ge=-100, le=100, description="of a job")
    longest_time_s: float | None = Field(
        None, gt=0, description="longest `timeout_s` of a job, which then must have one"
    )
    default_time_s: float | None = Field(None, gt=0, description="`timeout_s` of a job that names none")
    upload_bytes: int | None = Field(None, ge=0, description="bytes of all uploads together")
    artifact_bytes: int | None = Field(
        None,
        ge=0,
        description="bytes of all artifacts, and of events in the broker, together; at this number no more jobs are "
        "accepted",
    )

    @property
    def refuse_their_default(self) -> bool:
        """Return whether a job that names no time limit would get one that these quotas refuse."""
        longest, default = self.longest_time_s, self.default_time_s
        return longest is not None and default is not None and default > longest


def parse_quotas(text: str) -> Quotas:
    """Read quotas that are written as ``NAME=NUMBER``, by comma. Raises ``ValueError`` with the entry that is wrong."""
    entries = [entry.strip().partition("=") for entry in text.split(",") if entry.strip()]
    names = [name for name, _, _ in entries]
    for name, _, number in entries:
        if name not in Quotas.model_fields or names.count(name) > 1:
            expected = f"each one once, of {', '.join(Quotas.model_fields)}"
            raise ValueError(f"{name!r} is no quota, or is given twice; expected {expected}")
        try:
            Quotas.model_validate({name: number})
        except ValidationError as error:
            raise ValueError(f"{name}={number}: {error.errors()[0]['msg']}") from None
    quotas = Quotas.model_validate({name: number for name, _, number in entries})
    if quotas.refuse_their_default:
        raise ValueError(f"default_time_s={quotas.default_time_s:g} is beyond longest_time_s={quotas.longest_time_s:g}")
    return quotas


class ProjectUsage(BaseModel):
    """A project's use of everything that has a quota."""

    queued_jobs: int
    devices: int
    device_hours: float
    upload_bytes: int
    artifact_bytes: int


class Project(BaseModel):
    """The owner of keys, jobs and uploads. The default project was never created, so it has no ``created_at``."""

    model_config = ConfigDict(frozen=True)

    name: str
    description: str = ""
    created_at: datetime | None = None
    quotas: Quotas = Quotas()
    scripts: bool = Field(False, description="whether its jobs may be scripts of their authors'")


class ProjectMember(BaseModel):
    """The owner of keys, by their name, and what it may do in a project."""

    model_config = ConfigDict(frozen=True)

    name: str
    role: Role


class ProjectDetails(Project):
    """A project with its members. Whoever has a key of the project `default` is a member of it."""

    members: list[ProjectMember]
    usage: ProjectUsage
