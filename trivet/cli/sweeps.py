"""Shows the jobs of a sweep or chain as a table: their values, states, why some did not succeed and, if the sweep asks
for them, the metric and where it stopped jobs early.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trivet.cli.context import table

if TYPE_CHECKING:
    from service.jobs.records import Job, ListedJob
    from trivet.client import Client
    from trivet.terminal import Terminal


def show_jobs(service: Client, parent: Job, out: Terminal) -> None:
    """Print the jobs of a sweep in the order of their values, then which one is best."""
    jobs = list(reversed(list(service.jobs(sweep=parent.id))))
    paths = list(dict.fromkeys(path for job in jobs for path in job.parameters or {}))
    asked = (parent.spec.get("sweep") or {}).get("best")
    metric = [asked["metric"]] if asked else []
    stops = ["stopped at"] if (parent.spec.get("sweep") or {}).get("stop") else []
    reasons = ["why"] if any(job.state != "succeeded" and why(job) for job in jobs) else []
    rows = table("id", *paths, "state", *metric, *stops, *reasons)
    for job in jobs:
        values = [shown((job.parameters or {}).get(path, "")) for path in paths]
        found = [shown(_at(job.result, name)) for name in metric]
        stopped, told = (_early_step(job) for _ in stops), (why(job) for _ in reasons)
        rows.add_row(job.id, *values, job.state, *found, *stopped, *told)
    out.print(rows)
    if parent.children is not None and parent.children.best is not None:
        best = parent.children.best
        out.print(f"best: {best.job}, {metric[0]} {shown(best.value)}")


def why(job: ListedJob) -> str:
    """Return the first line of why a job waits, failed or ended early."""
    told = job.reason or "" if job.error is None else f"{job.error.type}: {job.error.message}"
    return told.partition("\n")[0]


def _early_step(job: ListedJob) -> str:
    """Return the step at which the sweep stopped a job, empty if it did not."""
    return f"step {_at(job.result, 'steps')}" if _at(job.result, "ended_early") else ""


def _at(result: dict[str, Any] | None, path: str) -> Any:
    value: Any = result
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return "" if value is None else value


def shown(value: object) -> str:
    """Return a value of a spec or a result as a cell of a table."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
