"""Finds metrics that earlier attempts recorded and never relayed: their supervisor was stopped, or lost the broker.

The next attempt's supervisor relays them before its own, so that the stream has every step once it has the last.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from service.jobs.event_files import attempt_folders, recorded
from service.jobs.events import event_key
from service.jobs.records import AttemptRef
from service.jobs.store import Store

METRIC = frozenset({"metric"})
_PAGE = 2000


def unrelayed(
    earlier: Mapping[int, Iterable[dict[str, Any]]],
    relayed: Collection[bytes],
    first: Mapping[str, Any] | None,
    since: float,
) -> list[dict[str, Any]]:
    """Return those metrics of earlier attempts, by number, that are not among the ``relayed`` ones (:func:`event_key`),
    in order. What a later attempt did again is left out: ``first`` is the first metric of the present one. So is what
    is older than ``since`` (Unix seconds), which the stream has dropped.
    """
    found: list[dict[str, Any]] = []
    followers = [] if first is None else [first]
    for attempt in sorted(earlier, reverse=True):
        events = list(earlier[attempt])
        kept = [event for event in events if event["time"] >= since and not any(_redone(event, by) for by in followers)]
        found = [event for event in kept if event_key(event) not in relayed] + found
        followers += events[:1]
    return found


def _redone(event: Mapping[str, Any], first: Mapping[str, Any]) -> bool:
    """Return whether the attempt that began with ``first`` reports the same again."""
    if event["step"] == first["step"]:
        return bool(event["values"].keys() & first["values"].keys())
    return bool(event["step"] > first["step"])


def find_unrelayed(
    store: Store, ref: AttemptRef, attempts: Path, first: Mapping[str, Any] | None
) -> list[dict[str, Any]]:
    """Return the metrics that the attempt of ``ref``, which begins with ``first``, has to relay. ``attempts`` holds the
    records of the job's attempts. Blocks.
    """
    folders = {number: folder for number, folder in attempt_folders(attempts).items() if number < ref.attempt}
    if not folders:
        return []
    since = 0.0
    relayed: set[bytes] = set()
    page = store.events.page(ref.job_id, limit=1)
    if page.gap and page.items:
        since = float(page.items[0].event["time"])
    while (page := store.events.page(ref.job_id, after=page.next_after, types=METRIC, limit=_PAGE)).items:
        relayed |= {event_key(item.event) for item in page.items}
    return unrelayed({number: recorded(folder, METRIC) for number, folder in folders.items()}, relayed, first, since)
