"""Reads all of a job's events of some types: the recorded ones of each attempt, and those that only its stream has."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from service.jobs.events import Check, attempt_folders, event_key, go_on, newest_logged, recorded
from service.jobs.files import DataLayout
from service.jobs.store import Store
from service.jobs.store.tail import BEGINNING

_PAGE = 2000


@dataclass(frozen=True)
class EventHistory:
    """Reads what jobs have reported. ``check`` is called now and then, and may end a reading.

    The record is whole, whatever happened to the supervisor or the broker; the stream may be ahead of this host's view
    of a shared folder, and is all that is left of an attempt without a record.
    """

    store: Store
    data: DataLayout
    check: Check = go_on

    def attempts(self, job_id: str) -> dict[int, Path]:
        """Return the folders of a job's attempts that are on record, by number."""
        self.store.artifacts.fetch_records(job_id)
        return attempt_folders(self.data.job(job_id).attempts)

    def events(self, job_id: str, types: frozenset[str], attempt: int | None = None) -> Iterator[dict[str, Any]]:
        """Yield every event of these types: attempt by attempt, each in the order of its record; or of one attempt."""
        folders = self.attempts(job_id)
        streamed = _read_stream(self.store, job_id, types, newest=max(folders, default=1))
        for number in _chosen({*folders, *streamed.values()}, attempt):
            if number in folders:
                for event in recorded(folders[number], types, self.check):
                    streamed.pop(event_key(event), None)
                    yield event
            yield from [orjson.loads(key) for key, during in streamed.items() if during == number]

    def newest_logs(self, job_id: str, attempt: int | None = None) -> Iterator[dict[str, Any]]:
        """Yield the printed lines of a job, or of one attempt, the newest first; older ones are read only on demand."""
        folders = self.attempts(job_id)
        streamed = _read_stream(self.store, job_id, frozenset({"log"}), newest=max(folders, default=1))
        for number in reversed(_chosen({*folders, *streamed.values()}, attempt)):
            only_streamed = [orjson.loads(key) for key, during in reversed(streamed.items()) if during == number]
            if number in folders:
                yield from _with_streamed(newest_logged(folders[number], self.check), only_streamed)
            else:
                yield from only_streamed


def _chosen(attempts: set[int], only: int | None) -> list[int]:
    return sorted(attempts if only is None else attempts & {only})


def _with_streamed(on_record: Iterator[dict[str, Any]], streamed: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield events of the record, and among them those that only the stream has; both newest first.

    Once the record is earlier than a streamed event, the record lacks that event, so it is yielded there.
    """
    known: set[bytes] = set()
    left = deque(streamed)
    for event in on_record:
        while left and left[0]["time"] > event["time"]:
            if event_key(left[0]) not in known:
                yield left[0]
            left.popleft()
        if left:
            known.add(event_key(event))
        yield event
    yield from (event for event in left if event_key(event) not in known)


def _read_stream(store: Store, job_id: str, types: frozenset[str], newest: int) -> dict[bytes, int]:
    """Return the stream's events of these types, each with the attempt during which it arrived: the ``newest``
    if the beginning of the stream was trimmed.
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
