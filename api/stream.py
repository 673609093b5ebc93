"""The hub: one blocking read per process over all watched streams, fanned out to bounded queues.

A subscriber first catches up with reads of its own; when a read leaves it no further behind than the hub, it joins.
From then on the hub hands it every new batch. A subscriber whose queue is full is detached, not cut: it catches up
from its cursor at its own pace and joins again, so memory is bounded and nothing is lost in silence.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from api.frames import Cursor, FrameBatch, batches
from service.jobs.store import Credential, StoreUnavailable
from service.jobs.store.tail import StreamTail, parse_id

log = logging.getLogger(__name__)

PAGE = 512
"""Events per job in one read."""
QUEUE_FRAMES = 4096
BLOCK_MS = 100
"""Also the longest time until a newly watched stream is part of the read."""
DISCOVER_S = 0.5
REVOKE_S = 0.5
"""How often it is asked whether open streams are still admitted."""
RETRY_S = 0.5
RECENT_JOBS = 256


@dataclass(eq=False)
class Subscription:
    """One consumer's position, watched jobs and queue."""

    credential: Credential
    cursor: Cursor
    jobs: set[str]
    everything: bool = False
    """Jobs that appear later are watched too."""
    joined: bool = False
    revoked: bool = False
    """What it was admitted by no longer admits anybody."""
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    _queue: deque[FrameBatch] = field(default_factory=deque)
    _queued: int = 0

    def offer(self, found: Sequence[FrameBatch]) -> bool:
        """Queue what the hub read; ``False`` when there is no room."""
        size = sum(len(batch.frames) for batch in found)
        if self._queued + size > QUEUE_FRAMES:
            return False
        self._queue.extend(found)
        self._queued += size
        self.wake.set()
        return True

    def take(self) -> list[FrameBatch]:
        """Return everything queued and not delivered yet; the queue is empty afterwards."""
        taken = self.fresh(self._queue)
        self._queue.clear()
        self._queued = 0
        self.wake.clear()
        return taken

    def fresh(self, found: Iterable[FrameBatch]) -> list[FrameBatch]:
        """Return the batches without the frames that lie at or before the cursor."""
        kept = []
        for batch in found:
            cursor = parse_id(self.cursor.of(batch.job_id))
            if batch.frames[0].position > cursor:
                kept.append(batch)
            elif batch.frames[-1].position > cursor:
                kept.append(FrameBatch(batch.job_id, tuple(frame for frame in batch.frames if frame.position > cursor)))
        return kept


class TooManyStreams(Exception):  # noqa: N818
    """The process or the key has as many open streams as it may."""


class Hub:
    """Fans the streams of jobs out to subscriptions. Lives in one event loop."""

    def __init__(
        self,
        tail: StreamTail,
        ended: Callable[[Sequence[Credential]], set[Credential]],
        *,
        max_streams: int = 1000,
        max_streams_per_key: int = 100,
    ) -> None:
        """Make a hub that reads nothing yet; ``ended`` tells, from the store, which credentials no longer admit
        anybody.
        """
        self.tail = tail
        self._ended = ended
        self.closing = asyncio.Event()
        self._max_streams = max_streams
        self._max_streams_per_key = max_streams_per_key
        self._open: Counter[str] = Counter()
        self._cursors: dict[str, str] = {}
        self._watchers: dict[str, set[Subscription]] = {}
        self._subscriptions: set[Subscription] = set()
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to read. The hub lives in the running event loop."""
        self._loop = asyncio.get_running_loop()
        forever = (self._read_forever, self._discover_forever, self._revoke_forever)
        self._tasks = [asyncio.create_task(each()) for each in forever]

    def close(self) -> None:
        """End all streams, now. Safe to call twice."""
        self.closing.set()
        self._changed.set()
        for subscription in self._subscriptions:
            subscription.wake.set()

    def close_soon(self) -> None:
        """Call :meth:`close` from a signal handler."""
        self._loop.call_soon_threadsafe(self.close)

    @property
    def open_streams(self) -> int:
        return self._open.total()

    async def stop(self) -> None:
        self.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.tail.close()

    @contextlib.contextmanager
    def subscribe(
        self, credential: Credential, cursor: Cursor, jobs: Iterable[str], *, everything: bool = False
    ) -> Iterator[Subscription]:
        """Yield an open subscription of one key. Raises :class:`TooManyStreams`."""
        self.check_room(credential)
        subscription = Subscription(credential, cursor, set(jobs), everything)
        self._open[credential.key_id] += 1
        self._subscriptions.add(subscription)
        try:
            yield subscription
        finally:
            self._subscriptions.discard(subscription)
            self.leave(subscription)
            self._open[credential.key_id] -= 1

    def check_room(self, credential: Credential) -> None:
        """Raise :class:`TooManyStreams` when one more stream of this key would be too many."""
        if self._open.total() >= self._max_streams:
            raise TooManyStreams(f"this process has {self._max_streams} event streams open, its limit")
        if self._open[credential.key_id] >= self._max_streams_per_key:
            raise TooManyStreams(f"this key has {self._max_streams_per_key} event streams open, its limit")

    async def catch_up(self, subscription: Subscription) -> list[FrameBatch]:
        """Return the next page after the subscription's cursor; empty, and joined, when there is none."""
        cursors = {job_id: subscription.cursor.of(job_id) for job_id in subscription.jobs}
        found = subscription.fresh(batches(await self.tail.read(cursors, count=PAGE), PAGE))
        if not found:
            self._join(subscription)
        return found

    def _join(self, subscription: Subscription) -> None:
        """Hand the subscription what the hub reads from now on, unless the hub is already ahead of it."""
        for job_id in subscription.jobs:
            ahead = self._cursors.get(job_id)
            if ahead is not None and parse_id(ahead) > parse_id(subscription.cursor.of(job_id)):
                return
        for job_id in subscription.jobs:
            self._cursors.setdefault(job_id, subscription.cursor.of(job_id))
            self._watchers.setdefault(job_id, set()).add(subscription)
        subscription.joined = True
        self._changed.set()

    def leave(self, subscription: Subscription) -> None:
        """Detach a subscription; it may catch up and join again."""
        subscription.joined = False
        subscription.take()
        for job_id in subscription.jobs:
            watchers = self._watchers.get(job_id, set())
            watchers.discard(subscription)
            if not watchers:
                self._watchers.pop(job_id, None)
                self._cursors.pop(job_id, None)
        subscription.wake.set()

    async def _read_forever(self) -> None:
        while not self.closing.is_set():
            if not self._cursors:
                await self._changed.wait()
                self._changed.clear()
                continue
            try:
                read = await self.tail.read(dict(self._cursors), count=PAGE, block_ms=BLOCK_MS)
            except StoreUnavailable as error:
                log.warning("live events wait for the broker: %s", error)
                await asyncio.sleep(RETRY_S)
                continue
            self._dispatch(batches(read, PAGE))

    def _dispatch(self, found: tuple[FrameBatch, ...]) -> None:
        addressed: dict[Subscription, list[FrameBatch]] = {}
        for batch in found:
            if batch.job_id in self._cursors:
                self._cursors[batch.job_id] = batch.frames[-1].id
            for subscription in self._watchers.get(batch.job_id, ()):
                addressed.setdefault(subscription, []).append(batch)
        for subscription, its_batches in addressed.items():
            if not subscription.offer(its_batches):
                self.leave(subscription)

    async def _discover_forever(self) -> None:
        """Tell the subscriptions to everything about jobs that appeared, and let go of those long ended."""
        while not self.closing.is_set():
            await asyncio.sleep(DISCOVER_S)
            wanting = [subscription for subscription in self._subscriptions if subscription.everything]
            if not wanting:
                continue
            with contextlib.suppress(StoreUnavailable):
                jobs = set(await self.tail.recent_jobs(RECENT_JOBS))
                for subscription in wanting:
                    self._watch_exactly(subscription, jobs)

    async def _revoke_forever(self) -> None:
        """End streams whose key was revoked or whose session is over."""
        while not self.closing.is_set():
            await asyncio.sleep(REVOKE_S)
            credentials = list({subscription.credential for subscription in self._subscriptions})
            with contextlib.suppress(StoreUnavailable):
                ended = await asyncio.to_thread(self._ended, credentials) if credentials else set()
                for subscription in self._subscriptions:
                    if subscription.credential in ended:
                        subscription.revoked = True
                        subscription.wake.set()

    def _watch_exactly(self, subscription: Subscription, jobs: set[str]) -> None:
        if subscription.jobs != jobs:
            self.leave(subscription)
            subscription.jobs = set(jobs)
