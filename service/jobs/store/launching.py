"""Gets devices of a scheduler for pending jobs: what launchers ask of the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import orjson

from service.jobs.launchers import PendingLaunch
from service.jobs.records import Allocation
from service.jobs.store import stubs
from service.jobs.store.client import BrokerClient
from service.jobs.store_limits import StoreLimits

_MOST = 500


@dataclass(frozen=True)
class KnownJob:
    """What has become of a job that devices were asked for: its state, empty where it is gone, and the allocation of
    its newest attempt, empty where there is none.
    """

    state: str
    allocation: str


@dataclass(frozen=True)
class Launching:
    """One worker at a time asks a launcher for devices; any host of an allocation may begin the attempt there."""

    client: BrokerClient
    limits: StoreLimits

    def hold(self, launcher: str, worker: str, hold_s: float) -> bool:
        """Return whether this worker is the one to ask the launcher, for so long from now on."""
        return stubs.hold_launcher(self.client, launcher, worker, round(hold_s * 1000)) == 1

    def read(self, launcher: str, job_ids: Sequence[str]) -> tuple[list[PendingLaunch], dict[str, KnownJob]]:
        """Return the first pending jobs in order, without those that quotas keep back, and what became of others."""
        limits = self.limits.script_argument
        pending, known = stubs.read_launching(self.client, limits, launcher, _MOST, *job_ids)
        return [_pending(row) for row in pending], {job_id: KnownJob(*rest) for job_id, *rest in known}

    def tell(self, launcher: str, reasons: Mapping[str, str]) -> None:
        """Note why jobs have no devices yet, by job."""
        if reasons:
            stubs.tell_allocating(self.client, launcher, orjson.dumps(dict(reasons)).decode())

    def place(self, job_id: str, allocation: Allocation, hosts: Sequence[str]) -> int | Literal["waits", "over"]:
        """Begin an attempt on all devices of the hosts of an allocation, of which the first leads; return its number,
        ``waits`` until all of them are heard of, and ``over`` where the job has no use for them (any more).
        """
        limits, told = self.limits.script_argument, allocation.model_dump_json()
        answer, attempt = stubs.place_allocated(self.client, limits, job_id, told, *hosts)
        return int(attempt) if answer == "placed" else cast(Literal["waits", "over"], answer)


def _pending(row: list[str]) -> PendingLaunch:
    job_id, ranks, hosts, device, priority, timeout_s, kind = row
    return PendingLaunch(
        job_id=job_id,
        kind=kind,
        ranks=int(ranks),
        max_hosts=int(hosts),
        device=cast(Literal["auto", "cuda", "cpu"], device),
        priority=int(priority),
        timeout_s=float(timeout_s) if timeout_s else None,
    )
