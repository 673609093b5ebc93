"""Lists jobs by filters, newest first or active ones first, and counts them by state."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import cast

from service.jobs.records import JobCounts, JobPage, ListedJob, Problem, Rejected
from service.jobs.records.store_limits import StoreLimits
from service.jobs.spec.common import ACTIVE, JOB_ID, STATES, TERMINAL, JobState
from service.jobs.store import decode, stubs
from service.jobs.store.client import BrokerClient
from service.jobs.store.decode import json_of
from service.jobs.store.keyspace import JOBS_BY
from service.jobs.store.queue import Queue
from service.jobs.text import folded

NO_SWEEP = "none"
"""As ``sweep`` of a filter: jobs that belong to no sweep."""
_OF_A_SWEEP = "of_a_sweep"
"""The index of jobs that belong to a sweep, see ``lua/submit_sweep.lua``."""
_POSITION = re.compile(r"\d{1,9}", re.ASCII)


@dataclass(frozen=True)
class JobFilter:
    """Filters a listing; ``label`` is ``key`` or ``key=value``, ``q`` part of an id, a name or a label. A job in any of
    the ``states`` matches; without states, every job.
    """

    kind: str | None = None
    states: tuple[str, ...] = ()
    label: str | None = None
    owner: str | None = None
    q: str | None = None
    project: str | None = None
    visible_to: str | None = None
    """A project: only its own jobs, and those shared with it."""
    sweep: str | None = None
    """The id of a sweep, or :data:`NO_SWEEP`."""
    needs: str | None = None
    """The id of a job: those that verify or check its model, resume it, or run after it."""

    @property
    def indexes(self) -> list[str]:
        """Return the indexes, beside those of states, that must all contain a job."""
        named = (
            ("kind", self.kind),
            ("label", self.label),
            ("owner", self.owner),
            ("project", self.project),
            ("visible", self.visible_to),
            ("sweep", None if self.sweep == NO_SWEEP else self.sweep),
            ("needs", self.needs),
        )
        return [f"{name}:{value}" for name, value in named if value is not None]

    @property
    def chooses(self) -> bool:
        """Return whether it leaves out jobs by more than who may see them and whether they belong to a sweep."""
        return bool(self.states or self.text or replace(self, visible_to=None).indexes)

    @property
    def outside(self) -> list[str]:
        """Return the indexes that must not contain a job."""
        return [_OF_A_SWEEP] if self.sweep == NO_SWEEP else []

    @property
    def text(self) -> str:
        return folded(self.q or "")

    @property
    def script_argument(self) -> str:
        """Return the filter, except for its text, as ``lua/lib/listing.lua`` reads it."""
        states = [[f"state:{state}" for state in self.states]] if self.states else []
        within = [*states, *([index] for index in self.indexes)]
        return json_of({"within": within, "outside": self.outside})


ALL_JOBS = JobFilter()


@dataclass
class _PageDraft:
    """A page that several scripts fill."""

    limit: int
    room: int
    """Bytes of records for which it still has room."""
    without: str
    """The field that its records lack."""

    def __post_init__(self) -> None:
        self.items: list[ListedJob] = []

    @property
    def missing(self) -> int:
        return self.limit - len(self.items)

    @property
    def is_full(self) -> bool:
        return self.missing <= 0 or self.room <= 0

    def add(self, views: list[list[str]]) -> None:
        self.items += map(decode.listed_job, views)
        self.room -= sum(map(len, chain.from_iterable(views)))


@dataclass(frozen=True)
class Listing:
    """Reads lists of jobs. A page may hold fewer than ``limit`` jobs and still have a next page: if their
    records are long, or if few of very many match.
    """

    client: BrokerClient
    limits: StoreLimits

    def newest(self, filters: JobFilter, limit: int, cursor: str | None, *, specs: bool) -> JobPage:
        """Return a page of jobs, newest first; with their specs only if ``specs`` is set."""
        page = self._page(limit, specs=specs)
        if cursor is not None and JOB_ID.fullmatch(cursor) is None:
            raise _no_cursor(cursor)
        following = self._fill_newest(page, filters, cursor or "")
        return JobPage(items=tuple(page.items), next_cursor=following or None)

    def active(self, filters: JobFilter, limit: int, cursor: str | None, *, specs: bool, queue: Queue) -> JobPage:
        """Return a page of jobs in three parts: those that run, start or are being cancelled, newest first; the
        queued ones in the order of the queue; those that are over, newest first.

        The cursor names the part and the position in it. A job that moves from one part to another between two pages
        may be on both or on neither.
        """
        page = self._page(limit, specs=specs)
        first, following = _parse_cursor(cursor)
        for part in _PARTS[_PARTS.index(first) :]:
            if page.is_full:
                return JobPage(items=tuple(page.items), next_cursor=f"{part.name}:")
            states = tuple(state for state in part.states if not filters.states or state in filters.states)
            chosen = replace(filters, states=states)
            if part is _QUEUED and states:
                queued = [job.id for job in queue.snapshot().jobs]
                following = self._fill_these(page, chosen, queued, int(following or 0))
            elif states:
                following = self._fill_newest(page, chosen, following)
            if states and following:
                return JobPage(items=tuple(page.items), next_cursor=f"{part.name}:{following}")
            following = ""
        return JobPage(items=tuple(page.items))

    def named(self, ids: Sequence[str], filters: JobFilter, limit: int, cursor: str | None, *, specs: bool) -> JobPage:
        """Return a page of the named jobs that exist and match, in the given order; the cursor names a position
        among them.
        """
        page = self._page(limit, specs=specs)
        if cursor is not None and _POSITION.fullmatch(cursor) is None:
            raise _no_cursor(cursor)
        following = self._fill_these(page, filters, ids, int(cursor or 0))
        return JobPage(items=tuple(page.items), next_cursor=following or None)

    def counts(self, filters: JobFilter) -> JobCounts:
        """Count the matching jobs by state; the filter's ``states`` are ignored. No count exceeds
        ``limits.list_most``, and the search for a text reads no more jobs: beyond that, counts are not exact.
        """
        if filters.text:
            return self._counts_of_text(replace(filters, states=()))
        counts = {state: self._count(state, filters) for state in STATES}
        return JobCounts(states=counts, exact=all(count < self.limits.list_most for count in counts.values()))

    def _count(self, state: str, filters: JobFilter) -> int:
        indexes = [f"state:{state}", *filters.indexes]
        found = self._in_all(indexes)
        if not 0 < found < self.limits.list_most:
            return found
        return found - sum(self._in_all([*indexes, index]) for index in filters.outside)

    def _in_all(self, indexes: list[str]) -> int:
        """Count the jobs that are in all indexes, to ``limits.list_most``."""
        keys, most = [JOBS_BY(index) for index in indexes], self.limits.list_most
        if len(keys) == 1:
            return min(int(self.client.call("ZCARD", *keys)), most)
        return int(self.client.call("ZINTERCARD", len(keys), *keys, "LIMIT", most))

    def _counts_of_text(self, filters: JobFilter) -> JobCounts:
        cursor, counts = "", dict.fromkeys(STATES, 0)
        for _ in self._scripts():
            cursor, *flat = stubs.count_jobs(
                self.client, filters.script_argument, filters.text, cursor, self.limits.list_scan
            )
            for state, count in zip(flat[::2], flat[1::2], strict=True):
                counts[cast(JobState, state)] += int(count)
            if not cursor:
                break
        return JobCounts(states=counts, exact=not cursor)

    def _page(self, limit: int, *, specs: bool) -> _PageDraft:
        if limit < 1:
            raise Rejected([Problem("limit", "a page holds at least one job", limit, "1 or more")])
        return _PageDraft(limit, self.limits.list_page_bytes, "" if specs else "spec")

    def _scripts(self) -> range:
        """Return a range as long as the number of scripts that a page may run."""
        return range(self.limits.list_most // self.limits.list_scan)

    def _fill_newest(self, page: _PageDraft, filters: JobFilter, cursor: str) -> str:
        """Add jobs after the cursor to a page; return the next cursor, empty if there are no more."""
        for _ in self._scripts():
            cursor, *views = stubs.list_jobs(
                self.client,
                filters=filters.script_argument,
                text=filters.text,
                cursor=cursor,
                limit=page.missing,
                scan=self.limits.list_scan,
                without=page.without,
                page_bytes=page.room,
            )
            page.add(views)
            if not cursor or page.is_full:
                break
        return cursor

    def _fill_these(self, page: _PageDraft, filters: JobFilter, ids: Sequence[str], start: int) -> str:
        """Add jobs from a position of a list on to a page; return the next position, empty if there is none."""
        end = min(len(ids), start + self.limits.list_most)
        while start < end and not page.is_full:
            named = ids[start : min(start + self.limits.list_scan, end)]
            looked_at, *views = stubs.list_these(
                self.client, filters.script_argument, filters.text, page.missing, page.without, page.room, *named
            )
            page.add(views)
            start += looked_at
        return str(start) if start < len(ids) else ""


@dataclass(frozen=True)
class _OrderPart:
    """A part of the order ``active``."""

    name: str
    states: frozenset[JobState]


_QUEUED = _OrderPart("queued", frozenset({"queued"}))
_PARTS = (_OrderPart("active", ACTIVE), _QUEUED, _OrderPart("ended", TERMINAL))
_CURSOR = re.compile(
    r"(?P<queued>queued):(?P<position>\d{0,9})|(?P<part>active|ended):(?P<after>(job_[0-9a-z]{20})?)", re.ASCII
)


def _parse_cursor(cursor: str | None) -> tuple[_OrderPart, str]:
    """Return the part of the order ``active`` that a cursor names, and the position in it."""
    if cursor is None:
        return _PARTS[0], ""
    found = _CURSOR.fullmatch(cursor)
    if found is None:
        raise _no_cursor(cursor)
    if found["queued"]:
        return _QUEUED, found["position"]
    return next(part for part in _PARTS if part.name == found["part"]), found["after"]


def _no_cursor(cursor: str) -> Rejected:
    return Rejected([Problem("cursor", "not a cursor of this list", cursor, "the next_cursor of a page in this order")])
