"""Answers the most frequent request, the state of one job for an API key, ahead of the framework.

To find a route among a hundred and to resolve its dependencies takes several times as long as the read itself. What is
no plain read that succeeds, whatever the reason, goes to the framework's route, which then answers or refuses it: what
it says, and to whom, is decided there alone.
"""

from __future__ import annotations

from fastapi.routing import APIRoute
from pydantic import TypeAdapter
from starlette.types import ASGIApp, Receive, Scope, Send

from api.access import visible_job
from api.monitoring import V1
from api.routes import jobs
from api.security import granted, near_end
from service.jobs.records import Job, NotFound
from service.jobs.spec.base import JOB_ID
from service.jobs.store import Store, StoreUnavailable, in_loop

_BEFORE_ID = f"{V1}/jobs/"
_BEARER = b"bearer "
_job_adapter: TypeAdapter[Job] = TypeAdapter(Job)


class JobReads:
    """Answers ``GET /v1/jobs/{job_id}`` without parameters, for a key that may read the job."""

    def __init__(self, app: ASGIApp, store: Store) -> None:
        self._app = app
        self._store = store
        self._route = next(
            route for route in jobs.router.routes if isinstance(route, APIRoute) and route.name == "get_job"
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "GET" and scope["path"].startswith(_BEFORE_ID):
            job_id, secret = scope["path"].removeprefix(_BEFORE_ID), _only_secret(scope)
            if secret and not scope["query_string"] and not scope["root_path"] and JOB_ID.fullmatch(job_id):
                body = await in_loop(self._read, scope, secret, job_id)
                if body is not None:
                    scope["route"] = self._route
                    await _send(body, send)
                    return
        await self._app(scope, receive, send)

    def _read(self, scope: Scope, secret: str, job_id: str) -> bytes | None:
        try:
            key = self._store.keys.verify(secret)
            if key is None or "read" not in granted(key):
                return None
            job = visible_job(key, self._store, job_id)
        except (NotFound, StoreUnavailable):
            return None
        scope["state"]["key_expires"] = near_end(key)
        return _job_adapter.dump_json(job, by_alias=True)


def _only_secret(scope: Scope) -> str | None:
    """Return what the request sends as its key; ``None`` where it sends none, or more than one."""
    given = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(given) != 1 or given[0][: len(_BEARER)].lower() != _BEARER:
        return None
    secret: str = given[0][len(_BEARER) :].decode("latin-1")
    return secret


async def _send(body: bytes, send: Send) -> None:
    headers = [(b"content-length", str(len(body)).encode()), (b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})
