"""Gathers what a request that submits jobs comes with, beside its body."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request, Response

from api.callers.context import Context, context_of
from api.callers.security import Caller, Submitter, target_project
from api.requests import IdempotencyKey, TargetProject


@dataclass(frozen=True)
class SubmissionCall:
    """A request that submits jobs, its answer, and who sent it."""

    request: Request
    response: Response
    key: Caller
    idempotency_key: str | None
    named_project: str | None

    @property
    def project(self) -> str:
        """Return the project of the jobs. Raises a 403 for one in which this key may not submit."""
        return target_project(self.key, self.named_project)

    @property
    def context(self) -> Context:
        return context_of(self.request.app)


async def _submission_call(
    *,
    request: Request,
    response: Response,
    key: Submitter,
    idempotency_key: IdempotencyKey = None,
    project: TargetProject = None,
) -> SubmissionCall:
    return SubmissionCall(request, response, key, idempotency_key, project)


Submitting = Annotated[SubmissionCall, Depends(_submission_call)]
