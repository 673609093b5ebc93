"""Commands for uploads: list, delete."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from trivet.cli.context import JsonFlag, add_group, client, print_list
from trivet.cli.jobs import age

if TYPE_CHECKING:
    from service.jobs.records import Upload


_Project = Annotated[str | None, typer.Option(help="project of the uploads, for an operator's key")]


def register(app: typer.Typer) -> None:
    add_group(app, "uploads", "Uploaded files.", delete, first=uploads)


def uploads(context: typer.Context, project: _Project = None, as_json: JsonFlag = False) -> None:
    """List uploaded files, their use and when they expire; or: delete FILE."""
    if context.invoked_subcommand is not None:
        return
    with client() as service:
        found = list(service.uploads(project=project))
    columns = "file", "name", "bytes", "owner", "age", "last used", "expires", "jobs"
    print_list(found, as_json, columns, _row, "no uploads")


def _row(upload: Upload) -> tuple[str, ...]:
    made = "" if upload.created_at is None else age(upload.created_at)
    used = "" if upload.last_used_at is None else age(upload.last_used_at)
    return upload.id, upload.name, str(upload.bytes), upload.owner, made, used, _end(upload), str(upload.job_count)


def delete(file_id: Annotated[str, typer.Argument(metavar="FILE", help="its id")], project: _Project = None) -> None:
    """Delete an upload, unless an unfinished job of its project needs it."""
    with client() as service:
        service.delete_upload(file_id, project=project)


def _end(upload: Upload) -> str:
    if upload.in_use:
        return "in use"
    return "" if upload.expires_at is None else upload.expires_at.date().isoformat()
