"""Follows the records that the ranks of a group write, and relays their events."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from service.jobs.events import (
    Event,
    EventReader,
    MalformedEvent,
    attempt_folders,
    event_key,
    parse_event,
    rank_file,
    recorded,
    unread_words,
)
from service.jobs.events.curves import CurveKeeper
from service.jobs.records import AttemptRef
from service.jobs.store import Store
from workers import event_protocol
from workers.supervisor.rank_socket import RankSocket
from workers.supervisor.settings import SupervisorSettings
from workers.supervisor.uploader import Disk, Uploader


class Collector:
    """Follows the event file of every rank that greeted. ``take`` gets the events of each in order; while the uploader
    has no room they wait in their files. ``recover`` is called once before the first metric, or at the end.
    """

    def __init__(
        self,
        folder: Path,
        socket: RankSocket,
        uploader: Uploader,
        *,
        take: Callable[[Event], None],
        recover: Callable[[Event | None], Awaitable[None]],
        disk: Disk,
        settings: SupervisorSettings,
    ) -> None:
        self._folder, self._socket, self._uploader, self._disk = folder, socket, uploader, disk
        self._take, self._recover = take, recover
        self._settings = settings
        self._curves = CurveKeeper()
        self._readers: dict[int, EventReader] = {}
        self._cut: set[int] = set()
        self._turn = asyncio.Lock()
        self._has_recovered = False
        self._is_finished = False

    def expect(self, ranks: Iterable[int]) -> None:
        """Hold the files of these ranks, which exist before the ranks start. May block as long as the disk does."""
        for rank in ranks:
            self._readers[rank] = EventReader(rank_file(self._folder, rank), rank)
            self._readers[rank].open()

    async def run(self) -> None:
        """Follow the files until :meth:`finish`."""
        while not self._is_finished:
            await asyncio.sleep(self._settings.read_interval_s)
            await self._collect()

    async def finish(self) -> None:
        """Take everything that is left; the ranks have ended."""
        await self._collect()
        self._is_finished = True
        if not self._has_recovered:
            await self._recover(None)
        await self._disk(self._keep_curves)
        for reader in self._readers.values():
            reader.close()

    def _keep_curves(self) -> None:
        """Leave thinned curves beside the record, unless it is read as soon itself; without them it is."""
        sources = {rank_file(self._folder, rank).name: reader.taken for rank, reader in self._readers.items()}
        if sum(sources.values()) >= _LEAST_BYTES:
            with contextlib.suppress(OSError):
                self._curves.write(self._folder, min(self._readers), sources)

    async def _collect(self) -> None:
        async with self._turn:
            if self._is_finished:  # while this call was waiting
                return
            for rank in sorted(self._socket.ranks):
                reader = self._readers.setdefault(rank, EventReader(rank_file(self._folder, rank), rank))
                while (lines := await self._read(reader)) or reader.has_more:
                    await self._give_on(lines, rank)
                if reader.unread is not None and rank not in self._cut:
                    self._cut.add(rank)
                    self._uploader.put(event_protocol.log_event(unread_words(reader.unread), rank=rank))

    async def _read(self, reader: EventReader) -> list[bytes]:
        found: list[bytes] = []
        await self._disk(lambda: found.extend(reader.read()))
        return found

    async def _give_on(self, lines: list[bytes], rank: int) -> None:
        self._socket.heard_at = time.monotonic()
        for line in lines:
            await self._uploader.room()
            try:
                event = parse_event(line, rank)
            except MalformedEvent as error:
                self._socket.complain(error, rank)
                continue
            if event["type"] == "metric" and not self._has_recovered:
                self._has_recovered = True
                await self._recover(event)
            if event["type"] == "metric":
                self._curves.take(event)
            self._take(event)


_LEAST_BYTES = 64 << 10
"""Shorter records have no curves beside them."""
METRIC = frozenset({"metric"})
_PAGE = 2000


def select_unrelayed(
    earlier: Mapping[int, Iterable[dict[str, Any]]],
    relayed: Collection[bytes],
    first: Mapping[str, Any] | None,
    since: float,
) -> list[dict[str, Any]]:
    """Return the metrics of earlier attempts, by number, that are not among the ``relayed`` ones (:func:`event_key`),
    in order.

    Steps that a later attempt repeated are left out: ``first`` is the first metric of the present one. So are those
    older than ``since`` (Unix seconds), which the stream has dropped.
    """
    found: list[dict[str, Any]] = []
    followers = [] if first is None else [first]
    for attempt in sorted(earlier, reverse=True):
        events = iter(earlier[attempt])  # there may be more of them than memory holds
        begun = list(itertools.islice(events, 1))
        kept = (
            event
            for event in itertools.chain(begun, events)
            if event["time"] >= since and not any(_redone(event, by) for by in followers)
        )
        found = [event for event in kept if event_key(event) not in relayed] + found
        followers += begun
    return found


def _redone(event: Mapping[str, Any], first: Mapping[str, Any]) -> bool:
    """Return whether the attempt that began with ``first`` reports this metric again."""
    if event["step"] == first["step"]:
        return bool(event["values"].keys() & first["values"].keys())
    return bool(event["step"] > first["step"])


def find_unrelayed(
    store: Store, ref: AttemptRef, attempts: Path, first: Mapping[str, Any] | None
) -> list[dict[str, Any]]:
    """Return the metrics that the attempt of ``ref``, which begins with ``first``, must relay.

    ``attempts`` holds the records of the job's attempts. Blocks.
    """
    folders = {number: folder for number, folder in attempt_folders(attempts).items() if number < ref.attempt}
    if not folders:
        return []
    page = store.events.page(ref.job_id, limit=1)
    since = float(page.items[0].event["time"]) if page.gap and page.items else 0.0
    relayed = {event_key(item.event) for item in page.items}
    while (page := store.events.page(ref.job_id, after=page.next_after, types=METRIC, limit=_PAGE)).items:
        relayed |= {event_key(item.event) for item in page.items}
    return select_unrelayed(
        {number: recorded(folder, METRIC) for number, folder in folders.items()}, relayed, first, since
    )
