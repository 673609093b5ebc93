"""Checks drafts: specs as text, checked like a submission but not submitted."""

from __future__ import annotations

import json
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field, TypeAdapter, ValidationError
from starlette.concurrency import run_in_threadpool

from api.callers import CheckerDep, StoreDep, Submitter, TargetProject
from api.offload import Checker, while_connected
from api.requests import FieldError, ProblemError, StrictRoute, from_refusals, from_spec, several_of
from service.jobs.kinds.registry import spec_adapter
from service.jobs.plugins import CommonSpec
from service.jobs.records import ApiKey, Rejected
from service.jobs.spec.common import Strict
from service.jobs.spec.train import TrainSpec
from service.jobs.store import Store
from service.jobs.submission.plan import Plan
from service.jobs.submission.request import PlanRequest, ReadDocument, ReadRequest
from service.jobs.text.documents import nearest

router = APIRouter(tags=["jobs"], route_class=StrictRoute)
_PLAN: TypeAdapter[Plan] = TypeAdapter(Plan)


class Draft(Strict):
    """A spec that may not be finished yet."""

    text: Annotated[
        str, Field(max_length=500_000, description="YAML 1.2 or JSON", examples=["kind: train\nsteps: 200\n"])
    ]


class DraftError(FieldError):
    """Why a draft would be refused, and where in its text."""

    line: int | None = Field(None, description="counted from 1; null if the text has no such place")
    column: int | None = Field(None, description="counted from 1")


class CheckedDraft(BaseModel):
    """A draft's content, and whether it would be accepted now."""

    spec: Any = Field(None, description="the parsed text; null if it cannot be read")
    body: str | None = Field(None, description="the same as JSON, to be submitted when there are no errors")
    errors: list[DraftError] = Field(description="why a submission would be refused; empty if it would be accepted")
    jobs: int | None = Field(
        None, description="number of jobs: with `sweep` one for each combination, of a chain those that it names"
    )
    ranks: int | None = Field(None, description="devices that each job takes")
    plan: Plan | None = Field(None, description="the schedule of a pipeline, in units of one forward of a stage")


@router.post("/jobs:check")
async def check_draft(
    *,
    body: Draft,
    request: Request,
    key: Submitter,
    store: StoreDep,
    checker: CheckerDep,
    project: TargetProject,
) -> CheckedDraft:
    """Check a spec like a submission, and submit nothing. Refusals come with lines of the text."""
    answer = await while_connected(request, checker.answer(ReadRequest(text=body.text), key.owner))
    read = ReadDocument.model_validate_json(answer)
    if read.content is None:
        error = DraftError(
            path="", message=read.problem or "", expected="YAML or JSON", line=read.line, column=read.column
        )
        return CheckedDraft(errors=[error])
    told = CheckedDraft(spec=json.loads(read.content), body=read.content, errors=[])
    try:
        spec = spec_adapter.validate_python(told.spec)
    except ValidationError as error:
        return told.model_copy(update={"errors": _place_errors(from_spec(error), read)})
    told.ranks = spec.parallel.world_size
    told.jobs, errors = await _check_spec(spec, project, key, store=store, checker=checker)
    told.errors = _place_errors(errors, read)
    if not errors and isinstance(spec, TrainSpec) and spec.parallel.pp > 1:
        planned = await checker.answer(PlanRequest(spec=spec.model_dump_json(by_alias=True)), key.owner)
        told.plan = _PLAN.validate_json(planned)
    return told


async def _check_spec(
    spec: CommonSpec, project: str, key: ApiKey, *, store: Store, checker: Checker
) -> tuple[int, list[FieldError]]:
    """Return the number of a spec's jobs, and why they would be refused."""
    try:
        if not spec.stands_for_others:
            submission = await run_in_threadpool(store.jobs.submission, spec, key.name, project=project)
            asked = await run_in_threadpool(store.jobs.check_request, [submission])
            return 1, from_refusals(await checker.problems(asked, key.owner))
        several = await run_in_threadpool(several_of, spec)
        asked = await run_in_threadpool(several.request, store, project)
        return several.count, several.refusals(await checker.problems(asked, key.owner))
    except Rejected as error:
        return 0, from_refusals(error.problems)
    except ProblemError as error:
        if error.errors is None:
            raise
        return 0, list(error.errors)


def _place_errors(errors: list[FieldError], read: ReadDocument) -> list[DraftError]:
    """Return the errors with the place in the text of each field, or of the field around it."""
    placed = []
    for error in errors:
        line, column = nearest(read.positions, error.path) or (None, None)
        placed.append(DraftError(**error.model_dump(), line=line, column=column))
    return placed
