"""Commands for the queue: which jobs wait, why, and until when; what projects have used of the fleet."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from trivet.cli.context import JsonFlag, add_commands, add_group, client, out, print_json, print_list, table

if TYPE_CHECKING:
    from service.jobs.records import ProjectShare, QueueLine, StartEstimate

_BASES = {
    "durations": "how long earlier jobs of the kind took",
    "limits": "time limits",
    "progress": "the progress of running jobs",
}


def register(app: typer.Typer) -> None:
    add_commands(app, queue)
    add_group(app, "shares", "Shares of projects.", weigh, first=shares)


def queue(
    *,
    job: Annotated[str | None, typer.Argument(metavar="[ID]", help="only this job")] = None,
    owner: Annotated[str | None, typer.Option(help="name of the key that submitted")] = None,
    project: Annotated[str | None, typer.Option(help="only jobs of this project")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=1000)] = 20,
    cursor: Annotated[str | None, typer.Option(help="cursor that the previous page printed")] = None,
    as_json: JsonFlag = False,
) -> None:
    """List waiting jobs in the order of placement: why each waits, and when it may start."""
    with client() as service:
        page = service.queue_page(job=job, owner=owner, project=project, limit=limit, cursor=cursor)
    if as_json:
        print_json(page)
        return
    rows = table("place", "id", "name", "owner", "project", "priority", "start", "waits")
    for line in page.items:
        words = (line.job, line.name, line.owner, line.project, str(line.priority), start(line), line.reason or "")
        rows.add_row("" if line.place is None else str(line.place), *words)
    out.print(rows if page.items else "nothing waits")
    if page.next_cursor is not None:
        out.print(
            f"{page.pending} wait for devices, {page.dependent} for other jobs; more: --cursor {page.next_cursor}"
        )


def start(line: QueueLine) -> str:
    """Return when the job may start and the basis of that estimate, for people."""
    if line.start is None:
        return "" if line.place is None else "unknown"
    return _from_now(line.start)


def _from_now(estimate: StartEstimate) -> str:
    if not estimate.rests_on:
        return "now"
    minutes = (estimate.at - datetime.now(UTC)).total_seconds() / 60
    when = f"in {minutes / 60:.1f} h" if minutes >= 90 else f"in {max(minutes, 0):.0f} min"
    return f"{when}, by {' and '.join(_BASES[basis] for basis in estimate.rests_on)}"


def shares(context: typer.Context, as_json: JsonFlag = False) -> None:
    """List what projects have used, first the one that is next at equal priority; or: weigh PROJECT WEIGHT."""
    if context.invoked_subcommand is not None:
        return
    with client() as service:
        columns = "project", "weight", "device hours", "holds"
        print_list(service.shares(), as_json, columns, _share_row, "no project has used anything")


def _share_row(share: ProjectShare) -> tuple[str, ...]:
    return share.project, f"{share.weight:g}", f"{share.used_s / 3600:.2f}", str(share.devices)


def weigh(
    project: Annotated[str, typer.Argument(help="project")],
    weight: Annotated[float, typer.Argument(help="one of weight 2 may use twice as much as one of weight 1")],
) -> None:
    """Give a project a weight (needs an admin key)."""
    with client() as service:
        out.print(f"{project} has weight {service.weigh(project, weight).weight:g}")
