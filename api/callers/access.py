"""Decides which jobs and projects a caller may see and change: routes get jobs and projects only from here.

For a job that the caller may not see, the answer is as for one that does not exist.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

from fastapi import Depends, Query

from api.callers.context import StoreDep
from api.callers.security import Reader, Submitter
from api.requests import ProblemError
from service.jobs.accounts import Project, ProjectName
from service.jobs.records import ApiKey, Job, ListedJob, NotFound
from service.jobs.store import Store, in_loop

SomeJob = TypeVar("SomeJob", bound=ListedJob)


def _sees(caller: ApiKey, job: ListedJob) -> bool:
    """Return whether a caller may read a job and what it produced."""
    return caller.project is None or job.is_visible_to(caller.project)


def as_seen(caller: ApiKey, job: SomeJob) -> SomeJob:
    """Return a job as the caller may see it: only its own project learns with whom else it is shared."""
    if caller.project in (None, job.project):
        return job
    return job.model_copy(update={"shared_with": tuple(name for name in job.shared_with if name == caller.project)})


def visible_job(caller: ApiKey, store: Store, job_id: str) -> Job:
    """Return a job that the caller may read. Raises :class:`NotFound` for any other."""
    job = store.jobs.get(job_id)
    if not _sees(caller, job):
        raise NotFound(f"there is no job {job_id}")
    return as_seen(caller, job)


async def _readable(job_id: str, caller: Reader, store: StoreDep) -> Job:
    return await in_loop(visible_job, caller, store, job_id)


async def _changeable(job_id: str, caller: Submitter, store: StoreDep) -> Job:
    job = await in_loop(visible_job, caller, store, job_id)
    if (why := why_unchangeable(caller, job)) is not None:
        raise ProblemError(403, why)
    return job


def why_unchangeable(caller: ApiKey, job: ListedJob) -> str | None:
    """Return why a caller that may read a job may not change it; ``None`` if it may."""
    if caller.is_operator:
        return None
    if caller.project != job.project:
        return f"job {job.id} is shared with project '{caller.project}' to be read only"
    if job.owner != caller.name and caller.role != "maintainer":
        belongs = f"job {job.id} belongs to '{job.owner}' of project '{job.project}'"
        return f"{belongs}; only its owner, a maintainer of the project or an admin may change it"
    return None


ReadableJob = Annotated[Job, Depends(_readable)]
"""The job of the path, for those who may read it; 404 for everybody else."""
ChangeableJob = Annotated[Job, Depends(_changeable)]
"""The job of the path, for those who may change it; 404 for those who may not read it, else 403."""


async def _readable_project(name: str, caller: Reader, store: StoreDep) -> Project:
    if caller.project not in (None, name):
        raise NotFound(f"there is no project {name}")
    return await in_loop(store.projects.get, name)


async def _maintained_project(name: str, caller: Submitter, store: StoreDep) -> Project:
    project = await _readable_project(name, caller, store)
    if not caller.is_operator and caller.role != "maintainer":
        raise ProblemError(403, f"only a maintainer of project '{name}' or an admin may change its members")
    return project


async def _target_project(
    caller: Reader,
    store: StoreDep,
    project: Annotated[
        ProjectName | None,
        Query(description="the project, which only an operator's key may choose; `default` when absent"),
    ] = None,
) -> str:
    own = caller.submits_to
    if project in (None, own):
        return own
    if not caller.is_operator:
        raise ProblemError(403, f"this key submits to project '{own}'; only an operator's key may name another")
    return (await in_loop(store.projects.get, project)).name


ReadableProject = Annotated[Project, Depends(_readable_project)]
MaintainedProject = Annotated[Project, Depends(_maintained_project)]
TargetProject = Annotated[str, Depends(_target_project)]
"""The project of a submission: the key's, or the one that an operator names; 404 for one that does not exist."""
