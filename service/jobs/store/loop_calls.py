"""Runs calls of the store in an event loop, without a thread for each: where a call asks the broker, it is set aside
until the answer is there, and the loop goes on with others meanwhile.

A call is a greenlet, so that the store's classes are written once, for threads and for loops. What it does between two
questions runs in the loop: it may neither take long, nor read files, nor hold a lock while it asks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import copy_context
from typing import Any, ParamSpec, TypeVar

from greenlet import getcurrent, greenlet

P = ParamSpec("P")
R = TypeVar("R")


async def in_loop(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Return what a call of the store returns, or raise what it raises. A call that has begun is made to its end, also
    where nobody waits for it any more.
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
        self.gr_context = copy_context()

    def run(self) -> None:
        """Make the call and tell who waits for it."""
        try:
            result = self._function()
        except Exception as error:
            if not self._outcome.done():
                self._outcome.set_exception(error)
        else:
            if not self._outcome.done():
                self._outcome.set_result(result)

    def wait(self) -> Any:
        """Set the call aside until :meth:`go_on`; return what that is told, or raise it if it is an exception."""
        assert self.parent is not None
        told = self.parent.switch()
        if isinstance(told, Exception):
            raise told
        return told

    def go_on(self, told: Any = None) -> None:
        """Go on with a call that waits."""
        self.switch(told)

    def sleep(self, seconds: float) -> None:
        """Set the call aside for some time."""
        self.loop.call_later(seconds, self.go_on)
        self.wait()


def current_call() -> LoopCall | None:
    """Return the call that this code is a part of; ``None`` in a thread of its own."""
    current = getcurrent()
    return current if isinstance(current, LoopCall) else None
