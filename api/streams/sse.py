"""Serves live event streams: turns a subscription into server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from fastapi import Request
from fastapi.responses import StreamingResponse

from api.requests import ProblemError, resume_point, stream_id
from api.streams import frames
from api.streams.frames import Cursor, Form
from api.streams.hub import Hub
from api.streams.subscriptions import Subscription, TooManyStreams
from service.jobs.records import Job
from service.jobs.spec.common import TERMINAL, JobState
from service.jobs.store import Credential, Store, StoreUnavailable, in_loop
from service.jobs.store.tail import BEGINNING

_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Server-sent events. `event:` is the event's type, `data:` its JSON with `job` and `id`, and "
        "`id:` a position to resume from with `Last-Event-ID`; a stream over all jobs begins with an `id:` alone. "
        "Besides: `gap` (events were removed before they were read; fetch a snapshot), `end` (nothing can follow), "
        "`bye` (the service goes down, the key was revoked or the session has ended; reconnect to find out).",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    }
}


@dataclass
class _EventStream:
    """Streams the events of one client's subscription."""

    hub: Hub
    subscription: Subscription

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the stream as bytes, from the cursor until its end, the client's or the service's."""
        yield frames.RETRY
        if self.subscription.feed.everything and (beginning := self.subscription.cursor.beginning) is not None:
            yield frames.begins_at(beginning)
        clock = asyncio.get_running_loop().time
        sent_at = clock()
        async for found in self._follow_events():
            # Events of other types than the client's do not end a silence.
            chunk = found or (frames.PING if clock() - sent_at >= self.hub.settings.ping_s else b"")
            if chunk:
                yield chunk
                sent_at = clock()
        yield frames.BYE if self.hub.closing.is_set() or self.subscription.revoked else frames.END

    async def _follow_events(self) -> AsyncIterator[bytes]:
        """Yield events and gaps as they arrive, and an empty item after a silence."""
        subscription, checked = self.subscription, False
        while not self.hub.closing.is_set() and not subscription.revoked:
            if subscription.joined:
                checked = False
                if found := subscription.take():
                    yield found
                elif self._has_ended:
                    return
                else:
                    await self._wait_for_events()
                    yield b""
                continue
            if not checked:
                for notice in await self._gaps():
                    yield notice
                checked = True
            yield await self._caught_up()

    async def _caught_up(self) -> bytes:
        try:
            return await self.hub.catch_up(self.subscription)
        except StoreUnavailable:
            await asyncio.sleep(self.hub.settings.retry_s)
            return b""

    async def _gaps(self) -> list[bytes]:
        found = []
        cursor = self.subscription.cursor
        for job_id in () if self.subscription.feed.everything else sorted(self.subscription.jobs):
            first = await self.hub.tail.first_after_gap(job_id, cursor.of(job_id))
            if first is not None:
                found.append(frames.gap(job_id, first))
        return found

    async def _wait_for_events(self) -> None:
        """Wait for events, but no longer than a silence may last."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.hub.settings.ping_s):
                await self.subscription.wake.wait()

    @property
    def _has_ended(self) -> bool:
        """Return whether nothing can follow because every job has ended. A stream over all jobs never ends."""
        subscription = self.subscription
        known = subscription.states
        return not subscription.feed.everything and all(known.get(job_id) in TERMINAL for job_id in subscription.jobs)


class StreamCaller(Protocol):
    """The caller, as a stream knows it."""

    @property
    def credential(self) -> Credential: ...

    @property
    def project(self) -> str | None: ...


def follow_job(
    hub: Hub, watcher: StreamCaller, job: Job, request: Request, after: str | None, *, types: frozenset[str] | None
) -> StreamingResponse:
    """Return an open stream over one job, from where the client was or else from the job's beginning. 429 when there
    are too many.
    """
    point = resume_point(request, after)
    cursor = Cursor(base=BEGINNING if point is None else stream_id(*point))
    return respond(hub, watcher, cursor, {job.id: job.state}, Form(composite=False, types=types))


def respond(
    hub: Hub,
    watcher: StreamCaller,
    cursor: Cursor,
    states: Mapping[str, JobState],
    form: Form,
    *,
    everything: bool = False,
) -> StreamingResponse:
    """Return an open stream over the jobs of ``states`` (plus those to come, with ``everything``). 429 when too
    many.
    """
    try:
        hub.check_room(watcher.credential)
    except TooManyStreams as error:
        raise _too_many(error) from None

    async def body() -> AsyncIterator[bytes]:
        with hub.subscribe(
            watcher.credential, cursor, states, form, project=watcher.project, everything=everything
        ) as subscription:
            async for chunk in _EventStream(hub, subscription).chunks():
                yield chunk

    return StreamingResponse(body(), media_type="text/event-stream", headers=_HEADERS)


async def wait_terminal(hub: Hub, store: Store, job_id: str, within_s: float, watcher: StreamCaller) -> Job:
    """Return the job once it has ended, or as it is after ``within_s`` seconds; no thread waits meanwhile. 401
    if the key was revoked meanwhile.
    """
    after = await hub.tail.last_id(job_id) or BEGINNING
    job = await in_loop(store.jobs.get, job_id)
    if job.state in TERMINAL:
        return job
    try:
        states, form = {job_id: job.state}, Form(composite=False)
        with hub.subscribe(
            watcher.credential, Cursor(base=after), states, form, project=watcher.project
        ) as subscription:
            async with asyncio.timeout(within_s):
                await _exhaust(_EventStream(hub, subscription).chunks())
            if subscription.revoked:
                raise ProblemError(
                    401, "this API key was revoked, the session has ended, or the job is no longer shared"
                )
    except TimeoutError:
        pass
    except TooManyStreams as error:
        raise _too_many(error) from None
    return await in_loop(store.jobs.get, job_id)


async def _exhaust(chunks: AsyncIterator[bytes]) -> None:
    async for _ in chunks:
        pass


def _too_many(error: TooManyStreams) -> ProblemError:
    return ProblemError(429, str(error), headers={"Retry-After": "10"})
