"""Answers the most frequent change, one job of an API key, ahead of the framework.

Finding a route among a hundred and resolving its dependencies costs this process more than the rest of a
submission. Any other submission goes to the framework's route: a refused key or body, a sweep, a spec that
names files or other jobs, an idempotency key. That route's functions check and accept a plain submission too,
and errors become the same problems.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import TypeAdapter
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from api.callers import audit_submissions, context_of, granted, near_end, remember_caller
from api.front.plain_reads import only_secret
from api.requests import KeptBody, loads
from api.routes import jobs
from api.server import V1
from service.jobs.accounts import DEFAULT_PROJECT
from service.jobs.kinds.registry import spec_adapter
from service.jobs.records import ApiKey, Job
from service.jobs.store import Credential, StoreUnavailable, Submission, in_loop

_PATH = f"{V1}/jobs"
_JSON = b"application/json"
_LONGEST = 32 << 10
"""Bytes of a spec; a longer body takes long to read."""
_CHANGES_THE_REQUEST = frozenset({b"idempotency-key", b"content-encoding", b"transfer-encoding"})
_job_adapter: TypeAdapter[Job] = TypeAdapter(Job)


class PlainSubmissions:
    """Answers ``POST /v1/jobs`` with only a JSON spec and a key; ``handlers`` maps errors to problems."""

    def __init__(self, app: ASGIApp, handlers: dict[Any, Callable[..., Any]]) -> None:
        self._app = app
        (self._route,) = (route for route in jobs.router.routes if getattr(route, "name", "") == "submit_job")
        assert isinstance(self._route, APIRoute)
        expected = {error: handle for error, handle in handlers.items() if error not in (500, Exception)}
        self._accepting = ExceptionMiddleware(_accept, handlers=expected)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        secret = only_secret(scope) if _may_be_plain(scope) else None
        if secret is None:
            await self._app(scope, receive, send)
            return
        told = KeptBody(receive)
        submission = await _submission(scope, secret, await told.whole())
        if submission is None:
            await self._app(scope, told.again, send)
            return
        scope["route"] = self._route
        scope["state"]["submission"] = submission
        await self._accepting(scope, told.again, send)


def _may_be_plain(scope: Scope) -> bool:
    if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] != _PATH:
        return False
    names = {name for name, _ in scope["headers"]}
    types = [value for name, value in scope["headers"] if name == b"content-type"]
    lengths = [value for name, value in scope["headers"] if name == b"content-length"]
    is_usual = not scope["query_string"] and not scope["root_path"] and names.isdisjoint(_CHANGES_THE_REQUEST)
    return is_usual and types == [_JSON] and len(lengths) == 1 and int(lengths[0]) <= _LONGEST


async def _submission(scope: Scope, secret: str, body: bytes | None) -> Submission | None:
    """Return the submission, if it is plain and its key may submit."""
    store = context_of(scope["app"]).store
    try:
        key = None if body is None else await in_loop(store.keys.verify, secret)
        if body is None or key is None or "submit" not in granted(key):
            return None
        spec = spec_adapter.validate_python(loads(body))
        if spec.sweep is not None or spec.dependencies():
            return None
        project = key.project or DEFAULT_PROJECT
        submission = await in_loop(store.jobs.submission, spec, key.name, project=project)
    except (ValueError, RecursionError, StoreUnavailable):
        return None
    if submission.uploads:
        return None
    _admit(scope, key)
    return submission


def _admit(scope: Scope, key: ApiKey) -> None:
    remember_caller(Request(scope), key, Credential(key.id))
    scope["state"]["key_expires"] = near_end(key)


async def _accept(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the job of a submission."""
    request, submission = Request(scope, receive), scope["state"]["submission"]
    context = context_of(scope["app"])
    await request.body()
    job, _ = await jobs.submit_one(submission, store=context.store, checker=context.checker, request=request)
    await audit_submissions(request, [job.id], project=job.project, name=job.name)
    body = _job_adapter.dump_json(job, by_alias=True)
    headers = {"location": f"{V1}/jobs/{job.id}", "content-type": "application/json"}
    await Response(body, 201, headers)(scope, receive, send)
