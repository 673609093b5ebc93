"""Defines the subscriptions of a hub: their positions, the feeds that they share, and the limits of serving them."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field

from api.streams.frames import Cursor, Form, Round
from service.jobs.events import STREAM_PING_S
from service.jobs.store import Credential


@dataclass(frozen=True)
class HubSettings:
    """Tunes how event streams are served; the two limits without a default are an operator's settings."""

    max_streams: int
    """Streams open at once, per process."""
    max_streams_per_key: int
    page: int = 512
    """Events per job in one read."""
    read_events: int = 2048
    """Events of all jobs in one read, roughly: with many jobs, each has a smaller page."""
    read_bytes: int = 2 << 20
    """Bytes of events of all jobs in one read, and one event more."""
    least_page: int = 16
    queue_frames: int = 4096
    """Most events that wait for a slow client; beyond, it catches up by its own reads."""
    queue_bytes: int = 8 << 20
    """Most bytes of them, if more than one read waits."""
    catching_up: int = 1
    """Subscriptions that catch up at once."""
    handed_at_once: int = 16
    """Subscriptions that are served before other work gets its turn."""
    rest: float = 1.5
    """The hub's rest, as a multiple of its work."""
    longest_rest_s: float = 1.0
    """Longest rest in one round."""
    block_ms: int = 100
    """Longest time of a read without events, and until a newly watched stream is part of a read."""
    discover_s: float = 0.5
    """How often streams over all jobs learn of new jobs."""
    revoke_s: float = 0.5
    """How often open streams are checked for admission."""
    retry_s: float = 0.5
    """Pause while the broker is away."""
    recent_jobs: int = 256
    """Jobs that a stream over all of them watches, besides the active ones."""
    ping_s: float = STREAM_PING_S
    """Silence after which a client gets a ping; clients rely only on this default."""

    def page_of(self, jobs: int) -> int:
        """Return the most events per job in one read over so many jobs."""
        return min(self.page, max(self.least_page, self.read_events // max(1, jobs)))


@dataclass(eq=False)
class Channel:
    """The subscriptions to the same jobs: named ones, or all of a project that are recent or unfinished."""

    jobs: set[str]
    project: str | None
    everything: bool
    cursor: Cursor = field(default_factory=Cursor)
    """The hub's position for this feed, while anybody has joined it."""
    discovered_at: float = -math.inf
    """When the last look for new jobs began."""
    discovered_ms: int = 0
    """Milliseconds of the broker's clock: all jobs that had begun by then are among ``jobs``."""
    rounds: int = 0
    """Number of rounds that were handed out."""
    subscriptions: int = 0
    in_step: set[Subscription] = field(default_factory=set)
    """Subscriptions at the feed's own position."""
    ahead: set[Subscription] = field(default_factory=set)
    """Subscriptions that joined and may be ahead of the feed."""

    @property
    def is_watched(self) -> bool:
        return bool(self.in_step or self.ahead)


@dataclass(eq=False)
class Subscription:
    """One consumer's position, watched jobs and queue."""

    credential: Credential
    cursor: Cursor
    """Its position when it joined, or now if it has not joined."""
    feed: Channel
    form: Form
    most_frames: int
    """Most frames that may be queued."""
    most_bytes: int
    """Most bytes of them, if there is more than one delivery."""
    states: dict[str, str] = field(default_factory=dict)
    """The last known state of each job, from all events ever queued."""
    joined: bool = False
    joined_at: float = math.inf
    ahead_of_feed: Cursor = field(default_factory=Cursor)
    """Its position behind the queued events, while its feed may be further back."""
    revoked: bool = False
    """Whether its key or session has ended, or no longer admits it to a job that it shows."""
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    _queue: list[bytes] = field(default_factory=list)
    _queued: int = 0
    _queued_bytes: int = 0
    _end: str = ""
    """The id from which a client resumes that got the queue too."""
    _taken: str | None = None
    """The id of the last frame that was taken since it joined."""

    @property
    def jobs(self) -> set[str]:
        return self.feed.jobs

    def offer(self, found: Round) -> bool:
        """Queue the hub's frames; return ``False`` if there is no room."""
        size, data = len(found.frames), found.encoded(self.form)
        is_long = bool(self._queue) and self._queued_bytes + len(data) > self.most_bytes
        if self._queued + size > self.most_frames or is_long:
            return False
        self._queue.append(data)
        self._end = found.end(self.form)
        self._queued += size
        self._queued_bytes += len(data)
        self.states.update(found.states)
        self.wake.set()
        return True

    def take(self) -> bytes:
        """Return everything queued and not delivered yet; the queue is empty afterwards."""
        if self._queue:
            self._taken = self._end
        taken = b"".join(self._queue)
        self._queue.clear()
        self._queued = self._queued_bytes = 0
        self.wake.clear()
        return taken

    def fall_back(self) -> None:
        """Drop the queued events, and go back to the consumer's position."""
        if self._taken is not None:
            self.cursor = Cursor.resume(self._taken)
            if self.feed.everything:
                self.cursor.over_everything()
        self._queue.clear()
        self._queued = self._queued_bytes = 0
        self._taken = None
        self.joined = False
        self.wake.set()


class TooManyStreams(Exception):  # noqa: N818
    """The process or the key has as many open streams as allowed."""
