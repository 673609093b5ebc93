"""Ends the reading of a long record when its reader has left."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Annotated, Any, TypeVar

import orjson
from fastapi import Depends, Request

from api.callers import context_of
from api.offload import ClientLeftError, disconnected
from api.reads.history import EventHistory
from service.jobs.events import Check

Item = TypeVar("Item")


async def _staying(request: Request) -> AsyncIterator[Check]:
    """Yield a function for any thread, which raises :class:`ClientLeftError` once the client has left."""
    left = threading.Event()

    async def watch() -> None:
        await disconnected(request.receive)
        left.set()

    def check() -> None:
        if left.is_set():
            raise ClientLeftError

    watching = asyncio.create_task(watch())
    try:
        yield check
    finally:
        left.set()
        watching.cancel()


async def _history(request: Request, check: Annotated[Check, Depends(_staying)]) -> EventHistory:
    context = context_of(request.app)
    return EventHistory(context.store, context.settings.layout, check)


HistoryDep = Annotated[EventHistory, Depends(_history)]
"""Reads jobs' records until the client has left. The request's body must have been read."""


def while_staying(items: Iterable[Item]) -> Iterator[Item]:
    """Yield the items of an answer that is already being sent; end quietly once the client has left."""
    try:
        yield from items
    except ClientLeftError:
        return


def within(events: Iterable[dict[str, Any]], most_bytes: int) -> Iterator[dict[str, Any]]:
    """Yield events of a record, which are held at once, up to a number of bytes."""
    for event in events:
        most_bytes -= len(orjson.dumps(event))
        if most_bytes < 0:
            return
        yield event
