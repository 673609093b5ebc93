"""Runs calls of the store in an event loop, without a thread for each: when a call asks the broker, it is suspended
until the answer arrives, and the loop continues with others.

A call is a greenlet, so that the store's classes are written once, for threads and for loops. Its code between two
questions runs in the loop: it may neither take long, nor read files, nor hold a lock while it asks. Simultaneous
questions of many calls go to the broker and come back in one trip.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import copy_context
from typing import Any, ParamSpec, TypeVar

import redis
import redis.asyncio as redis_async
from greenlet import getcurrent, greenlet
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from service.jobs.store.outage import BrokerOutage, BrokerTimeouts, PatientAsyncPool

P = ParamSpec("P")
R = TypeVar("R")


async def in_loop(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Make a call of the store: return its result, or raise its error. A call that has begun runs to its end,
    even if its caller stops waiting.
    """
    outcome: asyncio.Future[R] = asyncio.get_running_loop().create_future()
    LoopCall(lambda: function(*args, **kwargs), outcome).switch()
    return await outcome


class LoopCall(greenlet):  # type: ignore[misc]  # the library has no types
    """A call under way in an event loop."""

    def __init__(self, function: Callable[[], Any], outcome: asyncio.Future[Any]) -> None:
        super().__init__()
        self._function = function
        self._outcome = outcome
        self.loop = outcome.get_loop()
        self.gr_context = copy_context()  # a greenlet begins without its caller's context variables

    def run(self) -> None:
        """Make the call and wake its waiter."""
        try:
            result = self._function()
        except Exception as error:
            if not self._outcome.done():  # its waiter may have been cancelled
                self._outcome.set_exception(error)
        else:
            if not self._outcome.done():
                self._outcome.set_result(result)

    def wait(self) -> Any:
        """Suspend the call until :meth:`go_on`; return its argument, or raise it if it is an exception."""
        assert self.parent is not None
        told = self.parent.switch()  # into the loop, until somebody resumes this call from there
        if isinstance(told, Exception):
            raise told
        return told

    def go_on(self, told: Any = None) -> None:
        """Resume a suspended call."""
        self.switch(told)

    def sleep(self, seconds: float) -> None:
        """Suspend the call for some time."""
        self.loop.call_later(seconds, self.go_on)
        self.wait()


def current_call() -> LoopCall | None:
    """Return the call that this code is a part of; ``None`` in a thread of its own."""
    current = getcurrent()
    return current if isinstance(current, LoopCall) else None


_MOST_AT_ONCE = 4
"""The most simultaneous trips, each over a connection of its own."""

Words = tuple[str | int | float | bytes, ...]


class SharedTrips:
    """Gathers commands while the loop is busy, and sends them together. Belongs to one event loop.

    No command is sent twice. When a connection breaks, all calls whose commands it carried get the error.
    """

    def __init__(self, url: str, timeouts: BrokerTimeouts) -> None:
        pool = PatientAsyncPool.from_url(url, retry=Retry(NoBackoff(), 0), **timeouts.of_a_pool())
        pool.outage = BrokerOutage(timeouts.outage_s)
        self.loop = asyncio.get_running_loop()
        self._pool: Any = pool  # whose library has no types
        self._redis = redis_async.Redis.from_pool(pool)
        self._idle: list[Any] = []
        self._waiting: list[tuple[LoopCall, Words]] = []
        self._under_way: set[asyncio.Task[None]] = set()
        self._is_leaving = False

    def ask(self, call: LoopCall, words: Words) -> Any:
        """Return the answer to one command of a call. Raises the library's errors."""
        self._waiting.append((call, words))
        if not self._is_leaving and len(self._under_way) < _MOST_AT_ONCE:
            # Not now but at the loop's next turn, so that calls that ask in this one travel along.
            self._is_leaving = True
            self.loop.call_soon(self._leave)
        return call.wait()

    def _leave(self) -> None:
        self._is_leaving = False
        if self._waiting:
            trip, self._waiting = self._waiting, []
            task = self.loop.create_task(self._travel(trip))
            self._under_way.add(task)
            task.add_done_callback(self._arrived)

    async def _travel(self, trip: list[tuple[LoopCall, Words]]) -> None:
        try:
            answers = await self._answers([words for _, words in trip])
        except Exception as error:
            answers = [error] * len(trip)
        # Each goes on at once, here, until it asks again or ends; what it asks then travels with the next trip.
        for (call, _), answer in zip(trip, answers, strict=True):
            call.go_on(answer)

    async def _answers(self, commands: list[Words]) -> list[Any]:
        """Do the work of the library's pipeline, whose own overhead exceeds the trip, over a connection that is
        kept.
        """
        connection = self._idle.pop() if self._idle else self._pool.make_connection()
        try:
            # A connection that is readable before any question was closed by the broker.
            if not connection.is_connected or await connection.can_read():
                await self._pool.ensure_connection(connection)
            await connection.send_packed_command(connection.pack_commands(commands))
            return [await self._answer(connection, words) for words in commands]
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        finally:
            self._idle.append(connection)

    async def _answer(self, connection: Any, words: Words) -> Any:
        try:
            return await self._redis.parse_response(connection, str(words[0]))
        except redis.ResponseError as error:
            return error  # of this command alone: the answers behind it still have to be read

    def _arrived(self, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        # What was asked while every connection was on its way has nobody else to send it.
        if self._waiting and not self._is_leaving:
            self._leave()

    async def close(self) -> None:
        """Close the connections, once all trips have come back."""
        while self._under_way:
            await asyncio.wait(self._under_way)
        for connection in self._idle:
            await connection.disconnect()
        await self._redis.aclose()
