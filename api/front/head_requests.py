"""Answers HEAD like GET, without the body."""

from __future__ import annotations

import asyncio

from starlette.types import Message, Receive, Scope, Send

from api.server import HttpMiddleware


class HeadRequests(HttpMiddleware):
    """Lets the application answer a GET, and ends that once the status and the headers are known: a stream has no end,
    and a file may be long.
    """

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        as_get, has_begun = {**scope, "method": "GET"}, False

        async def send_head(message: Message) -> None:
            nonlocal has_begun
            if has_begun or message["type"] != "http.response.start":
                return
            has_begun = True
            scope["route"] = as_get.get("route")
            await send(message)
            await send({"type": "http.response.body", "body": b""})
            answering.cancel()

        async def answer() -> None:
            await self._app(as_get, receive, send_head)

        answering = asyncio.create_task(answer())
        try:
            await answering
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if not has_begun or (current is not None and current.cancelling()):
                raise
