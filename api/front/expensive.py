"""Answers what takes long to make: by turns, and in a process of its own.

A read of many records has a turn (:mod:`api.offload.turns`), so that nobody's reads keep those of others waiting. What
checks submissions has turns of its own (:mod:`api.offload.checker`). Both are passed on to another process
(:mod:`api.offload.apart`), if the server has one.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys

import httpx2
from fastapi import Request
from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.callers import only_secret, session_cookie
from api.offload import Apart, FairTurns, NotReady
from api.requests import KeptBody, ProblemError, respond, wants_stream
from api.routes import (
    artifacts,
    audit,
    batches,
    drafts,
    events,
    jobs,
    logs,
    metrics,
    queue,
    report,
    schedule,
    timeline,
    tree,
)
from api.server import V1
from service.jobs.store import Store, StoreUnavailable, in_loop

_READS = frozenset(
    {
        "list_jobs", "count_jobs", "get_job_metrics", "compare_metrics", "get_job_events", "get_job_logs",
        "get_job_tree", "get_job_bounds", "get_job_report", "get_job_timeline", "list_artifacts", "read_queue",
        "list_audit",
    }
)  # fmt: skip
_CHECKS = frozenset({"submit_job", "submit_batch", "check_draft", "get_job_schedule"})
_ROUTERS = (jobs, batches, drafts, queue, events, metrics, logs, tree, report, schedule, timeline, artifacts, audit)
_LONG_BODY = 64 << 10
_UNREAD_S = 2.0
"""Seconds of an answer after which its turn ends, whether or not its client has read it."""


class ExpensiveAnswers:
    """Answers requests to the routes named above, and leaves all others to ``app``."""

    def __init__(self, app: ASGIApp, store: Store, turns: FairTurns, apart: Apart | None) -> None:
        self._app = app
        self._store = store
        self._turns = turns
        self._apart = apart
        self._long_bodies = FairTurns(turns.most_of_one, at_once=sys.maxsize)
        """A key's bodies that take long to move: one at a time, since other requests wait meanwhile."""
        routes = [route for module in _ROUTERS for route in module.router.routes if isinstance(route, APIRoute)]
        self._routes = [route for route in routes if route.name in _READS | _CHECKS]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._route(scope)
        key = None if route is None else await self._key(scope)
        if route is None or key is None:
            await self._app(scope, receive, send)
            return
        body = KeptBody(receive)
        try:
            if route.name in _READS:
                await self._read(route, key, scope, body, send)
            elif _is_long(scope):
                async with self._long_bodies.turn(key):
                    await self._check(route, scope, body, send)
            else:
                await self._check(route, scope, body, send)
        except ProblemError as refusal:
            await respond(refusal.status, refusal.detail, headers=refusal.headers)(scope, receive, send)

    async def _read(self, route: APIRoute, key: str, scope: Scope, body: KeptBody, send: Send) -> None:
        if (content := await body.whole()) is None:
            return
        async with self._turns.turn(key) as turn:

            async def send_noting(message: Message) -> None:
                if message["type"] == "http.response.start":
                    asyncio.get_running_loop().call_later(_UNREAD_S, turn.give_back)
                await send(message)

            await self._answer(route, scope, body, content, send_noting)

    async def _check(self, route: APIRoute, scope: Scope, body: KeptBody, send: Send) -> None:
        if (content := await body.whole()) is not None:
            await self._answer(route, scope, body, content, send)

    def _route(self, scope: Scope) -> APIRoute | None:
        if scope["type"] != "http" or scope["root_path"] or not scope["path"].startswith(f"{V1}/"):
            return None
        path = scope["path"].removeprefix(V1)
        for route in self._routes:
            if scope["method"] in (route.methods or ()) and route.path_regex.match(path):
                return None if wants_stream(Request(scope)) else route
        return None

    async def _key(self, scope: Scope) -> str | None:
        """Return whose turn it is; ``None`` for nobody's, whom the route refuses."""
        if (secret := only_secret(scope)) is not None:
            try:
                key = await in_loop(self._store.keys.verify, secret)
            except StoreUnavailable:
                return None
            return None if key is None else key.id
        session = session_cookie(Request(scope))
        return None if session is None else hashlib.sha256(session.encode()).hexdigest()

    async def _answer(self, route: APIRoute, scope: Scope, body: KeptBody, content: bytes, send: Send) -> None:
        if self._apart is not None:
            scope["route"] = route
            has_begun = False

            async def send_noting(message: Message) -> None:
                nonlocal has_begun
                has_begun = True
                await send(message)

            try:
                await self._apart.forward(scope, body.rest, send_noting, content)
            except NotReady:
                pass
            except httpx2.HTTPError as error:
                if has_begun:
                    raise
                problem = respond(503, f"the answer could not be made: {error}", headers={"Retry-After": "1"})
                await problem(scope, body.again, send)
                return
            else:
                return
        await self._app(scope, body.again, send)


def _is_long(scope: Scope) -> bool:
    """Return whether a request's body is long, or may be."""
    headers = dict(scope["headers"])
    return b"transfer-encoding" in headers or int(headers.get(b"content-length", 0)) > _LONG_BODY
