"""Submitting and watching jobs, and uploading what their specs name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from service.jobs.records import Job
from trivet.cli import progress, specs
from trivet.cli.context import (
    FAILED,
    JobArgument,
    JsonFlag,
    client,
    err,
    fails_well,
    out,
    print_json,
    refuse,
)
from trivet.client import Client


def register(app: typer.Typer) -> None:
    app.command()(fails_well(submit))
    app.command()(fails_well(watch))
    app.command()(fails_well(upload))


def submit(
    spec: Annotated[str, typer.Argument(metavar="SPEC", help="a YAML or JSON file; - for standard input")],
    watching: Annotated[bool, typer.Option("--watch", "-w", help="follow the job until it is over")] = False,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="change a value, such as optimizer.lr=0.01")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Submit a job. With --watch: exit 0 if it succeeds, 1 if not. A refused spec exits 2."""
    body = specs.load(spec, changes or ())
    with client() as service:
        job = service.submit(body)
        if watching:
            if not as_json:
                err.print(f"submitted {job.id}")
            _finish(service, job, as_json=as_json)
        elif as_json:
            print_json(job)
        else:
            out.write_line(job.id)


def watch(job_id: JobArgument, as_json: JsonFlag = False) -> None:
    """Follow a job until it is over: exit 0 if it succeeded, 1 if not. With --json: its events, one a line."""
    with client() as service:
        _finish(service, service.job(job_id), as_json=as_json)


def _finish(service: Client, job: Job, *, as_json: bool) -> None:
    if as_json:
        for event in service.follow(job.id):
            out.write_json_line(event)
    else:
        title = f"{job.kind} {job.name}" if job.name != job.kind else job.kind
        progress.show(out, {job.id: title}, service.follow(job.id, types=progress.WATCHED))
    over = service.job(job.id)
    if over.state != "succeeded":
        if over.error is not None:
            err.block(f"{over.error.type}: {over.error.message}", style="red", indent=2)
            err.print(f"see: trivet logs {job.id}")
        raise typer.Exit(FAILED)


def upload(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="data, a tokenizer, weights, or an archive")],
    as_json: JsonFlag = False,
) -> None:
    """Upload a file for specs to name; prints its id. The same bytes give the same id."""
    if not path.is_file():
        refuse(f"cannot read {path}: it is not a file")
    with client() as service:
        stored = service.upload(path)
    if as_json:
        print_json(stored)
    else:
        out.write_line(stored.id)
