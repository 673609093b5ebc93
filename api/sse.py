"""Live event streams: a subscription turned into server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool

from api import frames
from api.frames import Cursor, Frame, FrameBatch, in_order
from api.problems import ProblemError
from api.security import Caller
from api.stream import Hub, Subscription, TooManyStreams
from service.jobs.records import Job
from service.jobs.states import TERMINAL, JobState
from service.jobs.store import Store, StoreUnavailable
from service.jobs.store.tail import BEGINNING

_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Server-sent events. `event:` is the event's type, `data:` its JSON with `job` and `id`, and "
        "`id:` a position to resume from with `Last-Event-ID`. Besides: `gap` (events were removed before they were "
        "read; fetch a snapshot), `end` (nothing can follow), `bye` (the service goes down, the key was revoked or the "
        "session is over; reconnect to know).",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    }
}


@dataclass
class _EventStream:
    """Streams what one client subscribed to."""

    hub: Hub
    subscription: Subscription
    composite: bool
    """Whether ids are composite (several jobs) or those of the one job's stream."""
    types: frozenset[str] | None = None
    """The types that are sent; all when ``None``."""
    states: dict[str, JobState | str] = field(default_factory=dict)
    """Last known state of each job."""

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the stream as bytes, from the cursor until its end, the client's or the service's."""
        yield frames.RETRY
        clock = asyncio.get_running_loop().time
        sent_at = clock()
        async for found in self.rounds():
            chunk = found if isinstance(found, bytes) else self._encode(found or [])
            # Events of types that the client did not ask for end no silence.
            if found is None or (not chunk and clock() - sent_at >= self.hub.settings.ping_s):
                chunk = frames.PING
            if chunk:
                yield chunk
                sent_at = clock()
        yield frames.BYE if self.hub.closing.is_set() or self.subscription.revoked else frames.END

    async def rounds(self) -> AsyncIterator[list[FrameBatch] | bytes | None]:
        """Yield batches as they arrive, bytes of a gap, and ``None`` when there was nothing for a while."""
        subscription, checked = self.subscription, False
        while not self.hub.closing.is_set() and not subscription.revoked:
            if subscription.joined:
                if found := subscription.take():
                    yield self._delivered(found)
                elif self._ended:
                    return
                elif not await self._woken():
                    yield None
                checked = False
                continue
            if not checked:
                for notice in await self._gaps():
                    yield notice
                checked = True
            if found := await self._caught_up():
                yield self._delivered(found)

    async def _caught_up(self) -> list[FrameBatch]:
        try:
            return await self.hub.catch_up(self.subscription)
        except StoreUnavailable:
            await asyncio.sleep(self.hub.settings.retry_s)
            return []

    async def _gaps(self) -> list[bytes]:
        found = []
        cursor = self.subscription.cursor
        for job_id in () if self.subscription.everything else sorted(self.subscription.jobs):
            first = await self.hub.tail.first_after_gap(job_id, cursor.of(job_id))
            if first is not None:
                found.append(frames.gap(job_id, first))
        return found

    async def _woken(self) -> bool:
        try:
            await asyncio.wait_for(self.subscription.wake.wait(), self.hub.settings.ping_s)
        except TimeoutError:
            return False
        return True

    def _delivered(self, delivered: list[FrameBatch]) -> list[FrameBatch]:
        for batch in delivered:
            for frame in batch.frames:
                if frame.state is not None:
                    self.states[batch.job_id] = frame.state
        return delivered

    @property
    def _ended(self) -> bool:
        """Return whether nothing can follow: every job is over. A stream over all jobs never ends."""
        subscription = self.subscription
        return not subscription.everything and all(self.states.get(job_id) in TERMINAL for job_id in subscription.jobs)

    def _encode(self, delivered: list[FrameBatch]) -> bytes:
        cursor = self.subscription.cursor
        if self.composite:
            return b"".join(self._compose(cursor, frame) for frame in in_order(delivered))
        for batch in delivered:
            cursor.advance(batch.frames[-1])
        if self.types is None:
            return b"".join(batch.encoded for batch in delivered)
        return b"".join(
            b"id: %b\n%b" % (frame.id.encode(), frame.body)
            for batch in delivered
            for frame in batch.frames
            if frame.type in self.types
        )

    def _compose(self, cursor: Cursor, frame: Frame) -> bytes:
        cursor.advance(frame)
        if self.types is not None and frame.type not in self.types:
            return b""
        return b"id: %b\n%b" % (cursor.token.encode(), frame.body)


def respond(
    hub: Hub,
    caller: Caller,
    cursor: Cursor,
    states: Mapping[str, JobState],
    *,
    types: frozenset[str] | None,
    everything: bool = False,
    single: bool = False,
) -> StreamingResponse:
    """Return an open stream over the jobs of ``states`` (plus those to come, with ``everything``). 429 when too
    many.
    """
    try:
        hub.check_room(caller.credential)
    except TooManyStreams as error:
        raise _too_many(error) from None

    async def body() -> AsyncIterator[bytes]:
        with hub.subscribe(
            caller.credential, cursor, states, project=caller.project, everything=everything
        ) as subscription:
            stream = _EventStream(hub, subscription, composite=not single, types=types, states=dict(states))
            async for chunk in stream.chunks():
                yield chunk

    return StreamingResponse(body(), media_type="text/event-stream", headers=_HEADERS)


async def wait_terminal(hub: Hub, store: Store, job_id: str, within_s: float, caller: Caller) -> Job:
    """Return the job when it is over, or as it is after ``within_s`` seconds; no thread waits meanwhile. 401 when the
    key was revoked while it waited.
    """
    after = await hub.tail.last_id(job_id) or BEGINNING
    job = await run_in_threadpool(store.jobs.get, job_id)
    if job.state in TERMINAL:
        return job
    try:
        with hub.subscribe(caller.credential, Cursor(base=after), [job_id], project=caller.project) as subscription:
            stream = _EventStream(hub, subscription, composite=False, states={job_id: job.state})
            async with asyncio.timeout(within_s):
                await _exhaust(stream.chunks())
            if subscription.revoked:
                raise ProblemError(401, "this API key was revoked, the session is over, or the job is no longer shared")
    except TimeoutError:
        pass
    except TooManyStreams as error:
        raise _too_many(error) from None
    return await run_in_threadpool(store.jobs.get, job_id)


async def _exhaust(chunks: AsyncIterator[bytes]) -> None:
    async for _ in chunks:
        pass


def _too_many(error: TooManyStreams) -> ProblemError:
    return ProblemError(429, str(error), headers={"Retry-After": "10"})
