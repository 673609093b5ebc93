"""Serves projects, their members, and the jobs that they share."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request, status
from pydantic import BaseModel, Field

from api.callers import Admin, ChangeableJob, MaintainedProject, ReadableProject, Reader, StoreDep, audit
from api.requests import StrictRoute
from api.routes.keys import KeyName
from service.jobs.accounts import LONGEST_DESCRIPTION, Project, ProjectDetails, ProjectName, Quotas, Role
from service.jobs.records import Job

router = APIRouter(tags=["projects"], route_class=StrictRoute)

_Owner = Annotated[KeyName, Path(description="the name of the member's keys")]


class NewProject(BaseModel, extra="forbid"):
    """A new project, which can own keys, jobs and uploads."""

    name: ProjectName
    description: str = Field("", max_length=LONGEST_DESCRIPTION)


class ProjectChange(BaseModel, extra="forbid"):
    """Changes to a project; absent fields stay."""

    description: str | None = Field(None, max_length=LONGEST_DESCRIPTION)
    scripts: bool | None = Field(None, description="whether its jobs may be scripts of their authors'")
    quotas: Quotas = Field(Quotas(), description="only the given ones change; null removes one")


class MemberRole(BaseModel, extra="forbid"):
    """A member's role: read; also submit; also change all jobs and the members."""

    role: Role


class ShareWith(BaseModel, extra="forbid"):
    """The project whose members may read a job and what it produces."""

    project: ProjectName


class ProjectList(BaseModel):
    items: list[Project]


@router.get("/projects")
def list_projects(key: Reader, store: StoreDep) -> ProjectList:
    """List the key's project; all projects to an operator."""
    return ProjectList(items=store.projects.all() if key.project is None else [store.projects.get(key.project)])


@router.post("/projects", status_code=status.HTTP_201_CREATED)
def create_project(body: NewProject, request: Request, key: Admin, store: StoreDep) -> Project:
    """Create a project."""
    made = store.projects.create(body.name, body.description)
    audit(request, "project.create", subject=made.name)
    return made


@router.get("/projects/{name}")
def get_project(project: ReadableProject, store: StoreDep) -> ProjectDetails:
    """Return a project and its members."""
    return _details(store, project)


@router.patch("/projects/{name}")
def change_project(name: str, body: ProjectChange, request: Request, key: Admin, store: StoreDep) -> ProjectDetails:
    """Change a project."""
    fields = body.model_dump(include={"description", "scripts"}, exclude_none=True)
    changed = store.projects.change(name, body.quotas.model_dump(exclude_unset=True), **fields)
    audit(request, "project.change", subject=name, changes=body.model_dump_json(exclude_unset=True))
    return _details(store, changed)


@router.delete("/projects/{name}", status_code=status.HTTP_204_NO_CONTENT)
def delete_project(name: str, request: Request, key: Admin, store: StoreDep) -> None:
    """Delete a project that has no jobs, uploads, keys, accounts or webhooks."""
    store.projects.delete(name)
    audit(request, "project.delete", subject=name)


@router.put("/projects/{name}/members/{owner}")
def set_member(
    project: MaintainedProject, owner: _Owner, body: MemberRole, request: Request, store: StoreDep
) -> ProjectDetails:
    """Give the owner of keys a role in a project. At once, its keys may do no more than the role."""
    store.projects.set_member(project.name, owner, body.role)
    audit(request, "member.set", subject=owner, project=project.name, role=body.role)
    return _details(store, project)


@router.delete("/projects/{name}/members/{owner}", status_code=status.HTTP_204_NO_CONTENT)
def remove_member(project: MaintainedProject, owner: _Owner, request: Request, store: StoreDep) -> None:
    """End a membership: from now on, keys of that name do not open the project, and their streams end."""
    store.projects.remove_member(project.name, owner)
    audit(request, "member.remove", subject=owner, project=project.name)


@router.post("/jobs/{job_id}/share")
def share_job(job: ChangeableJob, body: ShareWith, request: Request, store: StoreDep) -> Job:
    """Let the members of another project read a job, its events and its artifacts, and name it in their specs."""
    shared = store.jobs.share(job.id, body.project)
    audit(request, "job.share", job=job.id, project=body.project)
    return shared


@router.delete("/jobs/{job_id}/share/{project}")
def stop_sharing_job(job: ChangeableJob, project: ProjectName, request: Request, store: StoreDep) -> Job:
    """Stop sharing a job with a project; jobs there that were accepted meanwhile keep what they need."""
    own = store.jobs.stop_sharing(job.id, project)
    audit(request, "job.unshare", job=job.id, project=project)
    return own


def _details(store: StoreDep, project: Project) -> ProjectDetails:
    return ProjectDetails(
        **project.model_dump(), members=store.projects.members(project.name), usage=store.projects.usage(project.name)
    )
