"""Commands for jobs: list, show, cancel, retry."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer
from rich.text import Text

from service.jobs.spec.common import STATES, JobState
from service.jobs.text import documents, visible
from trivet import tables
from trivet.cli.context import (
    CsvFlag,
    JobArgument,
    JobArguments,
    JsonFlag,
    add_commands,
    client,
    each_of,
    err,
    out,
    plain,
    print_csv,
    print_json,
    table,
)
from trivet.cli.sweeps import show_jobs, shown, why

if TYPE_CHECKING:
    from service.jobs.records import Job, JobPhase, ListedJob
    from service.jobs.records.webhooks import WebhookDelivery
    from trivet.client import Client

_MOST_CHANGES = 500
"""The most changes of state that are searched for reasons."""
_STYLES = {"succeeded": "green", "failed": "red", "cancelled": "yellow", "running": "cyan", "starting": "cyan"}


def register(app: typer.Typer) -> None:
    add_commands(app, jobs=list_jobs)
    add_commands(app, show, compare, cancel, retry)


def list_jobs(
    *,
    kind: Annotated[str | None, typer.Option(help="only this kind, such as train")] = None,
    state: Annotated[list[str] | None, typer.Option(help=f"{', '.join(STATES)}; may be repeated")] = None,
    label: Annotated[str | None, typer.Option(help="KEY=VALUE, or KEY")] = None,
    owner: Annotated[str | None, typer.Option(help="name of the key that submitted")] = None,
    project: Annotated[str | None, typer.Option(help="only jobs of this project")] = None,
    sweep: Annotated[
        str,
        typer.Option(
            help="only jobs of the sweep with this id; all: list the jobs of sweeps too, not one line per sweep"
        ),
    ] = "none",
    q: Annotated[str | None, typer.Option("--query", "-q", help="part of an id, a name or a label")] = None,
    order: Annotated[
        Literal["newest", "active"],
        typer.Option(help="active: running jobs, then the queue in its order, then ended jobs"),
    ] = "newest",
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=1000)] = 20,
    as_json: JsonFlag = False,
    as_csv: CsvFlag = False,
) -> None:
    """List jobs, newest first."""
    with client() as service:
        page = service.job_page(
            kind=kind,
            state=cast(list[JobState] | None, state),
            label=label,
            owner=owner,
            project=project,
            sweep=None if sweep == "all" else sweep,
            q=q,
            order=order,
            limit=limit,
        )
    if as_json:
        print_json(page)
        return
    if as_csv:
        print_csv(tables.job_rows(page.items))
    else:
        rows = table("id", "kind", "name", "state", "progress", "age", "owner", "why")
        for job in page.items:
            facts = (_state(job), _progress(job), age(job.created_at), job.owner, why(job))
            rows.add_row(job.id, job.kind, job.name, *facts)
        out.print(rows if page.items else "no jobs")
    if page.next_cursor is not None:
        err.print(f"these are the {'newest' if order == 'newest' else 'first'} {len(page.items)}; --limit shows more")


def show(job_id: JobArgument, as_json: JsonFlag = False) -> None:
    """Show one job: state, placement, spec, result."""
    with client() as service:
        job = service.job(job_id)
        if as_json:
            print_json(job)
            return
        _show_facts(job)
        _show_reasons(service, job)
        _show_notices(service, job)
        if job.children is not None:
            show_jobs(service, job, out)


def compare(job_ids: JobArguments, as_json: JsonFlag = False, as_csv: CsvFlag = False) -> None:
    """Compare jobs, or the jobs of sweeps: the fields in which their specs differ, and their results.

    The table leaves out what is alike in all jobs, and lists; --csv and --json have them.
    """
    with client() as service:
        found = [each for job_id in job_ids for each in _jobs_behind(service, service.job(job_id))]
    rows = tables.compared_rows(found)
    if as_json:
        print_json({"items": rows})
    elif as_csv:
        print_csv(rows)
    else:
        names, alike = _telling(rows)
        values = table(*names)
        for row in rows:
            values.add_row(*("" if row.get(name) is None else shown(row[name]) for name in names))
        out.print(values)
        if alike:
            err.print(f"{alike} more columns are alike in all jobs, or lists: --csv has them", style="dim")


def _telling(rows: list[tables.Row]) -> tuple[list[str], int]:
    """Return the columns that tell jobs apart in a terminal, and the number of others."""
    every = tables.columns(rows)
    found = [name for name in every if len(rows) == 1 or len({str(row.get(name)) for row in rows}) > 1]
    found = [name for name in found if not any(str(row.get(name)).startswith("[") for row in rows)]
    kept = list(dict.fromkeys(["id", "name", *found]))
    return kept, len(every) - len(kept)


def _jobs_behind(service: Client, job: Job) -> list[ListedJob]:
    """Return a sweep's jobs with their specs, in the order of its values; else the job."""
    return [job] if job.children is None else list(service.jobs(sweep=job.id, include="spec"))[::-1]


def _show_facts(job: Job) -> None:
    out.print(Text(visible(f"{job.id} "), style="bold"), _state(job))
    facts = {
        "kind": job.kind,
        "name": job.name,
        "owner": job.owner,
        "project": job.project,
        "labels": " ".join(f"{key}={value}" for key, value in job.labels.items()),
        "attempt": str(job.attempt),
        "waits" if job.state == "queued" else "reason": job.reason or "",
        "progress": _progress(job),
        "sweep": job.sweep or "",
        "submitted": job.created_at.isoformat(timespec="seconds"),
        "took": _duration(job),
        "phases": ", ".join(map(_phase, job.phases)),
        "torch": "" if job.torch is None else job.torch.version + ", which was not tried" * (not job.torch.tried),
        "computed": "\n".join(f"attempt {each.attempt}: {each}" for each in job.computed_by),
        "placed": "; ".join(f"{share.host} {share.pool} {list(share.devices)}" for share in job.placement),
        "error": str(job.error or ""),
    }
    for name, value in facts.items():
        if value:
            out.block(f"{name:>10}  {value}", indent=12)
    for name, document in (("parameters", job.parameters), ("spec", job.spec), ("result", job.result)):
        if document:
            out.print(f"{name:>10}", style="bold")
            out.block(documents.dump(document).rstrip())


def _show_reasons(service: Client, job: Job) -> None:
    """Show why a job with several attempts left each state."""
    if job.attempt < 2:
        return
    changes = service.events(job.id, types=["state"], limit=_MOST_CHANGES)["items"]
    told = [change.get("event", change) for change in changes]
    if not (reasons := [change for change in told if change.get("reason")]):
        return
    out.print("   history", style="bold")
    for change in reasons:
        moment = datetime.fromtimestamp(change["time"], UTC).isoformat(timespec="seconds")
        text = f"{moment}  attempt {change.get('attempt')}  {change['state']}: {change['reason']}"
        out.block(visible(text), indent=12)


def _show_notices(service: Client, job: Job) -> None:
    """Show the messages that the job's spec asked for, and their deliveries."""
    if not job.spec.get("notify"):
        return
    out.print("    notify", style="bold")
    for each in service.notices(job.id) or ():
        at = each.last_at or each.event.timestamp
        text = f"{at.isoformat(timespec='seconds')}  {_notice_subject(each)}: {_notice_outcome(each)}"
        out.block(visible(text), indent=12)


def _notice_subject(delivery: WebhookDelivery) -> str:
    metric = delivery.event.data.metric
    if metric is None:
        return delivery.event.data.state
    return f"{metric.name} {metric.value:.6g} ({metric.threshold})"


def _notice_outcome(delivery: WebhookDelivery) -> str:
    """Return the outcome of a delivery: sent, tried again, given up."""
    if delivery.state == "delivered":
        return f"told, answered {delivery.status}"
    if delivery.state == "failed":
        return f"given up after {delivery.attempts} attempts: {delivery.error}"
    if delivery.attempts == 0:
        return "to be sent"
    again = "" if delivery.next_at is None else f", again {delivery.next_at.isoformat(timespec='seconds')}"
    return f"not taken{again}: {delivery.error}"


def cancel(job_ids: JobArguments, as_json: JsonFlag = False) -> None:
    """Cancel jobs. If one cannot be cancelled, it is named, the others are cancelled, and the exit code is 2."""
    with client() as service:
        _report(*each_of(job_ids, service.cancel), as_json=as_json)


def retry(job_ids: JobArguments, as_json: JsonFlag = False) -> None:
    """Queue failed or cancelled jobs again; each resumes from its last checkpoint, if it has one."""
    with client() as service:
        _report(*each_of(job_ids, service.retry), as_json=as_json)


def age(moment: datetime) -> str:
    """Return an age in its largest unit."""
    seconds = (datetime.now(UTC) - moment).total_seconds()
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{int(seconds // length)}{unit}"
    return f"{max(int(seconds), 0)}s"


def _report(changed: Sequence[Job], code: int, *, as_json: bool) -> None:
    if not as_json:
        for job in changed:
            out.print(f"{job.id} ", _state(job))
    elif len(changed) == 1 and not code:
        print_json(changed[0])
    else:
        print_json({"items": plain(changed)})
    raise typer.Exit(code)


def _state(job: ListedJob) -> Text:
    return Text(job.state, style=_STYLES.get(job.state, ""))


def _progress(job: ListedJob) -> str:
    return "" if job.progress is None else f"{job.progress.done}/{job.progress.total} {job.progress.unit}"


def _phase(phase: JobPhase) -> str:
    so_far = "" if phase.seconds is not None else " so far"
    seconds = (datetime.now(UTC) - phase.began_at).total_seconds() if phase.seconds is None else phase.seconds
    return f"{phase.name} {max(seconds, 0.0):.1f} s{so_far}"


def _duration(job: Job) -> str:
    begun = job.started_at if job.children is None else job.created_at  # a parent is never placed
    return "" if begun is None else f"{((job.ended_at or datetime.now(UTC)) - begun).total_seconds():.1f} s"
