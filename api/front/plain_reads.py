"""Answers the most frequent requests, one job and the newest jobs for an API key, ahead of the framework.

Finding a route among a hundred and resolving its dependencies takes several times as long as such a read. Every
other request, and every plain read that fails, goes to the framework's route, which alone decides on the
answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

from fastapi.routing import APIRoute
from pydantic import TypeAdapter
from starlette.types import ASGIApp, Receive, Scope, Send

from api.callers import as_seen, granted, near_end, visible_job
from api.routes import jobs
from api.server import V1
from service.jobs.records import ApiKey, Job, JobPage, NotFound
from service.jobs.spec.common import JOB_ID
from service.jobs.store import JobFilter, Store, StoreUnavailable, in_loop

_LIST = f"{V1}/jobs"
_BEFORE_ID = f"{_LIST}/"
_LIMIT = re.compile(rb"(?:limit=([1-9]\d?|100))?")
_USUAL_LIMIT = 50
_BEARER = b"bearer "
_job_adapter: TypeAdapter[Job] = TypeAdapter(Job)
_page_adapter: TypeAdapter[JobPage] = TypeAdapter(JobPage)

_Read = Callable[[ApiKey], bytes]


class PlainReads:
    """Answers ``GET /v1/jobs/{job_id}`` without parameters, and ``GET /v1/jobs`` with no parameter but a limit of
    100 at most: to encode more takes long.
    """

    def __init__(self, app: ASGIApp, store: Store) -> None:
        self._app = app
        self._store = store
        routes = {route.name: route for route in jobs.router.routes if isinstance(route, APIRoute)}
        self._of_job, self._of_list = routes["get_job"], routes["list_jobs"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = self._plain(scope)
        if found is not None and (secret := only_secret(scope)):
            route, read = found
            body = await in_loop(self._read, scope, secret, read)
            if body is not None:
                scope["route"] = route
                await _send(body, send)
                return
        await self._app(scope, receive, send)

    def _plain(self, scope: Scope) -> tuple[APIRoute, _Read] | None:
        """Return the function that reads, if the request is answered here."""
        if scope["type"] != "http" or scope["method"] != "GET" or scope["root_path"]:
            return None
        path, query = scope["path"], scope["query_string"]
        if path.startswith(_BEFORE_ID) and not query and JOB_ID.fullmatch(job_id := path.removeprefix(_BEFORE_ID)):
            return self._of_job, partial(self._job, job_id)
        if path == _LIST and (asked := _LIMIT.fullmatch(query)) is not None:
            return self._of_list, partial(self._newest, int(asked[1] or _USUAL_LIMIT))
        return None

    def _read(self, scope: Scope, secret: str, read: _Read) -> bytes | None:
        try:
            key = self._store.keys.verify(secret)
            if key is None or "read" not in granted(key):
                return None
            body = read(key)
        except (NotFound, StoreUnavailable):
            return None
        scope["state"]["key_expires"] = near_end(key)
        return body

    def _job(self, job_id: str, key: ApiKey) -> bytes:
        return _job_adapter.dump_json(visible_job(key, self._store, job_id), by_alias=True)

    def _newest(self, limit: int, key: ApiKey) -> bytes:
        page = self._store.listing.newest(JobFilter(visible_to=key.project), limit, None, specs=False)
        items = tuple(as_seen(key, job) for job in page.items)
        return _page_adapter.dump_json(page.model_copy(update={"items": items}), by_alias=True)


def only_secret(scope: Scope) -> str | None:
    """Return the request's key; ``None`` if it sends none, or more than one."""
    given = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(given) != 1 or given[0][: len(_BEARER)].lower() != _BEARER:
        return None
    secret: str = given[0][len(_BEARER) :].decode("latin-1")
    return secret


async def _send(body: bytes, send: Send) -> None:
    headers = [(b"content-length", str(len(body)).encode()), (b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})
