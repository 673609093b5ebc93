"""Jobs: list, show, cancel, retry."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, cast

import typer
import yaml
from rich.text import Text

from service.jobs.records import Job, ListedJob
from service.jobs.states import STATES, JobState
from service.jobs.text import visible
from trivet.cli.context import JobArgument, JsonFlag, client, fails_well, out, print_json, refuse, table

_STYLES = {"succeeded": "green", "failed": "red", "cancelled": "yellow", "running": "cyan", "starting": "cyan"}


def register(app: typer.Typer) -> None:
    app.command("jobs")(fails_well(list_jobs))
    app.command()(fails_well(show))
    app.command()(fails_well(cancel))
    app.command()(fails_well(retry))
    app.command()(fails_well(delete))


def list_jobs(
    *,
    kind: Annotated[str | None, typer.Option(help="only this kind, such as train")] = None,
    state: Annotated[str | None, typer.Option(help=", ".join(STATES))] = None,
    label: Annotated[str | None, typer.Option(help="KEY=VALUE, or KEY")] = None,
    owner: Annotated[str | None, typer.Option(help="name of the key that submitted")] = None,
    q: Annotated[str | None, typer.Option("--query", "-q", help="part of an id, a name or a label")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=1000)] = 20,
    as_json: JsonFlag = False,
) -> None:
    """List jobs, newest first."""
    with client() as service:
        page = service.jobs(kind=kind, state=cast(JobState | None, state), label=label, owner=owner, q=q, limit=limit)
    if as_json:
        print_json(page)
        return
    rows = table("id", "kind", "name", "state", "progress", "age", "owner")
    for job in page.items:
        rows.add_row(job.id, job.kind, job.name, _state(job), _progress(job), age(job.created_at), job.owner)
    out.print(rows if page.items else "no jobs")


def show(job_id: JobArgument, as_json: JsonFlag = False) -> None:
    """Show one job: state, placement, spec, result."""
    with client() as service:
        job = service.job(job_id)
    if as_json:
        print_json(job)
        return
    out.print(Text(visible(f"{job.id} "), style="bold"), _state(job))
    facts = {
        "kind": job.kind,
        "name": job.name,
        "owner": job.owner,
        "labels": " ".join(f"{key}={value}" for key, value in job.labels.items()),
        "attempt": str(job.attempt),
        "waits" if job.state == "queued" else "reason": job.reason or "",
        "progress": _progress(job),
        "submitted": job.created_at.isoformat(timespec="seconds"),
        "took": _duration(job),
        "placed": "; ".join(f"{share.host} {share.pool} {list(share.devices)}" for share in job.placement),
        "error": "" if job.error is None else f"{job.error.type}: {job.error.message}",
    }
    for name, value in facts.items():
        if value:
            out.block(f"{name:>10}  {value}", indent=12)
    for name, document in (("spec", job.spec), ("result", job.result)):
        if document:
            out.print(f"{name:>10}", style="bold")
            out.block(yaml.safe_dump(document, sort_keys=False, allow_unicode=True).rstrip())


def cancel(job_id: JobArgument, as_json: JsonFlag = False) -> None:
    """Cancel a job."""
    with client() as service:
        _report(service.cancel(job_id), as_json)


def retry(job_id: JobArgument, as_json: JsonFlag = False) -> None:
    """Queue a failed or cancelled job again; it resumes from its last checkpoint."""
    with client() as service:
        _report(service.retry(job_id), as_json)


def delete(job_id: JobArgument, yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask")] = False) -> None:
    """Delete a job that is over, with its artifacts."""
    if not yes and not typer.confirm(f"delete {job_id} and its artifacts?"):
        refuse("nothing was deleted")
    with client() as service:
        service.delete(job_id)


def age(moment: datetime) -> str:
    """Return how long ago, in its largest unit."""
    seconds = (datetime.now(UTC) - moment).total_seconds()
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{int(seconds // length)}{unit}"
    return f"{max(int(seconds), 0)}s"


def _report(job: Job, as_json: bool) -> None:
    if as_json:
        print_json(job)
    else:
        out.print(f"{job.id} ", _state(job))


def _state(job: ListedJob) -> Text:
    return Text(job.state, style=_STYLES.get(job.state, ""))


def _progress(job: ListedJob) -> str:
    return "" if job.progress is None else f"{job.progress.done}/{job.progress.total} {job.progress.unit}"


def _duration(job: Job) -> str:
    if job.started_at is None:
        return ""
    return f"{((job.ended_at or datetime.now(UTC)) - job.started_at).total_seconds():.1f} s"
