"""Runs the hub: one blocking read per process over all watched streams, encoded once for all who watch the same jobs.

Such subscriptions form a feed (:class:`Channel`) with its own position. A subscription first catches up with
its own reads and joins the feed once it is no further behind. From then on the hub hands it new events as bytes
that the whole feed shares. A subscription whose queue is full is detached, not cut: it catches up at its own
pace and joins again, so memory is bounded and no event is lost. A client that reads nothing at all loses its
connection (:mod:`api.server.serving`), and its client resumes with ``Last-Event-ID``.

The event loop also answers requests. So the hub serves a few subscriptions at a time, keeps catch-up reads
short and makes them by turns of the keys, and after each piece of work rests for a multiple of its duration.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from api.offload import FairTurns
from api.server import repeat
from api.streams.frames import Cursor, Form, Frame, FrameBatch, Round, batches
from api.streams.subscriptions import Channel, HubSettings, Subscription, TooManyStreams
from service.jobs.store import Credential, StoreUnavailable
from service.jobs.store.tail import StreamTail, parse_id

log = logging.getLogger(__name__)


class _Pace:
    """Spreads one round of work over time, so that requests and clients always find a free core."""

    def __init__(self, settings: HubSettings, clock: Callable[[], float]) -> None:
        self._times, self._left_s, self._clock = settings.rest, settings.longest_rest_s, clock
        self._since = clock()

    async def rest(self) -> None:
        """Let the served subscriptions run, then rest for a multiple of the time that all this took."""
        await asyncio.sleep(0)
        pause_s = min(self._left_s, self._times * (self._clock() - self._since))
        self._left_s -= pause_s
        if pause_s > 0:
            await asyncio.sleep(pause_s)
        self._since = self._clock()


class Hub:
    """Fans the streams of jobs out to subscriptions. Lives in one event loop."""

    def __init__(
        self, tail: StreamTail, ended: Callable[[Sequence[Credential]], set[Credential]], settings: HubSettings
    ) -> None:
        """Make a hub that reads nothing yet; ``ended`` returns the credentials that no longer admit anybody,
        from the store.
        """
        self.tail = tail
        self._ended = ended
        self.closing = asyncio.Event()
        self.settings = settings
        self._open: Counter[str] = Counter()
        self._cursors: dict[str, str] = {}
        self._watchers: dict[str, set[Channel]] = {}
        self._feeds: dict[tuple[str | None, frozenset[str] | None], Channel] = {}
        self._subscriptions: set[Subscription] = set()
        self._changed = asyncio.Event()
        self._catching_up = FairTurns(settings.max_streams, settings.catching_up)
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to read. The hub lives in the running event loop."""
        self._loop = asyncio.get_running_loop()
        forever = (self._read, self._discover, self._revoke)
        self._tasks = [asyncio.create_task(repeat(each, self.settings.retry_s)) for each in forever]

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
        states: Mapping[str, str],
        form: Form,
        *,
        project: str | None,
        everything: bool = False,
    ) -> Iterator[Subscription]:
        """Yield an open subscription of one key, which speaks in ``project``, to the jobs of ``states`` or to
        everything. Raises :class:`TooManyStreams`.
        """
        self.check_room(credential)
        if everything:
            cursor.over_everything()
        key = (project, None if everything else frozenset(states))
        feed = self._feeds.setdefault(key, Channel(set(states), project, everything))
        feed.subscriptions += 1
        most = (self.settings.queue_frames, self.settings.queue_bytes)
        subscription = Subscription(credential, cursor, feed, form, *most, dict(states))
        self._open[credential.key_id] += 1
        self._subscriptions.add(subscription)
        try:
            yield subscription
        finally:
            self._subscriptions.discard(subscription)
            self.leave(subscription)
            self._open[credential.key_id] -= 1
            feed.subscriptions -= 1
            if not feed.subscriptions:
                del self._feeds[key]

    def check_room(self, credential: Credential) -> None:
        """Raise :class:`TooManyStreams` when one more stream of this key would be too many."""
        if self._open.total() >= self.settings.max_streams:
            raise TooManyStreams(f"this process has {self.settings.max_streams} event streams open, its limit")
        if self._open[credential.key_id] >= self.settings.max_streams_per_key:
            raise TooManyStreams(f"this key has {self.settings.max_streams_per_key} event streams open, its limit")

    async def catch_up(self, subscription: Subscription) -> bytes:
        """Return the next page after the subscription's cursor. It joins once it lacks nothing that its feed
        has.
        """
        feed, cursor = subscription.feed, subscription.cursor
        if cursor.doubtful and not cursor.can_settle(feed.discovered_ms):
            await asyncio.sleep(self.settings.discover_s / 2)
            return b""
        async with self._catching_up.turn(subscription.credential.key_id):
            began = self._loop.time()
            encoded = await self._next_page(subscription)
            if self._catching_up.is_asked_for:
                await asyncio.sleep(self.settings.rest * (self._loop.time() - began))
        return encoded

    async def _next_page(self, subscription: Subscription) -> bytes:
        feed, cursor = subscription.feed, subscription.cursor
        if cursor.doubtful:
            cursor.settle(await self.tail.first_ids(feed.jobs))
        rounds, known = feed.rounds, feed.discovered_ms
        cursors = {job_id: cursor.of(job_id) for job_id in feed.jobs}
        page = self.settings.page_of(len(cursors))
        read = await self.tail.read(cursors, count=page, most_bytes=self.settings.read_bytes)
        found = cursor.take(batches(read))
        if all(each.more_from is None for each in read.values()):
            cursor.learn(known)
            if feed.rounds == rounds and cursors.keys() == feed.jobs:
                self._join(subscription)
        if found is None:
            return b""
        subscription.states.update(found.states)
        return found.encoded(subscription.form)

    def _join(self, subscription: Subscription) -> None:
        """Hand the subscription everything that the hub reads from now on; the first subscription of a feed sets its
        position.
        """
        feed = subscription.feed
        if not feed.is_watched:
            feed.cursor = subscription.cursor.copy()
            self._watch(feed, feed.jobs)
        subscription.ahead_of_feed = subscription.cursor.copy()
        subscription.joined, subscription.joined_at = True, self._loop.time()
        feed.ahead.add(subscription)

    def _watch(self, feed: Channel, jobs: Iterable[str]) -> None:
        """Read these jobs from the feed's position on. Feeds that were further ahead get nothing twice, since
        each knows its own position.
        """
        for job_id in jobs:
            start = feed.cursor.of(job_id)
            self._cursors[job_id] = min(self._cursors.get(job_id, start), start, key=parse_id)
            self._watchers.setdefault(job_id, set()).add(feed)
        self._changed.set()

    def _unwatch(self, feed: Channel, jobs: Iterable[str]) -> None:
        for job_id in jobs:
            watchers = self._watchers.get(job_id, set())
            watchers.discard(feed)
            if not watchers:
                self._watchers.pop(job_id, None)
                self._cursors.pop(job_id, None)

    def leave(self, subscription: Subscription) -> None:
        """Detach a subscription; it may catch up and join again."""
        feed = subscription.feed
        was_watched = feed.is_watched
        feed.in_step.discard(subscription)
        feed.ahead.discard(subscription)
        subscription.fall_back()
        if was_watched and not feed.is_watched:
            self._unwatch(feed, feed.jobs)

    async def _read(self) -> float:
        """Read once what all feeds lack, and hand it out; return no pause."""
        settings = self.settings
        if not self._cursors:
            await self._changed.wait()
            self._changed.clear()
            return 0.0
        asked, began = dict(self._cursors), self._loop.time()
        page = settings.page_of(len(asked))
        try:
            read = await self.tail.read(asked, count=page, most_bytes=settings.read_bytes, block_ms=settings.block_ms)
        except StoreUnavailable as error:
            log.warning("live events wait for the broker: %s", error)
            return settings.retry_s
        pace = _Pace(settings, self._loop.time)
        whole = all(each.more_from is None for each in read.values())
        try:
            await self._dispatch(batches(read), asked, began if whole else -math.inf, pace)
        except Exception:
            for subscription in self._subscriptions:
                self.leave(subscription)  # what it was not handed, it reads by itself
            raise
        if read:
            await pace.rest()
        return 0.0

    async def _dispatch(
        self, incoming: Sequence[FrameBatch], asked: Mapping[str, str], complete_from: float, pace: _Pace
    ) -> None:
        """Hand out the events of a read that began with the cursors ``asked``: all events up to ``complete_from``."""
        covered = [
            feed for feed in self._feeds.values() if feed.is_watched and self._covers(feed, asked, complete_from)
        ]
        known = [(feed, feed.discovered_ms) for feed in covered]
        caught_up = [feed for feed in covered if feed.ahead]
        rounds: list[tuple[Channel, Round]] = []
        for feed, its_batches in self._address_batches(incoming, asked).items():
            if (found := feed.cursor.take(its_batches)) is not None:
                feed.rounds += 1
                rounds.append((feed, found))
        for feed, found in rounds:
            await self._hand_out(feed, found, pace)
        for feed, until_ms in known:
            feed.cursor.learn(until_ms)
        for feed in caught_up:
            even = {each for each in feed.ahead if each.joined_at < min(complete_from, self._known_from(feed))}
            feed.ahead -= even
            feed.in_step |= even

    async def _hand_out(self, feed: Channel, found: Round, pace: _Pace) -> None:
        for number, subscription in enumerate([*feed.in_step, *feed.ahead], start=1):
            if subscription in feed.in_step:
                own: Round | None = found
            elif subscription in feed.ahead:
                own = subscription.ahead_of_feed.take(_as_batches(found))
            else:
                continue  # it left meanwhile
            if own is not None and not subscription.offer(own):
                self.leave(subscription)
            if number % self.settings.handed_at_once == 0:
                await pace.rest()

    def _address_batches(
        self, incoming: Sequence[FrameBatch], asked: Mapping[str, str]
    ) -> dict[Channel, list[FrameBatch]]:
        """Return the batches of each feed, and note how far the hub has read. A job that is now read from an
        earlier position is left to that read.
        """
        addressed: dict[Channel, list[FrameBatch]] = {}
        for batch in incoming:
            if self._cursors.get(batch.job_id) == asked[batch.job_id]:
                self._cursors[batch.job_id] = batch.frames[-1].id
                for feed in self._watchers[batch.job_id]:
                    addressed.setdefault(feed, []).append(batch)
        return addressed

    def _covers(self, feed: Channel, asked: Mapping[str, str], complete_from: float) -> bool:
        """Return whether a read had every event of every job of a feed."""
        known = self._known_from(feed)
        return known <= complete_from and all(self._cursors[job_id] == asked.get(job_id) for job_id in feed.jobs)

    def _known_from(self, feed: Channel) -> float:
        return feed.discovered_at if feed.everything else -math.inf

    async def _discover(self) -> float:
        """Add new jobs to the feeds over all jobs, and drop jobs that ended long ago; return the pause."""
        for feed in [feed for feed in self._feeds.values() if feed.everything]:
            began = self._loop.time()
            jobs, now_ms = await self.tail.recent_jobs(self.settings.recent_jobs, feed.project)
            self._watch_exactly(feed, set(jobs))
            feed.discovered_at, feed.discovered_ms = began, now_ms
        return self.settings.discover_s

    def _watch_exactly(self, feed: Channel, jobs: set[str]) -> None:
        """Let a feed show these jobs, in place: a subscription that left it would have to read all of them again."""
        added, dropped = jobs - feed.jobs, feed.jobs - jobs
        feed.jobs = jobs
        if feed.is_watched:
            self._watch(feed, added)
            self._unwatch(feed, dropped)
        feed.cursor.forget(dropped, jobs)

    async def _revoke(self) -> float:
        """End streams whose key was revoked, whose session or membership has ended, or which show a job that
        their project may no longer read; return the pause.
        """
        credentials = list({subscription.credential for subscription in self._subscriptions})
        ended = await asyncio.to_thread(self._ended, credentials) if credentials else set()
        hidden = await self._hidden_feeds()
        for subscription in self._subscriptions:
            if subscription.credential in ended or subscription.feed in hidden:
                subscription.revoked = True
                subscription.wake.set()
        return self.settings.revoke_s

    async def _hidden_feeds(self) -> set[Channel]:
        """Return the feeds over named jobs that include a job their project may not read."""
        named: dict[str, set[Channel]] = {}
        for feed in self._feeds.values():
            if feed.project is not None and not feed.everything:
                named.setdefault(feed.project, set()).add(feed)
        hidden: set[Channel] = set()
        for project, its_own in named.items():
            jobs = set[str]().union(*(feed.jobs for feed in its_own))
            visible = await self.tail.visible_among(project, jobs)
            hidden |= {feed for feed in its_own if not feed.jobs <= visible}
        return hidden


def _as_batches(found: Round) -> list[FrameBatch]:
    """Return the frames of a round by job, for a subscription that has some of them."""
    by_job: dict[str, list[Frame]] = {}
    for frame in found.frames:
        by_job.setdefault(frame.job_id, []).append(frame)
    return [FrameBatch(job_id, tuple(frames)) for job_id, frames in by_job.items()]
