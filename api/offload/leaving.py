"""Ends work whose client has left."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive

from api.requests import ProblemError

Result = TypeVar("Result")


class ClientLeftError(ProblemError):
    """The client closed its connection, so its answer is not made to its end."""

    def __init__(self) -> None:
        super().__init__(400, "the client closed its connection before the answer")


async def while_connected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of ``work``, which is cancelled when the client closes its connection.

    The request's body must have been read.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(disconnected(request.receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeftError
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def disconnected(receive: Receive) -> None:
    """Return once the client has closed its connection. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
