"""Finds the jobs and uploads that a spec names, and checks that they exist and fit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

from pydantic import TypeAdapter, ValidationError

from service.formats.exported import ExportedError, read_exported
from service.formats.weights import WeightsFileError, check_weights
from service.jobs.plugins import CheckContext, CommonSpec
from service.jobs.records import Job, Problem
from service.jobs.spec.common import TERMINAL, Dependency, FileReference
from service.jobs.spec.compile import CompileSpec, ExportedProgram
from service.jobs.spec.model import FromHuggingFace, FromJob, FromSafetensors, ModelConfig, ModelRef
from service.jobs.spec.verify import FromOnnx

_LONGEST_CHAIN = 64
"""The most training jobs in a chain, in which each starts from the model of the one before."""
_reference: TypeAdapter[ModelRef] = TypeAdapter(ModelRef)


Lookup = Callable[[str], Job | None]


def related(specs: Iterable[CommonSpec], visible: Lookup, lookup: Lookup) -> dict[str, Job]:
    """Return the jobs that the checks of ``specs`` need, by id: named ones by ``visible``, and those behind
    their models by ``lookup``: a model reveals the jobs that it was made from, so whoever may read it may know them.

    A job that only ``after`` names comes without its spec, which no check reads.
    """
    found: dict[str, Job] = {}
    whole: set[str] = set()

    def noted(job_id: str, lookup: Lookup) -> Job | None:
        if job_id not in found and (job := lookup(job_id)) is not None:
            found[job_id] = job
        return found.get(job_id)

    def walked(job_id: str) -> Job | None:
        whole.add(job_id)
        return noted(job_id, lookup)

    for needed in itertools.chain.from_iterable(spec.dependencies() for spec in specs):
        job = noted(needed.job_id, visible)
        if job is not None and needed.kind == job.kind:
            whole.add(job.id)
            with suppress(ValidationError, _UnreadableError):
                _behind(_reference.validate_python(job.spec.get("model")), walked)
    return {key: job if key in whole else job.model_copy(update={"spec": {}}) for key, job in found.items()}


def check_dependencies(spec: CommonSpec, context: CheckContext) -> Iterator[Problem]:
    """Yield a problem for each named job that cannot serve the spec."""
    for needed in spec.dependencies():
        job = context.lookup(needed.job_id)
        wanted = f"a {needed.kind} job" if needed.kind else "a job"
        expected = f"{wanted} that has succeeded or still can"
        if job is None:
            yield Problem(needed.path, f"there is no job {needed.job_id}", needed.job_id, expected)
        elif needed.kind not in (None, job.kind):
            yield Problem(needed.path, f"job {job.id} is a {job.kind} job", job.id, expected)
        elif needed.kind is not None and job.children is not None:
            yield Problem(
                needed.path, f"job {job.id} is a sweep, which produces nothing itself", job.id, "one of its jobs"
            )
        elif needed.weights is not None:
            yield from _check_weights(needed, job, context)
        elif job.state in TERMINAL - {"succeeded"}:
            yield Problem(needed.path, f"job {job.id} has {_describe_end(job.state)}", job.id, expected)
    for needed in spec.dependencies():
        if needed.kind == "train":
            try:
                _behind(FromJob(job=needed.job_id), context.lookup)
            except _UnreadableError as error:
                expected = "a train job whose model this installation knows"
                yield Problem(needed.path, str(error), needed.job_id, expected)


def _check_weights(needed: Dependency, job: Job, context: CheckContext) -> Iterator[Problem]:
    """Yield a problem if the weights that a spec takes from a job are missing and will stay missing."""
    resumes = needed.path == "resume.job"
    left = sorted((context.checkpoints_of if resumes else context.weights_of)(job.id))
    what = "checkpoint" if resumes else "weights"
    if job.state not in TERMINAL:
        return
    if job.state != "succeeded" and not left:
        message = f"job {job.id} has {_describe_end(job.state)} and left no checkpoint"
        expected = "a train job that has succeeded, still can, or has left a checkpoint"
        yield Problem(needed.path, message, job.id, expected)
    elif left and needed.weights not in ("latest", *left):
        message = f"job {job.id} has no {what} of step {needed.weights}"
        path = f"{needed.path.removesuffix('job')}step"
        yield Problem(path, message, needed.weights, f"latest, or one of {', '.join(map(str, left))}")


def check_archive(model: ModelRef | FromOnnx | None, context: CheckContext) -> Iterator[Problem]:
    """Yield why an uploaded archive holds no model that a rank could take."""
    if isinstance(model, FromHuggingFace):
        try:
            context.uploaded(model.huggingface)
        except ValueError as error:
            expected = "a zip or an uncompressed tar of a Llama-style config.json and its safetensors files"
            yield Problem("model.huggingface", str(error), model.huggingface, expected)
    if isinstance(model, FromSafetensors) and (path := context.path_of(model.safetensors)) is not None:
        try:
            check_weights(path, model.config)
        except WeightsFileError as error:
            expected = "a safetensors file of this model's weights, by its names or those of an nn.Sequential"
            yield Problem("model.safetensors", str(error), model.safetensors, expected)


def check_exported(spec: CompileSpec, context: CheckContext) -> Iterator[Problem]:
    """Yield why an uploaded export is none, or lacks a phase that is to be checked."""
    if not isinstance(spec.program, ExportedProgram) or (path := context.path_of(spec.program.file)) is None:
        return
    try:
        exported = read_exported(path)
    except ExportedError as error:
        expected = "a file that client.compile_check(module, example) has written"
        yield Problem("program.file", f"it {error}", spec.program.file, expected)
        return
    if missing := [phase for phase in spec.phases if phase not in exported.graphs]:
        had = ", ".join(exported.graphs)
        yield Problem("phases", f"the module was exported for {had} only", list(spec.phases), f"without {missing[0]}")


def resolve(model: ModelRef | FromOnnx | None, context: CheckContext) -> ModelConfig | None:
    """Return the family's configuration behind a reference, through jobs that start from others.

    Return ``None`` without a model, if the configuration is in a file that only ranks read, and if
    :func:`check_dependencies` or :func:`check_archive` reports the problem.
    """
    if model is None:
        return None
    with suppress(ValueError):
        model = _behind(model, context.lookup)
        if isinstance(model, FromHuggingFace):
            return context.uploaded(model.huggingface)
        if isinstance(model, FromSafetensors):
            return model.config
        if isinstance(model, ModelConfig):
            return model
    return None


class _UnreadableError(ValueError):
    """Stands for a job's model that this installation cannot read, for example because its package was removed."""


def _behind(model: ModelRef | FromOnnx, lookup: Lookup) -> ModelRef | FromOnnx:
    """Follow models from job to job; return the first that does not come from a job, or whose job is missing."""
    for _ in range(_LONGEST_CHAIN):
        if not isinstance(model, FromJob):
            break
        job = lookup(model.job)
        if job is None or job.kind != "train":
            break
        try:
            model = _reference.validate_python(job.spec["model"])
        except ValidationError as error:
            raise _UnreadableError(f"the model of job {job.id} cannot be read: {error.errors()[0]['msg']}") from error
    return model


def _describe_end(state: str) -> str:
    return "failed" if state == "failed" else "been cancelled"


def files_of(spec: CommonSpec) -> Iterator[tuple[str, str]]:
    """Yield each uploaded file that the spec names in a field of type ``FileId``, as the path of the field and its id.

    Ranks of an accepted job are granted these files, from its record, and no others.
    """
    yield from _files(spec.model_dump(by_alias=True), ())


def check_files(spec: CommonSpec, context: CheckContext) -> Iterator[Problem]:
    """Yield a problem for each named file that was never uploaded."""
    for path, file in files_of(spec):
        if not context.has_file(file):
            yield Problem(path, f"there is no {file}", file, "an id that an upload to /v1/files returned")


def _files(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for name, each in value.items():
            yield from _files(each, (*path, name))
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from _files(each, (*path, str(index)))
    elif isinstance(value, FileReference):
        yield ".".join(path), value
