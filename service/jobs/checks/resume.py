"""Checks whether a training job can go on where another one was."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import ValidationError

from service.jobs.checks.dependencies import resolve
from service.jobs.plugins import CheckContext, ModelConfig
from service.jobs.records import Job, Problem
from service.jobs.spec.model import FromJob
from service.jobs.spec.train import TrainSpec
from service.jobs.states import TERMINAL


def check_resume(spec: TrainSpec, config: ModelConfig | None, context: CheckContext) -> Iterator[Problem]:
    """Yield why the job cannot go on where the one that it resumes was; ``config`` is that of its own model."""
    job = None if spec.resume is None else context.lookup(spec.resume.job)
    if job is None or job.kind != "train":
        return
    try:
        first = TrainSpec.model_validate(job.spec)
    except ValidationError:
        return  # the check of dependencies says what is wrong with the job
    theirs = resolve(FromJob(job=job.id), context)
    if config is not None and theirs is not None and config != theirs:
        got = {name: value for name, value in config if value != getattr(theirs, name, None)}
        yield Problem("model", f"job {job.id} trains another model", str(got), f"{{job: {job.id}}}, or its model")
    yield from _check_order(spec, first, job)
    yield from _check_steps(spec, first, job, context)


def _check_order(spec: TrainSpec, first: TrainSpec, job: Job) -> Iterator[Problem]:
    """Yield the changes that would reorder the samples of the resumed job."""
    if spec.data != first.data:
        got = spec.data.model_dump(mode="json", by_alias=True)
        yield Problem("data", f"job {job.id} trains on other data", str(got), f"its data, or model: {{job: {job.id}}}")
    if spec.seed != first.seed:
        yield Problem("seed", f"job {job.id} draws its batches by another seed", spec.seed, str(first.seed))
    if spec.batch.global_ != first.batch.global_:
        message = f"job {job.id} counts its place in the data by batches of another size"
        yield Problem("batch.global", message, spec.batch.global_, str(first.batch.global_))


def _check_steps(spec: TrainSpec, first: TrainSpec, job: Job, context: CheckContext) -> Iterator[Problem]:
    assert spec.resume is not None
    if spec.resume.step == "latest":
        left = context.checkpoints_of(job.id) if job.state in TERMINAL else (first.steps,)
        begun = max(left, default=0)
    else:
        begun = spec.resume.step
    if spec.steps <= begun:
        yield Problem("steps", f"job {job.id} is at step {begun} already", spec.steps, f"more than {begun}")
