"""Answers the most frequent requests of API keys ahead of the framework: one job, the newest jobs, and a submission of
a spec that names no files and no other jobs.

Finding a route among a hundred and resolving its dependencies takes several times as long as such a request. Any other
goes to the framework, and so does each of these that fails before anything is changed: its route alone decides on a
refusal.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import TypeAdapter
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from api.callers import admit_ahead, as_seen, audit_submissions, only_secret, visible_job
from api.requests import KeptBody, loads
from api.routes import jobs
from api.server import V1
from service.jobs.accounts import DEFAULT_PROJECT
from service.jobs.kinds.registry import spec_adapter
from service.jobs.records import ApiKey, Job, JobPage, NotFound
from service.jobs.spec.common import JOB_ID
from service.jobs.store import JobFilter, Store, StoreUnavailable, Submission, in_loop

_LIST = f"{V1}/jobs"
_BEFORE_ID = f"{_LIST}/"
_LIMIT = re.compile(rb"(?:limit=([1-9]\d?|100))?")
"""A list of at most 100 jobs: to encode more takes long."""
_USUAL_LIMIT = 50
_JSON = b"application/json"
_LONGEST = 32 << 10
"""Bytes of a spec; a longer body takes long to read."""
_CHANGES_THE_REQUEST = frozenset({b"idempotency-key", b"content-encoding", b"transfer-encoding"})
_job_adapter: TypeAdapter[Job] = TypeAdapter(Job)
_page_adapter: TypeAdapter[JobPage] = TypeAdapter(JobPage)

_Read = Callable[[Store, ApiKey], bytes]


class PlainRoutes:
    """Answers ``GET /v1/jobs/{job_id}`` without parameters, ``GET /v1/jobs`` with no parameter but a limit, and
    ``POST /v1/jobs`` with only a JSON spec; ``handlers`` maps the errors of an accepted submission to problems.
    """

    def __init__(self, app: ASGIApp, store: Store, handlers: dict[Any, Callable[..., Any]]) -> None:
        self._app = app
        self._store = store
        self._routes = {route.name: route for route in jobs.router.routes if isinstance(route, APIRoute)}
        expected = {error: handle for error, handle in handlers.items() if error not in (500, Exception)}
        self._accepting = ExceptionMiddleware(_accept, handlers=expected)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["root_path"] or only_secret(scope) is None:
            await self._app(scope, receive, send)
        elif scope["method"] == "GET" and (found := _plain_read(scope)) is not None:
            await self._answer_read(*found, scope, receive, send)
        elif scope["method"] == "POST" and _is_plain_submission(scope):
            await self._answer_submission(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _answer_read(self, name: str, read: _Read, scope: Scope, receive: Receive, send: Send) -> None:
        body = await in_loop(_read, scope, self._store, read)
        if body is None:
            await self._app(scope, receive, send)
            return
        scope["route"] = self._routes[name]
        headers = [(b"content-length", str(len(body)).encode()), (b"content-type", _JSON)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _answer_submission(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = KeptBody(receive)
        content = await body.whole()
        submission = None if content is None else await in_loop(_submission, scope, self._store, content)
        if submission is None:
            await self._app(scope, body.again, send)
            return
        scope["route"] = self._routes["submit_job"]
        scope["state"]["submission"] = submission
        await self._accepting(scope, body.again, send)


def _plain_read(scope: Scope) -> tuple[str, _Read] | None:
    """Return the name of the framework's route and the function that reads, if the request is answered here."""
    path, query = scope["path"], scope["query_string"]
    if path.startswith(_BEFORE_ID) and not query and JOB_ID.fullmatch(job_id := path.removeprefix(_BEFORE_ID)):
        return "get_job", partial(_job, job_id)
    if path == _LIST and (asked := _LIMIT.fullmatch(query)) is not None:
        return "list_jobs", partial(_newest, int(asked[1] or _USUAL_LIMIT))
    return None


def _read(scope: Scope, store: Store, read: _Read) -> bytes | None:
    try:
        key = admit_ahead(scope, store, "read")
        return None if key is None else read(store, key)
    except (NotFound, StoreUnavailable):
        return None


def _job(job_id: str, store: Store, key: ApiKey) -> bytes:
    return _job_adapter.dump_json(visible_job(key, store, job_id), by_alias=True)


def _newest(limit: int, store: Store, key: ApiKey) -> bytes:
    page = store.listing.newest(JobFilter(visible_to=key.project), limit, None, specs=False)
    items = tuple(as_seen(key, job) for job in page.items)
    return _page_adapter.dump_json(page.model_copy(update={"items": items}), by_alias=True)


def _is_plain_submission(scope: Scope) -> bool:
    names = {name for name, _ in scope["headers"]}
    types = [value for name, value in scope["headers"] if name == b"content-type"]
    lengths = [value for name, value in scope["headers"] if name == b"content-length"]
    is_usual = scope["path"] == _LIST and not scope["query_string"] and names.isdisjoint(_CHANGES_THE_REQUEST)
    return is_usual and types == [_JSON] and len(lengths) == 1 and int(lengths[0]) <= _LONGEST


def _submission(scope: Scope, store: Store, content: bytes) -> Submission | None:
    """Return the submission, if it is plain and its key may submit."""
    try:
        key = admit_ahead(scope, store, "submit")
        spec = None if key is None else spec_adapter.validate_python(loads(content))
        if key is None or spec is None or spec.stands_for_others or spec.dependencies():
            return None
        submission = store.jobs.submission(spec, key.name, project=key.project or DEFAULT_PROJECT)
    except (ValueError, RecursionError, StoreUnavailable):
        return None
    return None if submission.uploads else submission


async def _accept(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the job of a submission."""
    request, submission = Request(scope, receive), scope["state"]["submission"]
    await request.body()
    job, _ = await jobs.submit(submission, request)
    await audit_submissions(request, [job.id], project=job.project, name=job.name)
    headers = {"location": f"{V1}/jobs/{job.id}", "content-type": "application/json"}
    await Response(_job_adapter.dump_json(job, by_alias=True), 201, headers)(scope, receive, send)
