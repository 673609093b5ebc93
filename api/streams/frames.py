"""Encodes server-sent events, once for all subscribers, and the ids from which a stream resumes.

A stream over one job carries the ids of its Redis stream. A stream over several carries a composite id
``milliseconds;job=sequence,…``: every event of an earlier millisecond was delivered, and, of that millisecond,
those of the named jobs up to the named sequence number. It stays short, because few jobs share a millisecond. For
a stream over all jobs, ``;milliseconds`` follows: jobs that began then or later may not have been known yet.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import orjson

from service.jobs.store.tail import BEGINNING, LARGEST_ID_PART, RawEvent, ReadEvents, parse_id

PING = b": ping\n\n"
RETRY = b"retry: 2000\n\n"
BYE = b"event: bye\nretry: 500\ndata: {}\n\n"
END = b"event: end\ndata: {}\n\n"
_FORGOTTEN_MS = 5000
"""More than the time until a new job is known."""


def begins_at(position: str) -> bytes:
    """Tell the client an id before any event: one that is cut off meanwhile resumes there, not at a later now."""
    return f"id: {position}\n\n".encode()


def gap(job_id: str, first: str) -> bytes:
    """Tell the client that the cap removed events before ``first``: it should fetch a fresh snapshot."""
    data = json.dumps({"job": job_id, "first": first})
    return f"event: gap\ndata: {data}\n\n".encode()


@dataclass(frozen=True)
class Frame:
    """One event, encoded except for its ``id:`` line."""

    job_id: str
    id: str
    position: tuple[int, int]
    type: str
    body: bytes
    state: str | None
    """The state that a ``state`` event announces."""

    @classmethod
    def of(cls, event: RawEvent) -> Frame:
        head = f'event: {event.type}\ndata: {{"job":"{event.job_id}","id":"{event.id}",'.encode()
        body = head + event.payload[1:] + b"\n\n"
        state = orjson.loads(event.payload)["state"] if event.type == "state" else None
        return cls(event.job_id, event.id, event.position, event.type, body, state)


@dataclass(frozen=True)
class FrameBatch:
    """Consecutive frames of one job."""

    job_id: str
    frames: tuple[Frame, ...]

    def after(self, cursor: Cursor) -> FrameBatch | None:
        """Return the batch without the frames that lie at or before the cursor; ``None`` when none is left."""
        known = parse_id(cursor.of(self.job_id))
        if self.frames[0].position > known:
            return self
        left = tuple(frame for frame in self.frames if frame.position > known)
        return FrameBatch(self.job_id, left) if left else None


@dataclass(frozen=True)
class Form:
    """The form of a subscription's frames."""

    composite: bool
    """Whether ids are composite (several jobs) or those of one job's stream."""
    types: frozenset[str] | None = None
    """The types that are sent; all when ``None``."""


@dataclass(frozen=True)
class Round:
    """The frames of one read for all who watch the same jobs, by time."""

    frames: tuple[Frame, ...]
    tokens: tuple[str, ...]
    """The composite id of each frame."""
    _encoded: dict[Form, bytes] = field(default_factory=dict)

    def encoded(self, form: Form) -> bytes:
        """Return the frames as bytes, encoded once for each form."""
        if (known := self._encoded.get(form)) is None:
            ids = self.tokens if form.composite else tuple(frame.id for frame in self.frames)
            known = self._encoded[form] = b"".join(
                b"id: %b\n%b" % (name.encode(), frame.body)
                for name, frame in zip(ids, self.frames, strict=True)
                if form.types is None or frame.type in form.types
            )
        return known

    @property
    def states(self) -> dict[str, str]:
        """Return the last state of each job that the frames announce."""
        return {frame.job_id: frame.state for frame in self.frames if frame.state is not None}

    def end(self, form: Form) -> str:
        """Return the id of the last frame, after which the rest follows."""
        return self.tokens[-1] if form.composite else self.frames[-1].id


def batches(read: Mapping[str, ReadEvents]) -> tuple[FrameBatch, ...]:
    """Return the events of one read, cut behind the last one before a gap.

    Where a job has more events, younger events of other jobs wait for the next read, so that a composite id can mean
    "everything before".
    """
    horizon = min((each.more_from for each in read.values() if each.more_from is not None), default=None)
    kept = {
        job_id: tuple(Frame.of(event) for event in each.events if horizon is None or event.position[0] <= horizon)
        for job_id, each in read.items()
    }
    return tuple(FrameBatch(job_id, frames) for job_id, frames in kept.items() if frames)


def in_order(frame_batches: Iterable[FrameBatch]) -> list[Frame]:
    """Return the frames of several jobs by time."""
    return sorted(
        (frame for batch in frame_batches for frame in batch.frames), key=lambda frame: (frame.position, frame.job_id)
    )


@dataclass
class Cursor:
    """A subscriber's position in each job."""

    base: str = BEGINNING
    """Position in jobs that are not known yet."""
    positions: dict[str, str] = field(default_factory=dict)
    known: int | None = None
    """Milliseconds of the broker's clock: the events of every job that began by then have been delivered;
    ``None`` for a stream over named jobs.
    """
    doubtful: bool = False
    """Whether jobs that began since :attr:`known` may lack events before where this cursor resumes."""
    _millisecond: int = 0
    _level: dict[str, int] = field(default_factory=dict)

    def of(self, job_id: str) -> str:
        return self.positions.get(job_id, self.base)

    @property
    def beginning(self) -> str | None:
        """Return the id from which a client resumes that has got nothing yet; ``None`` if it needs none, or has one."""
        return None if self.base == BEGINNING or self.positions or self.doubtful else self.base

    def advance(self, frame: Frame) -> None:
        self.positions[frame.job_id] = frame.id
        millisecond, sequence = frame.position
        if millisecond > self._millisecond:
            self._millisecond, self._level = millisecond, {}
        if millisecond == self._millisecond:
            self._level[frame.job_id] = sequence

    def take(self, incoming: Iterable[FrameBatch]) -> Round | None:
        """Advance over the new frames of the batches and return them; ``None`` if there are none."""
        fresh = [left for batch in incoming if (left := batch.after(self)) is not None]
        frames, tokens = in_order(fresh), []
        for frame in frames:
            self.advance(frame)
            tokens.append(self.token)
        return Round(tuple(frames), tuple(tokens)) if frames else None

    def copy(self) -> Cursor:
        return Cursor(self.base, dict(self.positions), self.known, self.doubtful, self._millisecond, dict(self._level))

    def over_everything(self) -> None:
        """Become a cursor over all jobs: every job that had begun by its position was known."""
        if self.known is None:
            self.known = self._millisecond + 1 if self._millisecond else parse_id(self.base)[0]

    def can_settle(self, known: int) -> bool:
        """Return whether every job that had begun by this cursor's position began before ``known``, in ms."""
        return known > self._millisecond

    def learn(self, known: int) -> None:
        """Note that all jobs that began before ``known`` were read up to here."""
        if self.known is not None:
            self.known = max(self.known, known)

    def settle(self, began: Mapping[str, str]) -> None:
        """Let jobs that began since :attr:`known` be read from their first event, which ``began`` has by job: after a
        resumption it is unknown which were delivered, so a few events may come twice.
        """
        for job_id, first in began.items():
            if self.known is not None and parse_id(first)[0] >= self.known:
                self.positions.setdefault(job_id, _before(self.known))
        self.doubtful = False

    def forget(self, jobs: Iterable[str], known: Collection[str]) -> None:
        """Drop the positions of jobs that are no longer shown, so that they do not accumulate. Their later
        events begin :data:`_FORGOTTEN_MS` before the last of them; the jobs of ``known`` keep their positions.
        """
        last = max((parse_id(self.positions.pop(job_id)) for job_id in jobs if job_id in self.positions), default=None)
        if last is not None and (last[0] - _FORGOTTEN_MS, 0) > parse_id(self.base):
            for job_id in known:
                self.positions.setdefault(job_id, self.base)
            self.base = f"{last[0] - _FORGOTTEN_MS}-0"

    @property
    def token(self) -> str:
        """Return the composite id of everything delivered so far."""
        level = ",".join(f"{job_id}={sequence}" for job_id, sequence in self._level.items())
        in_doubt = self.known is not None and self.known <= self._millisecond
        return f"{self._millisecond};{level};{self.known}" if in_doubt else f"{self._millisecond};{level}"

    @classmethod
    def resume(cls, text: str) -> Cursor:
        """Return the cursor that a composite id (or a plain stream id) stands for. Raises ``ValueError``."""
        if ";" not in text:
            milliseconds, sequence = parse_id(text)
            return cls(base=f"{milliseconds}-{sequence}")
        head, _, tail = text.partition(";")
        tail, _, known = tail.partition(";")
        millisecond, _ = parse_id(head)
        level = dict(_level_entry(part) for part in tail.split(",")) if tail else {}
        return cls(
            base=_before(millisecond),
            positions={job_id: f"{millisecond}-{sequence}" for job_id, sequence in level.items()},
            known=parse_id(known)[0] if known else None,
            doubtful=bool(known),
            _millisecond=millisecond,
            _level=level,
        )


def _before(millisecond: int) -> str:
    """Return the last id before a millisecond."""
    return f"{millisecond - 1}-{LARGEST_ID_PART}" if millisecond else BEGINNING


def _level_entry(text: str) -> tuple[str, int]:
    job_id, _, sequence = text.partition("=")
    if not job_id or not (sequence.isascii() and sequence.isdigit()) or int(sequence) > LARGEST_ID_PART:
        raise ValueError(f"{text[:60]!r} is not 'job=sequence'")
    return job_id, int(sequence)
