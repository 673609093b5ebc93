"""Keeps the ended jobs that are still to be exported, and their targets.

The script that ends a job notes them. An export's failures so far are a field of the job, and are deleted with it.
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
from service.jobs.store.keyspace import EXPORTS_DUE


@dataclass(frozen=True)
class DueExport:
    """One job and one target. ``attempts`` have failed so far, the first at ``first_at`` (Unix seconds, 0 before)."""

    job_id: str
    target: str
    attempts: int = 0
    first_at: float = 0.0


@dataclass(frozen=True)
class Exports:
    """Hands out exports. Safe to share between threads and processes."""

    client: BrokerClient
    limits: StoreLimits

    def exist(self) -> bool:
        """Return whether there are exports to make, now or later; this writes nothing."""
        return bool(self.client.call("EXISTS", EXPORTS_DUE()))

    def due(self, most: int, hold_s: float) -> list[DueExport]:
        """Take up to ``most`` that are due; no other process gets them for ``hold_s``."""
        return list(_read(stubs.due_exports(self.client, most, round(hold_s * 1000))))

    def over(self, due: DueExport, line: str | None) -> None:
        """Note that an export has ended, with ``line`` in the job's log."""
        self._note(due, "", 0, line)

    def again(self, due: DueExport, first_at: float, after_s: float, line: str) -> None:
        """Note that an export has failed once more, and is due again after some seconds."""
        state = {"attempts": due.attempts + 1, "first_at": first_at}
        self._note(due, orjson.dumps(state).decode(), max(1, round(after_s * 1000)), line)

    def _note(self, due: DueExport, state: str, again_ms: int, line: str | None) -> None:
        event: dict[str, Any] = {"type": "log", "time": time.time(), "rank": None, "stream": "service", "line": line}
        stubs.note_export(
            self.client,
            limits=self.limits.script_argument,
            job_id=due.job_id,
            target=due.target,
            state=state,
            again_ms=again_ms,
            event="" if line is None else orjson.dumps(event).decode(),
        )


def _read(flat: list[str]) -> Iterator[DueExport]:
    for name, state in zip(flat[::2], flat[1::2], strict=True):
        job_id, _, target = name.partition(":")
        yield DueExport(job_id, target, **(orjson.loads(state) if state else {}))
