"""Decides one instance: as a job of the service that answers here, or by a rank of its own if none does."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from service.jobs.spec.common import TERMINAL
from trivet.endpoint import resolve
from trivet.errors import Refused, TrivetError, Unreachable
from trivet.vnncomp.answers import CompetitionVerdict, Decided
from trivet.vnncomp.instances import BenchmarkError, content
from trivet.vnncomp.lone_rank import RankError, lone_rank
from trivet.vnncomp.questions import Device, Question
from trivet.vnncomp.run_places import RunPlaces
from trivet.vnncomp.witness import ReplayedNetwork, ReplayError, replayed

if TYPE_CHECKING:
    from trivet.client import Client

RESERVE_S = 0.25
"""Seconds before the end of an instance's limit at which its answer is written."""
_PAUSES_S, _LONGER = (0.03, 1.0), 1.1
_ANSWERS: Mapping[str, CompetitionVerdict] = {
    "verified": "unsat",
    "falsified": "sat",
    "unknown": "unknown",
    "timeout": "timeout",
}


Asking = Callable[[Question, float, float], Mapping[str, Any] | None]
"""``(question, seconds, deadline)`` to the row of its job with this budget; ``None`` at the deadline."""
PREPARING_S, _LEAST_S = 300.0, 0.01


def prepare(question: Question, ask: Asking) -> None:
    """Run the instance's job without time to search, so that its network is known when the instance is run: its trace
    is kept. Raises :class:`TrivetError` for an instance that cannot be decided.
    """
    ask(question, _LEAST_S, time.monotonic() + PREPARING_S)


def decide(question: Callable[[], Question], ask: Asking, limit_s: float) -> Decided:
    """Answer a question in ``limit_s`` seconds; what is wrong with it, or with the service, becomes the answer's
    reason. A ``sat`` has been replayed: see :mod:`.witness`.
    """
    deadline = time.monotonic() + max(limit_s - RESERVE_S, limit_s / 2)
    try:
        asked = question()
        if not asked.query.disjuncts:
            return Decided("unsat", reason="no input satisfies the query's conditions on inputs")
        # A witness needs onnxruntime, whose import takes as long as a small search: it is there when the row comes.
        threading.Thread(target=importlib.import_module, args=("onnxruntime",), daemon=True).start()
        row = ask(asked, deadline - time.monotonic(), deadline)
        if row is None:
            return Decided("timeout", reason=f"{limit_s:g} seconds were spent")
        return _decide_by_row(row, asked)
    except (BenchmarkError, Refused, ReplayError) as error:
        return Decided("unknown", reason=_describe_error(error))
    except (TrivetError, OSError) as error:
        return Decided("error", reason=str(error))


def _describe_error(error: TrivetError) -> str:
    fields = error.errors if isinstance(error, Refused) else ()
    return "; ".join([str(error), *(f"{each['path']}: {each['message']}" for each in fields)])


def _decide_by_row(row: Mapping[str, Any], question: Question) -> Decided:
    verdict = _ANSWERS.get(row["verdict"])
    if verdict is None:
        raise RankError(f"the row's verdict is {row['verdict']!r}; expected {', '.join(_ANSWERS)}")
    if verdict != "sat":
        return Decided(verdict, reason=row.get("reason") or "")
    found = replayed(ReplayedNetwork(content(question.onnx)), question.query, row["counterexample"])
    return Decided(verdict, question.own_witness(found.witness))


def asking(client: Client | None, device: Device, at_once: int = 1) -> Asking:
    """Return the way to ask: by jobs of the service, or by ranks of their own without one, so many at a time."""
    return _Alone(RunPlaces.here(device, at_once)) if client is None else _ByService(client, device)


def service_here() -> Client | None:
    """Return a client of the configured service if it answers."""
    address = urlsplit(resolve(None, None).url)
    if address.scheme == "unix" and not Path(address.path).exists():
        return None
    from trivet.client import Client  # noqa: PLC0415 - takes as long as a small instance

    with suppress(Unreachable):
        client = Client(outage_s=0.0)
        if client.is_ready():
            return client
        client.close()
    return None


@dataclass(frozen=True)
class _ByService:
    client: Client
    device: Device

    def __call__(self, question: Question, seconds: float, deadline: float) -> Mapping[str, Any] | None:
        spec = question.spec(lambda path: self.client.upload(path).id, self.device, seconds)
        job, pause = self.client.submit(spec), _PAUSES_S[0]
        while (left := deadline - time.monotonic()) > 0:
            seen = self.client.job(job.id, wait_s=min(pause, left))
            for row in self.client.bounds(job.id):
                return row
            if seen.state in TERMINAL:
                why = "it has no row" if seen.error is None else str(seen.error)
                raise RankError(f"{job.id} {seen.state}: {why}")
            pause = min(_LONGER * pause, _PAUSES_S[1])
        self.client.cancel(job.id)
        return None


@dataclass(frozen=True)
class _Alone:
    places: RunPlaces

    def __call__(self, question: Question, seconds: float, deadline: float) -> Mapping[str, Any] | None:
        with self.places.taken() as place, lone_rank(place.variables) as rank:
            return rank.row(question.spec(rank.upload, place.device, seconds), deadline)
