"""Gives turns to expensive answers: few at a time, and those who ask by turns, however much one of them asks."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from api.problems import ProblemError

AT_ONCE = 2
"""Expensive answers that a process makes at a time: one computes while the other waits for the broker or a disk."""
_RETRY_AFTER_S = 1


class Turns:
    """Lives in one event loop. ``most_of_one`` counts the answers of one key that are being made or wait."""

    def __init__(self, most_of_one: int, at_once: int = AT_ONCE) -> None:
        self._most_of_one = most_of_one
        self._free = at_once
        self._asked: dict[str, int] = {}
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """Those who wait, by key; the key whose turn is next comes first."""

    @asynccontextmanager
    async def turn(self, key: str) -> AsyncIterator[Turn]:
        """Wait for a turn of this key, and have it while the block runs, or until it is given back before. Raises a 429
        if too many of this key wait already.
        """
        if (asked := self._asked.get(key, 0)) >= self._most_of_one:
            detail = f"{asked} expensive reads of this key are being answered or wait, its limit; ask for fewer at once"
            raise ProblemError(429, detail, headers={"Retry-After": str(_RETRY_AFTER_S)})
        self._asked[key] = asked + 1
        turn = Turn(self)
        try:
            await self._take(key)
            turn.is_had = True
            yield turn
        finally:
            turn.give_back()
            self._asked[key] -= 1
            if not self._asked[key]:
                del self._asked[key]

    @property
    def is_asked_for(self) -> bool:
        """Return whether anybody waits for a turn."""
        return bool(self._waiting)

    async def _take(self, key: str) -> None:
        if self._free and not self._waiting:
            self._free -= 1
            return
        given = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, deque()).append(given)
        try:
            await given
        except asyncio.CancelledError:
            if given.done() and not given.cancelled():
                self.pass_on()
            raise

    def pass_on(self) -> None:
        """Give a turn that has ended to the next key that waits."""
        while self._waiting:
            key, asking = self._waiting.popitem(last=False)
            given = asking.popleft()
            if asking:
                self._waiting[key] = asking
            if not given.done():
                given.set_result(None)
                return
        self._free += 1


class Turn:
    """One turn, from when it is had until it is given back."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self.is_had = False

    def give_back(self) -> None:
        """Let the next one have it; may be called again."""
        if self.is_had:
            self.is_had = False
            self._turns.pass_on()
