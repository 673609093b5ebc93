"""A job's events of some types, all of them: from its stream, or from the attempts' records where that was trimmed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from service.jobs.layout import DataLayout
from service.jobs.store import Store
from service.jobs.store.tail import BEGINNING

_PAGE = 2000


def events(store: Store, data: DataLayout, job_id: str, types: frozenset[str]) -> Iterator[dict[str, Any]]:
    """Every event of these types, oldest first."""
    first = store.events.page(job_id, after=BEGINNING, types=types, limit=_PAGE)
    if first.gap and (records := record_files(data, job_id)):
        yield from _recorded(records, types)
        return
    page = first
    while page.items:
        yield from (dict(item.event) for item in page.items)
        page = store.events.page(job_id, after=page.next_after, types=types, limit=_PAGE)


def record_files(data: DataLayout, job_id: str) -> list[Path]:
    """The full records that supervisors keep, by attempt."""
    attempts = data.job(job_id).attempt(0).parent
    return sorted(attempts.glob("*/events*.jsonl"), key=lambda path: (int(path.parent.name), path.name))


def _recorded(records: list[Path], types: frozenset[str]) -> Iterator[dict[str, Any]]:
    for path in records:
        with path.open("rb") as lines:
            for line in lines:
                if not line.endswith(b"\n"):
                    break  # being written right now
                event = orjson.loads(line)
                if event["type"] in types:
                    yield event
