"""Commands for the audit log: who did what, and whether the log is whole."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from service.jobs.records.audit import AuditAction, AuditEntry, AuditHead, BrokenChain, VerifiedChain, verify_chain
from trivet.cli.context import JsonFlag, add_group, client, err, out, past, print_json, refuse, table
from trivet.cli.exit_codes import ExitCode

_HEAD = re.compile(r"(\d+):([0-9a-f]{64})")

SinceOption = Annotated[str | None, typer.Option(help="an age such as 2h or 7d, or a time such as 2026-01-31T12:00")]
UntilOption = Annotated[str | None, typer.Option(help="an age or a time; entries from then on are left out")]
ActorOption = Annotated[str | None, typer.Option(help="name of a key")]
ActionOption = Annotated[AuditAction | None, typer.Option("--action", help="what was done", metavar="ACTION")]
JobOption = Annotated[str | None, typer.Option(help="id of a job")]


def register(app: typer.Typer) -> None:
    add_group(app, "audit", "The audit log (needs an admin key).", export, verify, first=audit)


def audit(
    context: typer.Context,
    *,
    since: SinceOption = None,
    until: UntilOption = None,
    actor: ActorOption = None,
    action: ActionOption = None,
    job: JobOption = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=1000)] = 20,
    as_json: JsonFlag = False,
) -> None:
    """List audit entries, newest first; or: export, verify."""
    if context.invoked_subcommand is not None:
        return
    with client() as service:
        page = service.audit.page(
            since=past(since), until=past(until), actor=actor, action=action, job=job, limit=limit
        )
    if as_json:
        print_json(page)
        return
    rows = table("number", "time", "actor", "action", "about", "from", "detail")
    for entry in page.items:
        rows.add_row(*_cells(entry))
    out.print(rows if page.items else "no entries")


def _cells(entry: AuditEntry) -> tuple[str, ...]:
    about = " ".join(filter(None, (entry.job, entry.subject)))
    detail = " ".join(f"{name}={value}" for name, value in entry.detail.items())
    when = entry.time.isoformat(timespec="seconds")
    return str(entry.number), when, entry.actor or "(nobody)", entry.action, about, entry.address, detail


def export(
    *,
    since: SinceOption = None,
    until: UntilOption = None,
    actor: ActorOption = None,
    action: ActionOption = None,
    job: JobOption = None,
) -> None:
    """Print entries as JSON lines, oldest first."""
    with client() as service:
        for line in service.audit.lines(since=past(since), until=past(until), actor=actor, action=action, job=job):
            out.write_json_text(line)


def verify(
    file: Annotated[
        Path | None, typer.Argument(help="an export of consecutive entries; the service's own when absent")
    ] = None,
    head: Annotated[
        list[str] | None, typer.Option("--head", help="NUMBER:HASH, as this command printed it before; may be repeated")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Check that no entry was changed, removed or inserted; print the newest number and hash, for you to note."""
    noted = [_head(text) for text in head or ()]
    try:
        found = _verify_log(file, noted)
    except BrokenChain as error:
        err.block(str(error), style="red")
        raise typer.Exit(ExitCode.FAILED) from None
    if as_json:
        print_json({"first": found.first, "entries": found.entries, "head": found.head.model_dump()})
        return
    out.print(f"{found.entries} entries from number {found.first} are whole; note the newest one:")
    out.write_line(str(found.head))


def _verify_log(file: Path | None, noted: list[AuditHead]) -> VerifiedChain:
    if file is not None:
        with file.open("rb") as lines:
            return verify_chain((line.rstrip(b"\n") for line in lines), noted)
    with client() as service:
        newest = service.audit.page(limit=1).head
        return verify_chain(service.audit.lines(), [*noted, newest])


def _head(text: str) -> AuditHead:
    found = _HEAD.fullmatch(text)
    if found is None:
        refuse(f"--head: {text!r} is not a number, a colon and a hash of 64 hexadecimal digits")
    return AuditHead(number=int(found[1]), hash=found[2])
