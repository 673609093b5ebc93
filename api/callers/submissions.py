"""Gathers what a request that submits jobs comes with, beside its body."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request, Response

from api.callers.access import TargetProject
from api.callers.context import Context, context_of
from api.callers.security import Caller, Submitter
from api.requests import IdempotencyKey


@dataclass(frozen=True)
class SubmissionCall:
    """A request that submits jobs, its answer, and who sent it."""

    request: Request
    response: Response
    key: Caller
    idempotency_key: str | None
    project: str
    """The project of the jobs."""

    @property
    def context(self) -> Context:
        return context_of(self.request.app)


async def _submission_call(
    *,
    request: Request,
    response: Response,
    key: Submitter,
    project: TargetProject,
    idempotency_key: IdempotencyKey = None,
) -> SubmissionCall:
    return SubmissionCall(request, response, key, idempotency_key, project)


Submitting = Annotated[SubmissionCall, Depends(_submission_call)]
