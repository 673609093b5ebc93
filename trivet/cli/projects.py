"""Commands for projects, their members, and what they share."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from service.jobs.accounts import ROLES, Project, ProjectDetails, Quotas
from trivet.cli.context import (
    JobArgument,
    JsonFlag,
    add_commands,
    add_group,
    client,
    out,
    print_json,
    print_list,
    refuse,
    table,
)
from trivet.cli.jobs import age

_Name = Annotated[str, typer.Argument(metavar="PROJECT")]
_Member = Annotated[str, typer.Argument(metavar="NAME", help="the name of the member's keys")]


def register(app: typer.Typer) -> None:
    about = "Projects and their members."
    projects = add_group(
        app, "projects", about, list=list_projects, create=create, show=show, set=change, delete=delete
    )
    add_group(projects, "members", "Who may do what in a project.", set=set_member, remove=remove_member)
    add_commands(app, share)


def list_projects(as_json: JsonFlag = False) -> None:
    """List the projects that the key sees."""
    with client() as service:
        print_list(service.projects.list(), as_json, ("project", "made", "description"), _row)


def _row(project: Project) -> tuple[str, ...]:
    return project.name, "" if project.created_at is None else f"{age(project.created_at)} ago", project.description


def create(name: _Name, description: Annotated[str, typer.Option(help="what it is for")] = "") -> None:
    """Create a project."""
    with client() as service:
        out.write_line(service.projects.create(name, description).name)


def show(name: _Name, as_json: JsonFlag = False) -> None:
    """Show a project and its members."""
    with client() as service:
        _print(service.projects.get(name), as_json)


def change(
    name: _Name,
    description: Annotated[str | None, typer.Option(help="what it is for")] = None,
    quotas: Annotated[
        list[str] | None,
        typer.Option("--quota", metavar="NAME=NUMBER", help=f"{', '.join(Quotas.model_fields)}; NAME= for no limit"),
    ] = None,
    scripts: Annotated[
        bool | None, typer.Option("--scripts/--no-scripts", help="let its jobs be scripts of their authors'")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Change a project's description and quotas, and whether it may run scripts."""
    given = {"description": description, "scripts": scripts}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if quotas:
        changes["quotas"] = dict(map(_quota, quotas))
    if not changes:
        refuse("there is nothing to change; see: trivet projects set --help")
    with client() as service:
        _print(service.projects.change(name, **changes), as_json)


def delete(name: _Name) -> None:
    """Delete a project that has no jobs, uploads, keys, accounts or webhooks."""
    with client() as service:
        service.projects.delete(name)


def set_member(
    name: _Name,
    member: _Member,
    role: Annotated[str, typer.Argument(metavar="ROLE", help=", ".join(ROLES))],
    as_json: JsonFlag = False,
) -> None:
    """Give a member a role: its keys of the project may do no more."""
    if role not in ROLES:
        refuse(f"there is no role {role}; there are {', '.join(ROLES)}")
    with client() as service:
        _print(service.projects.set_member(name, member, role), as_json)


def remove_member(name: _Name, member: _Member) -> None:
    """End a membership: its keys of the project stop working."""
    with client() as service:
        service.projects.remove_member(name, member)


def share(
    job_id: JobArgument,
    project: Annotated[str, typer.Argument(metavar="PROJECT", help="project whose members may read the job")],
    stop: Annotated[bool, typer.Option("--stop", help="stop sharing it")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Let the members of another project read a job and what it produces, and name it in their specs."""
    with client() as service:
        job = service.stop_sharing(job_id, project) if stop else service.share(job_id, project)
    if as_json:
        print_json(job)
    else:
        out.print(f"{job.id} can be read by: {', '.join((job.project, *job.shared_with))}")


def _quota(words: str) -> tuple[str, str | None]:
    name, equals, value = words.partition("=")
    if not equals:
        refuse(f"--quota {words}: expected NAME=NUMBER, such as queued_jobs=200, or queued_jobs= for no limit")
    return name, value or None


def _print(project: ProjectDetails, as_json: bool) -> None:
    if as_json:
        print_json(project)
        return
    out.print(f"project {project.name}", style="bold")
    if project.description:
        out.block(f"  {project.description}", indent=2)
    if project.scripts:
        out.print("  scripts: true")
    for name, most in project.quotas.model_dump(exclude_none=True).items():
        used = getattr(project.usage, name, None)
        out.print(f"  {name}: {most if used is None else f'{used} of {most}'}")
    rows = table("member", "role")
    for member in project.members:
        rows.add_row(member.name, member.role)
    out.print(
        rows if project.members else "whoever has a key of it is a member" if not project.created_at else "no members"
    )
