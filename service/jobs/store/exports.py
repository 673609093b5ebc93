"""Keeps which jobs are to be exported where, and what is kept of each export until it is over.

The scripts that begin an attempt and end a job note them. What is kept, failures and what a target has so far, is a
field of the job, and is deleted with it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import orjson

from service.jobs.records.store_limits import StoreLimits
from service.jobs.store import stubs
from service.jobs.store.client import BrokerClient
from service.jobs.store.decode import json_of
from service.jobs.store.keyspace import EXPORT_SEAT, EXPORTS_DUE


@dataclass(frozen=True)
class DueExport:
    """One job and one target. ``attempts`` have failed so far, the first at ``first_at`` (Unix seconds, 0 before).

    ``sent`` is what :meth:`Exports.follow` was given last; ``is_live``: the job was not over when this became due.
    """

    job_id: str
    target: str
    attempts: int = 0
    first_at: float = 0.0
    sent: dict[str, Any] | None = None
    is_live: bool = False


@dataclass(frozen=True)
class Exports:
    """Hands out exports. Safe to share between threads and processes."""

    client: BrokerClient
    limits: StoreLimits

    def exist(self) -> bool:
        """Return whether there are exports to make, now or later; this writes nothing."""
        return bool(self.client.call("EXISTS", EXPORTS_DUE()))

    def due(self, most: int, hold_s: float, live_hold_s: float) -> list[DueExport]:
        """Take up to ``most`` that are due; no other process gets them for ``hold_s``, or ``live_hold_s`` while their
        jobs go on.
        """
        return list(_read(stubs.due_exports(self.client, most, round(hold_s * 1000), round(live_hold_s * 1000))))

    def over(self, due: DueExport, line: str | None) -> None:
        """Note that an export has ended, with ``line`` in the job's log."""
        self._note(due, {}, 0, line)

    def follow(self, due: DueExport, sent: dict[str, Any] | None, after_s: float) -> None:
        """Note what a target has of a job that goes on; the export is due again after some seconds, or once the job
        has ended.
        """
        self._note(due, {"sent": sent}, max(1, round(after_s * 1000)), None)

    def again(self, due: DueExport, first_at: float, after_s: float, line: str) -> None:
        """Note that an export has failed once more, and is due again after some seconds. What a target has of an ended
        job is then unknown.
        """
        state = {"attempts": due.attempts + 1, "first_at": first_at, "sent": due.sent if due.is_live else None}
        self._note(due, state, max(1, round(after_s * 1000)), line)

    def put_back(self, due: DueExport, after_s: float) -> None:
        """Let an export be due again after some seconds, as it was: another process makes it."""
        state = {"attempts": due.attempts, "first_at": due.first_at, "sent": due.sent}
        self._note(due, state, max(1, round(after_s * 1000)), None)

    def hold_seat(self, target: str, process: str, hold_s: float) -> bool:
        """Return whether a process is the one that makes a target's exports, as it then stays for some seconds."""
        key, hold_ms = EXPORT_SEAT(target), round(hold_s * 1000)
        if self.client.call("SET", key, process, "NX", "PX", hold_ms):
            return True
        return self.client.call("GET", key) == process and bool(self.client.call("PEXPIRE", key, hold_ms))

    def leave_seat(self, target: str, process: str) -> None:
        """Let another process make a target's exports, if this one does."""
        if self.client.call("GET", EXPORT_SEAT(target)) == process:
            self.client.call("DEL", EXPORT_SEAT(target))

    def _note(self, due: DueExport, state: dict[str, Any], again_ms: int, line: str | None) -> None:
        event: dict[str, Any] = {"type": "log", "time": time.time(), "rank": None, "stream": "service", "line": line}
        stubs.note_export(
            self.client,
            limits=self.limits.script_argument,
            job_id=due.job_id,
            target=due.target,
            state=json_of(state) if state else "",
            live="live" if due.is_live else "",
            again_ms=again_ms,
            event="" if line is None else json_of(event),
        )


def _read(flat: list[str]) -> Iterator[DueExport]:
    for name, state, live in zip(flat[::3], flat[1::3], flat[2::3], strict=True):
        job_id, _, target = name.partition(":")
        yield DueExport(job_id, target, **(orjson.loads(state) if state else {}), is_live=bool(live))
