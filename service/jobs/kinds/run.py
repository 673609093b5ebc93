"""Checks jobs that run a program's inference."""

from __future__ import annotations

from collections.abc import Iterator

from service.jobs.checks.gate import check_gate
from service.jobs.plugins import CheckContext, JobKind
from service.jobs.records import Problem
from service.jobs.spec.run import RunSpec


def check(spec: RunSpec, context: CheckContext) -> Iterator[Problem]:
    """Yield every reason why this run could never end well."""
    yield from check_gate(spec, None, context)
    yield from (Problem(*reason) for reason in spec.program.check(spec))
    job = None if spec.weights is None else context.lookup(spec.weights.job)
    if job is not None and job.kind == "train":
        trained = (job.spec.get("program") or {}).get("name")
        if trained != spec.program.name:
            message = f"job {job.id} trains {trained or 'a model'}"
            yield Problem("weights.job", message, job.id, f"a training of {spec.program.name}")


RUN = JobKind(RunSpec, "service.training.programs.inference:run", check)
