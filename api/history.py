"""Reads all of a job's events of some types: those on record of each attempt, and those that only its stream has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from service.jobs.event_files import attempt_folders, recorded
from service.jobs.events import event_key
from service.jobs.layout import DataLayout
from service.jobs.store import Store
from service.jobs.store.tail import BEGINNING

_PAGE = 2000


def events(store: Store, data: DataLayout, job_id: str, types: frozenset[str]) -> Iterator[dict[str, Any]]:
    """Yield every event of these types: attempt by attempt, each in the order of its record.

    The record is whole, whatever happened to the supervisor or the broker; the stream may be ahead of what this host
    sees of a shared folder, and is all that there is of an attempt without a record.
    """
    folders = attempt_folders(data.job(job_id).attempts)
    streamed = _streamed(store, job_id, types, newest=max(folders, default=1))
    for attempt in sorted({*folders, *streamed.values()}):
        if attempt in folders:
            for event in recorded(folders[attempt], types):
                streamed.pop(event_key(event), None)
                yield event
        yield from [orjson.loads(key) for key, during in streamed.items() if during == attempt]


def _streamed(store: Store, job_id: str, types: frozenset[str], newest: int) -> dict[bytes, int]:
    """Return the events of these types that the stream has, with the attempt during which each arrived: the ``newest``
    where the beginning of the stream, which would tell, was trimmed.
    """
    found: dict[bytes, int] = {}
    attempt = newest
    page = store.events.page(job_id, after=BEGINNING, types=types | {"state"}, limit=_PAGE)
    while page.items:
        for item in page.items:
            if item.event["type"] == "state":
                attempt = int(item.event["attempt"])
            else:
                found[event_key(item.event)] = attempt
        page = store.events.page(job_id, after=page.next_after, types=types | {"state"}, limit=_PAGE)
    return found
