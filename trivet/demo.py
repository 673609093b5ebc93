"""Runs ``trivet demo``: three linked jobs on a throw-away service, from nothing to a verdict.

The specs are those of ``examples/``; only their device and references are filled in.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from service.jobs.records import Host, Job
from service.jobs.settings import Settings
from trivet.cli import progress
from trivet.cli.context import table
from trivet.cli.first_spec import EXAMPLES
from trivet.cli.results import rung_title
from trivet.client import Client
from trivet.local import LocalService
from trivet.terminal import Terminal, paragraph
from trivet.up import interruptible

_CPU_SLOTS = 4
_NEXT = (
    "\nThe demo's service and its jobs are gone. Next: `trivet up` starts one that stays, and in another terminal\n"
    "`trivet init train` writes a spec and `trivet submit train.yaml --watch` trains a model on it. In a checkout,\n"
    "`. .venv/bin/activate` comes first in both."
)


def run(console: Terminal) -> int:
    """Run the demo: 0 if all three jobs succeeded, 1 if not, 130 if interrupted. Leaves nothing behind."""
    with interruptible(), tempfile.TemporaryDirectory(prefix="trivet-demo-") as folder:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        settings = Settings(
            data=Path(folder), host="127.0.0.1", port=0, redis_url=None, key=None, cpu_slots=_CPU_SLOTS,
            tls_cert=None, tls_key=None,
        )  # fmt: skip
        console.print("starting broker, API and worker …")
        with LocalService(settings) as service, service.client() as client:
            console.print(f"dashboard: {service.url}   key: {service.key}   (open it while the demo runs)")
            jobs = _run_jobs(client, console)
            _print_results(console, client, jobs)
        console.block(_NEXT)
    return 0 if all(job.state == "succeeded" for job in jobs.values()) else 1


def _run_jobs(client: Client, console: Terminal) -> dict[str, Job]:
    """Submit all three at once; the service starts each when its inputs are ready."""
    host = client.hosts()[0]
    train = client.submit(_spec("train", host))
    links = {"model": {"job": train.id}}
    jobs = {"train": train, **{kind: client.submit(_spec(kind, host, **links)) for kind in ("verify", "compile")}}
    titles = {job.id: kind for kind, job in jobs.items()}
    progress.show(console, titles, client.follow_all(list(titles), types=progress.WATCHED))
    return {kind: client.wait(job.id) for kind, job in jobs.items()}


def _spec(kind: str, host: Host, **changes: Any) -> dict[str, Any]:
    """Return an example's spec, on GPUs if there are enough."""
    spec: dict[str, Any] = yaml.safe_load((EXAMPLES / f"{kind}.yaml").read_text())
    ranks = 1
    for degree in spec.get("parallel", {}).values():
        ranks *= degree
    return {**spec, **changes, "device": "cuda" if len(host.cuda) >= ranks else "cpu"}


def _print_results(console: Terminal, client: Client, jobs: Mapping[str, Job]) -> None:
    rows = table("job", "state", "seconds", "what came out")
    for kind, job in jobs.items():
        began, ended = job.started_at, job.ended_at
        took = "" if began is None or ended is None else f"{(ended - began).total_seconds():.1f}"
        came_out = _FINDINGS[kind](client, job) if job.state == "succeeded" else str(job.error or "")
        rows.add_row(kind, job.state, took, paragraph(came_out))
    console.print(rows)


def _trained(client: Client, job: Job) -> str:
    result = client.report(job.id)
    ranks = sum(len(share.devices) for share in job.placement)
    return f"accuracy {result['eval_accuracy']:.1%} on test images, trained on {ranks} ranks"


def _verified(client: Client, job: Job) -> str:
    result = client.report(job.id)
    count = sum(result["verdicts"].values())
    return (
        f"certified accuracy {result['verdicts']['verified'] / count:.1%} at eps {result['eps']} "
        f"({count} images, {job.spec['method']} bounds)"
    )


def _checked(client: Client, job: Job) -> str:
    gate = client.report(job.id)["gate"]
    return ", ".join(
        f"{phase}: {rung_title(gate[phase]) if gate[phase] else 'must not be compiled'}"
        for phase in ("train", "inference")
    )


_FINDINGS: dict[str, Callable[[Client, Job], str]] = {"train": _trained, "verify": _verified, "compile": _checked}
