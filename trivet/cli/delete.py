"""The command that deletes ended jobs: named ones, or those that match a filter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trivet.cli.context import JsonFlag, add_commands, client, each_of, err, job_ids, out, past, print_json, refuse

if TYPE_CHECKING:
    from trivet.client import Client
    from trivet.filters import Deletions

_MOST_NAMED = 20
"""Jobs that stay are named up to this many."""
_Ids = Annotated[
    list[str] | None,
    typer.Argument(metavar="[ID...]", help="ids of jobs, or none with filters", autocompletion=job_ids),
]


def register(app: typer.Typer) -> None:
    add_commands(app, delete)


def delete(
    *,
    job_ids: _Ids = None,
    kind: Annotated[str | None, typer.Option(help="only this kind, such as train")] = None,
    state: Annotated[list[str] | None, typer.Option(help="succeeded, failed, cancelled; may be repeated")] = None,
    label: Annotated[str | None, typer.Option(help="KEY=VALUE, or KEY")] = None,
    owner: Annotated[str | None, typer.Option(help="name of the key that submitted")] = None,
    project: Annotated[str | None, typer.Option(help="only jobs of this project")] = None,
    q: Annotated[str | None, typer.Option("--query", "-q", help="part of an id, a name or a label")] = None,
    older_than: Annotated[
        str | None, typer.Option(metavar="AGE", help="only jobs that ended longer ago, such as 30d, or before a time")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only say how many, and which would stay")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Delete ended jobs with their artifacts: those named, or all that match every filter."""
    named = {"kind": kind, "label": label, "owner": owner, "project": project, "q": q}
    wanted: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    wanted |= {"state": state} if state else {}
    if empty := next((name for name, value in wanted.items() if not value), None):
        refuse(f"{'--query' if empty == 'q' else f'--{empty}'}: got an empty text, which would choose every job")
    wanted |= {} if older_than is None else {"ended_before": past(older_than)}
    if job_ids:
        if wanted or dry_run:
            refuse("name jobs, or filter them (--label, --state, --older-than, …), not both; --dry-run is for filters")
        _delete_named(job_ids, yes=yes)
    elif not wanted:
        refuse("nothing was deleted: name jobs, or filters such as --label, --state and --older-than")
    else:
        _delete_matching(wanted, dry_run=dry_run, yes=yes, as_json=as_json)


def _confirm(which: str, count: int, *, yes: bool) -> None:
    if not yes and not typer.confirm(f"delete {which} and {'its' if count == 1 else 'their'} artifacts?"):
        refuse("nothing was deleted")


def _delete_named(named: list[str], *, yes: bool) -> None:
    _confirm(named[0] if len(named) == 1 else f"{len(named)} jobs", len(named), yes=yes)
    with client() as service:
        _, code = each_of(named, service.delete)
    raise typer.Exit(code)


def _delete_matching(wanted: Mapping[str, Any], *, dry_run: bool, yes: bool, as_json: bool) -> None:
    with client() as service:
        found = service.delete_matching(**wanted, dry_run=True)
        if not dry_run:
            found = _delete_found(service, wanted, found, yes=yes)
    if as_json:
        print_json({"jobs": found.jobs, "kept": dict(found.kept)})
        return
    out.print(f"{len(found.jobs)} {'would be ' if dry_run else ''}deleted, {len(found.kept)} not")
    for job_id, why in list(found.kept.items())[:_MOST_NAMED]:
        err.block(f"{job_id}: {why}", indent=2)
    if len(found.kept) > _MOST_NAMED:
        err.print(f"and {len(found.kept) - _MOST_NAMED} more; --json names all")


def _delete_found(service: Client, wanted: Mapping[str, Any], found: Deletions, *, yes: bool) -> Deletions:
    """Delete what was found, once it is confirmed."""
    if not found.jobs:
        return found
    count = len(found.jobs)
    stay = f", of {count + len(found.kept)} that match," if found.kept else ""
    _confirm(f"{count} job{'' if count == 1 else 's'}{stay}", count, yes=yes)
    return service.delete_matching(**wanted)
