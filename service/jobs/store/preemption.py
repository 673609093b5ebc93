"""Makes room for pending jobs by stopping preemptible ones of lower priority."""

from __future__ import annotations

from dataclasses import dataclass

import orjson

from service.jobs.queue.fair_share import PendingJob
from service.jobs.queue.preemption import PreemptibleJob, Preemption, plan
from service.jobs.store import decode, stubs
from service.jobs.store.client import BrokerClient
from service.jobs.store.hosts import HostStore
from service.jobs.store_limits import StoreLimits

_MOST = 100
"""Pending jobs that are considered, the first in order, and running ones, those of the lowest priorities."""


@dataclass(frozen=True)
class Preemptions:
    """Reads which jobs might be stopped, plans (:mod:`service.jobs.queue.preemption`), and has one script carry it out,
    which checks that nothing has changed.
    """

    client: BrokerClient
    limits: StoreLimits
    hosts: HostStore

    def make_room(self) -> Preemption | None:
        """Ask jobs to make room, for one pending job at most; return whom, and for which. Any process may call this at
        any time.
        """
        seen = stubs.read_preemptible(self.client, _MOST)
        if not seen:
            return None
        pending, running = seen
        hosts = [host for host in self.hosts.list() if host.takes_work]
        auto = "cuda" if any(host.cuda for host in hosts) else "cpu"
        found = plan(
            [_pending_job(view, auto) for view in map(decode.fields_of, stubs.waiting(self.client, *pending))],
            [_preemptible(row) for row in running],
            {pool: {host.name: len(host.free.get(pool, ())) for host in hosts} for pool in ("cuda", "cpu")},
            self.limits.preemption_min_run_s,
        )
        return found if found is not None and self._stop(found) else None

    def _stop(self, found: Preemption) -> bool:
        victims = [{"id": victim.id, "attempt": victim.attempt} for victim in found.victims]
        job = found.beneficiary
        words = orjson.dumps(victims).decode()
        return stubs.preempt(self.client, self.limits.script_argument, job.id, job.pool, words) == 1


def _pending_job(view: dict[str, str], auto: str) -> PendingJob:
    device, ranks, max_hosts = view["shape"].split(":")
    return PendingJob(
        id=view["id"],
        kind=view["kind"],
        owner=view["owner"],
        pool=auto if device == "auto" else device,
        ranks=int(ranks),
        max_hosts=int(max_hosts),
        priority=int(view["priority"]),
        queued_at_ms=int(view["queued_at"]),
    )


def _preemptible(row: list[str]) -> PreemptibleJob:
    job_id, attempt, priority, placement, elapsed_ms = row
    shares = decode.shares(placement)
    return PreemptibleJob(
        id=job_id,
        attempt=int(attempt),
        priority=int(priority),
        pool=shares[0].pool,
        devices={share.host: len(share.devices) for share in shares},
        ran_s=float(elapsed_ms) / 1000,
    )
