"""Runs the hub: one blocking read per process over all watched streams, fanned out to bounded queues.

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
from service.jobs.events import STREAM_PING_S
from service.jobs.store import Credential, StoreUnavailable
from service.jobs.store.tail import StreamTail, parse_id

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HubSettings:
    """Tunes how event streams are served; the two limits without a default are an operator's settings."""

    max_streams: int
    """Streams open at once, per process."""
    max_streams_per_key: int
    page: int = 512
    """Events per job in one read."""
    queue_frames: int = 4096
    """Events that wait for a slow client; with more it catches up by reads of its own."""
    block_ms: int = 100
    """Longest time of a read without events; also that until a newly watched stream is part of one."""
    discover_s: float = 0.5
    """How often streams over all jobs learn of new ones."""
    revoke_s: float = 0.5
    """How often it is asked whether open streams are still admitted."""
    retry_s: float = 0.5
    """Pause while the broker is away."""
    recent_jobs: int = 256
    """Jobs that a stream over all of them watches, besides the active ones."""
    ping_s: float = STREAM_PING_S
    """Silence after which a client is told that the stream lives; clients rely on no more than this default."""


@dataclass(eq=False)
class Subscription:
    """One consumer's position, watched jobs and queue."""

    credential: Credential
    cursor: Cursor
    jobs: set[str]
    most_frames: int
    """Frames that may be queued."""
    project: str | None = None
    """What it shows are jobs that the members of this project may read; those of all projects when ``None``."""
    everything: bool = False
    """Jobs that appear later are watched too."""
    joined: bool = False
    revoked: bool = False
    """What it was admitted by no longer admits anybody, or not to a job that it shows."""
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    _queue: deque[FrameBatch] = field(default_factory=deque)
    _queued: int = 0

    def offer(self, incoming: Sequence[FrameBatch]) -> bool:
        """Queue what the hub read; ``False`` when there is no room."""
        size = sum(len(batch.frames) for batch in incoming)
        if self._queued + size > self.most_frames:
            return False
        self._queue.extend(incoming)
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

    def fresh(self, incoming: Iterable[FrameBatch]) -> list[FrameBatch]:
        """Return the batches without the frames that lie at or before the cursor."""
        kept = []
        for batch in incoming:
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
        settings: HubSettings,
    ) -> None:
        """Make a hub that reads nothing yet; ``ended`` tells, from the store, which credentials no longer admit
        anybody.
        """
        self.tail = tail
        self._ended = ended
        self.closing = asyncio.Event()
        self.settings = settings
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
        self,
        credential: Credential,
        cursor: Cursor,
        jobs: Iterable[str],
        *,
        project: str | None,
        everything: bool = False,
    ) -> Iterator[Subscription]:
        """Yield an open subscription of one key, which speaks in ``project``. Raises :class:`TooManyStreams`."""
        self.check_room(credential)
        most = self.settings.queue_frames
        subscription = Subscription(credential, cursor, set(jobs), most, project=project, everything=everything)
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
        if self._open.total() >= self.settings.max_streams:
            raise TooManyStreams(f"this process has {self.settings.max_streams} event streams open, its limit")
        if self._open[credential.key_id] >= self.settings.max_streams_per_key:
            raise TooManyStreams(f"this key has {self.settings.max_streams_per_key} event streams open, its limit")

    async def catch_up(self, subscription: Subscription) -> list[FrameBatch]:
        """Return the next page after the subscription's cursor; empty, and joined, when there is none."""
        cursors = {job_id: subscription.cursor.of(job_id) for job_id in subscription.jobs}
        found = subscription.fresh(batches(await self.tail.read(cursors, count=self.settings.page), self.settings.page))
        if not found:
            self._join(subscription)
        return found

    def _join(self, subscription: Subscription) -> None:
        """Hand the subscription what the hub reads from now on, unless the hub is already ahead of it."""
        if not self._is_ahead(subscription, subscription.jobs):
            self._watch(subscription, subscription.jobs)
            subscription.joined = True

    def _is_ahead(self, subscription: Subscription, jobs: Iterable[str]) -> bool:
        """Return whether the hub has read events of these jobs that the subscription does not have."""
        known = ((self._cursors[job_id], subscription.cursor.of(job_id)) for job_id in jobs if job_id in self._cursors)
        return any(parse_id(ahead) > parse_id(own) for ahead, own in known)

    def _watch(self, subscription: Subscription, jobs: Iterable[str]) -> None:
        for job_id in jobs:
            self._cursors.setdefault(job_id, subscription.cursor.of(job_id))
            self._watchers.setdefault(job_id, set()).add(subscription)
        self._changed.set()

    def _unwatch(self, subscription: Subscription, jobs: Iterable[str]) -> None:
        for job_id in jobs:
            watchers = self._watchers.get(job_id, set())
            watchers.discard(subscription)
            if not watchers:
                self._watchers.pop(job_id, None)
                self._cursors.pop(job_id, None)

    def leave(self, subscription: Subscription) -> None:
        """Detach a subscription; it may catch up and join again."""
        subscription.joined = False
        subscription.take()
        self._unwatch(subscription, subscription.jobs)
        subscription.wake.set()

    async def _read_forever(self) -> None:
        settings = self.settings
        while not self.closing.is_set():
            if not self._cursors:
                await self._changed.wait()
                self._changed.clear()
                continue
            try:
                read = await self.tail.read(dict(self._cursors), count=settings.page, block_ms=settings.block_ms)
            except StoreUnavailable as error:
                log.warning("live events wait for the broker: %s", error)
                await asyncio.sleep(settings.retry_s)
                continue
            self._dispatch(batches(read, settings.page))

    def _dispatch(self, incoming: tuple[FrameBatch, ...]) -> None:
        addressed: dict[Subscription, list[FrameBatch]] = {}
        for batch in incoming:
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
            await asyncio.sleep(self.settings.discover_s)
            wanting = [subscription for subscription in self._subscriptions if subscription.everything]
            if not wanting:
                continue
            with contextlib.suppress(StoreUnavailable):
                for project in {subscription.project for subscription in wanting}:
                    jobs = set(await self.tail.recent_jobs(self.settings.recent_jobs, project))
                    for subscription in wanting:
                        if subscription.project == project:
                            self._watch_exactly(subscription, jobs)

    async def _revoke_forever(self) -> None:
        """End streams whose key was revoked, whose session or membership is over, or that show a job which its project
        may no longer read.
        """
        while not self.closing.is_set():
            await asyncio.sleep(self.settings.revoke_s)
            credentials = list({subscription.credential for subscription in self._subscriptions})
            with contextlib.suppress(StoreUnavailable):
                ended = await asyncio.to_thread(self._ended, credentials) if credentials else set()
                hidden = await self._hidden()
                for subscription in self._subscriptions:
                    if subscription.credential in ended or subscription in hidden:
                        subscription.revoked = True
                        subscription.wake.set()

    async def _hidden(self) -> set[Subscription]:
        """Return the subscriptions to named jobs one of which their project may not read."""
        named: dict[str, set[Subscription]] = {}
        for subscription in self._subscriptions:
            if subscription.project is not None and not subscription.everything:
                named.setdefault(subscription.project, set()).add(subscription)
        hidden: set[Subscription] = set()
        for project, its_own in named.items():
            jobs = set().union(*(subscription.jobs for subscription in its_own))
            visible = await self.tail.visible_among(project, jobs)
            hidden |= {subscription for subscription in its_own if not subscription.jobs <= visible}
        return hidden

    def _watch_exactly(self, subscription: Subscription, jobs: set[str]) -> None:
        """Let a subscription show these jobs, in place: one that left would read all of them anew by itself, and
        hundreds do at once where jobs appear all the time.
        """
        added, dropped = jobs - subscription.jobs, subscription.jobs - jobs
        if not added and not dropped:
            return
        if subscription.joined and not self._is_ahead(subscription, added):
            self._watch(subscription, added)
            self._unwatch(subscription, dropped)
        else:
            self.leave(subscription)
        subscription.jobs = set(jobs)
