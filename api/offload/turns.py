"""Gives turns to expensive answers: few at a time, and those who ask by turns, however much one of them asks."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from api.requests import ProblemError

AT_ONCE = 2
"""Expensive answers that a process makes at a time, of different keys."""
_RETRY_AFTER_S = 1


class FairTurns:
    """Gives each key one turn at a time, in one event loop.

    ``most_of_one`` is the limit on the answers of one key that are being made or wait.
    """

    def __init__(self, most_of_one: int, at_once: int = AT_ONCE) -> None:
        self.most_of_one = most_of_one
        self._free = at_once
        self._asked: dict[str, int] = {}
        self._having: set[str] = set()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """What waits, by key; the key whose turn is next comes first."""

    @asynccontextmanager
    async def turn(self, key: str) -> AsyncIterator[Turn]:
        """Wait for a turn of this key, and have it while the block runs, or until it is given back before. Raises a 429
        if too many of this key wait already.
        """
        if (asked := self._asked.get(key, 0)) >= self.most_of_one:
            detail = f"{asked} expensive requests of this key are being answered or wait, its limit; send fewer at once"
            raise ProblemError(429, detail, headers={"Retry-After": str(_RETRY_AFTER_S)})
        self._asked[key] = asked + 1
        turn = Turn(self, key)
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
        return any(not given.done() for asking in self._waiting.values() for given in asking)

    async def _take(self, key: str) -> None:
        given = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, deque()).append(given)
        self._hand_out()
        try:
            await given
        except asyncio.CancelledError:
            if given.done() and not given.cancelled():
                self.end(key)
            raise

    def end(self, key: str) -> None:
        """End the turn of a key; others have theirs then."""
        self._having.remove(key)
        self._free += 1
        self._hand_out()

    def _hand_out(self) -> None:
        for key in [each for each in self._waiting if each not in self._having]:
            if not self._free:
                return
            asking = self._waiting.pop(key)
            while asking and (given := asking.popleft()):
                if not given.done():
                    given.set_result(None)
                    self._having.add(key)
                    self._free -= 1
                    break
            if asking:
                self._waiting[key] = asking


class Turn:
    """One turn, from when it is had until it is given back."""

    def __init__(self, turns: FairTurns, key: str) -> None:
        self._turns, self._key = turns, key
        self.is_had = False

    def give_back(self) -> None:
        """Let the next one have it; may be called again."""
        if self.is_had:
            self.is_had = False
            self._turns.end(self._key)
