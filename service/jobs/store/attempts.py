"""Handles attempts as workers do: places, dispatches, claims, renews, ends and reaps them,
and makes room for pending jobs by stopping preemptible ones of lower priority.

Every write carries an :class:`AttemptRef`. It is refused with :class:`Superseded` unless that attempt of the
job is active and the host's part of it is claimed and not given up. A part that was given up as lost may write
again, and its attempt continues, until a newer one is claimed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeGuard, cast

from pydantic import ValidationError

from service.jobs.events import EVENT_TYPES, ArtifactEvent, Event, PhaseEvent, ProgressEvent
from service.jobs.kinds.registry import spec_adapter
from service.jobs.queue.preemption import PreemptibleJob, Preemption, plan
from service.jobs.records import (
    Allocation,
    Artifact,
    AttemptRef,
    Claim,
    Directive,
    EndEarly,
    Job,
    JobError,
    PartOutcome,
    Progress,
    UnknownSpec,
)
from service.jobs.records.store_limits import StoreLimits
from service.jobs.records.webhooks import ReachedThreshold
from service.jobs.spec.common import FILE_ID, CommonSpec, PendingLaunch
from service.jobs.store import decode, stubs
from service.jobs.store.artifacts import checked_name
from service.jobs.store.client import BrokerClient
from service.jobs.store.decode import json_of
from service.jobs.store.hosts import HostStore, free_devices
from service.jobs.store.keyspace import PLACEMENT_NEWS
from service.jobs.store.queue import pending_job

_BATCH = 256
"""Outbox entries, and ended leases, handled in one script call."""
LONGEST_WAIT_S = 1.0
"""The most seconds of one wait for news, far below the time that a broker has to answer."""
_LONGEST_PHASE = 60
"""The most characters of a phase's name; the rest is cut off."""
_LATEST = 2.0**32
"""A Unix time that no clock shows: a rank's own times count only up to it."""


def parse_ref(text: str) -> AttemptRef:
    """Parse the text of ``str(ref)``."""
    job_id, attempt, host = text.split(":", 2)
    return AttemptRef(job_id, int(attempt), host)


@dataclass(frozen=True)
class Attempts:
    """Placement, fencing and leases. Every change is one atomic script on the store's own clock."""

    client: BrokerClient
    limits: StoreLimits

    def place(self) -> list[str]:
        """Start every job that fits now; any process may call this at any time. Returns the ids placed.

        Order is priority, then age (a job that lost an attempt keeps its place). One host by best fit, else a gang
        over the fewest hosts that ``max_hosts`` allows, all or nothing. Later jobs may overtake one that does not fit
        until it has waited ``max_queue_bypass_s``; then nothing behind it in its pool is placed, unless no set of
        hosts could ever hold it.
        """
        return stubs.place(self.client, self.limits.script_argument)

    def wait_for_news(self, timeout_s: float) -> bool:
        """Return True once something has changed since any agent last looked that may let a job be placed, False after
        ``timeout_s``, at most :data:`LONGEST_WAIT_S`. One waiting agent of the fleet hears of each change.
        """
        return self.client.call("BLPOP", PLACEMENT_NEWS(), min(timeout_s, LONGEST_WAIT_S)) is not None

    def tell_news(self) -> None:
        """End the wait of one agent."""
        self.client.call("LPUSH", PLACEMENT_NEWS(), 1)

    def settle_restored(self) -> list[str]:
        """Settle the jobs of a store that was restored from a backup, before anybody else uses it: running jobs are
        queued again without using a retry, jobs being cancelled are cancelled, and hosts are forgotten until they
        report. Numbers of attempts leave a gap, so that supervisors of the backed-up service are refused here.
        """
        cursor, queued = "", list[str]()
        while True:
            cursor, *found = stubs.settle_restored(self.client, self.limits.script_argument, cursor, _BATCH)
            queued += found
            if not cursor:
                return queued

    def due(self) -> list[AttemptRef]:
        """Return the parts to dispatch now. An entry comes back every ``redispatch_s`` until its part is claimed."""
        return [parse_ref(name) for name in stubs.due(self.client, self.limits.script_argument, _BATCH)]

    def claim(self, ref: AttemptRef, supervisor: str) -> Claim:
        """Own a part.

        ``supervisor`` names one process: asking again under the same name gives the same claim, any other is refused
        with :class:`Superseded`. The job is ``running`` when all its parts are claimed. Raises :class:`UnknownSpec`,
        with the part claimed, if the API knew a package that this host does not: an operator installed it on one of
        them only, or has removed it.
        """
        spec, placement, address, files, needed = stubs.claim(
            self.client, self.limits.script_argument, ref.job_id, ref.attempt, ref.host, supervisor
        )
        return Claim(
            ref=ref,
            spec=_read_spec(spec),
            shares=decode.shares(placement),
            leader_address=address,
            lease_s=self.limits.lease_s,
            files=tuple(filter(FILE_ID.fullmatch, files)),  # a host can write any text there
            needed=frozenset(needed),
        )

    def renew(self, ref: AttemptRef) -> Directive:
        """Extend the lease. ``stop``: end the group and finish as ``stopped``; ``lost``: the part is not yours."""
        answer = stubs.renew(self.client, self.limits.script_argument, ref.job_id, ref.attempt, ref.host)
        word, _, reason = answer.partition(" ")
        return EndEarly(reason) if word == "end" else cast(Directive, answer)

    def emit(
        self,
        ref: AttemptRef,
        events: Sequence[Event],
        progress: ProgressEvent | None = None,
        batch: int = 0,
        reached: Sequence[ReachedThreshold] = (),
    ) -> None:
        """Append events to the job's stream in order, set its progress and add to its phases, all or nothing. The
        first entry of each name in ``reached`` is told to the receivers that the job's spec names. ``batch``
        numbers the calls of this part from 1 on: no batch is taken twice, so a call that got no answer may be
        repeated. Without it every call appends.

        ``state`` events belong to the service: they are refused with :class:`ValueError`, like unknown types.
        """
        pairs: list[str] = []
        for event in events:
            if event["type"] not in EVENT_TYPES or event["type"] == "state":
                raise ValueError(f"an attempt cannot emit events of type {event['type']!r}")
            pairs += (event["type"], json_of(event))
        kept = "" if progress is None else _progress(progress)
        limits, phases = self.limits.script_argument, _phases(events)
        told = json_of([each.model_dump() for each in reached]) if reached else ""
        stubs.emit(self.client, limits, ref.job_id, ref.attempt, ref.host, batch, kept, phases, told, *pairs)

    def record_artifact(self, ref: AttemptRef, artifact: Artifact) -> None:
        """Enter a published file in the manifest and append its ``artifact`` event; the same name is replaced.

        Raises :class:`ValueError` for a name that is no plain relative path, and :class:`Conflict` if the job
        would have more artifacts, or more bytes of them, than the limits allow.
        """
        event: ArtifactEvent = {
            "type": "artifact",
            "time": time.time(),
            "rank": None,
            "name": checked_name(artifact.name),
            "media_type": artifact.media_type,
            "bytes": artifact.bytes,
            "sha256": artifact.sha256,
        }
        stubs.record_artifact(
            self.client,
            **vars(ref),
            limits=self.limits.script_argument,
            name=artifact.name,
            entry=artifact.model_dump_json(),
            event=json_of(event),
        )

    def finish(self, ref: AttemptRef, outcome: PartOutcome) -> Job:
        """End a part and free its devices. The last part ends the attempt: the first fault among the parts decides.

        Faults requeue the job while retries are left, a loss without using one as long as its own allowance lasts, an
        interruption always; a cancelled job never comes back.
        """
        view = stubs.finish(
            self.client,
            **vars(ref),
            limits=self.limits.script_argument,
            status=outcome.status,
            result="" if outcome.result is None else json_of(outcome.result),
            error="" if outcome.status == "succeeded" else _error(ref, outcome).model_dump_json(),
        )
        return decode.job(view)

    def reap(self) -> list[str]:
        """Give up the parts that have fallen silent; returns the ids of the jobs touched.

        A claimed part whose lease ended is lost (``LeaseLost``), and its devices stay held until a beat of its host no
        longer lists the attempt; its supervisor takes the attempt up again by any write, until a newer one is claimed.
        A part that nobody claimed, or whose host fell silent before (``NotClaimed``), runs nothing: its devices are
        free at once, and the job avoids that host. Either way the job is queued again without using a retry,
        ``max_lost_attempts`` times at most; then it fails.

        Leases run on the store's own clock, which stands still between calls of the store: no lease ends because the
        broker was away, or because its time of day was set.
        """
        return stubs.reap(self.client, self.limits.script_argument, _BATCH)


def _read_spec(spec: str) -> CommonSpec:
    try:
        return spec_adapter.validate_json(spec)
    except ValidationError as error:
        said = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise UnknownSpec(
            f"this host does not understand a spec that was accepted ({said}); "
            "install the same packages on the API and on every host"
        ) from error


def _progress(event: ProgressEvent) -> str:
    """Return its form in the job's record. Raises :class:`ValueError` for values that could not be read back."""
    return Progress.model_validate({name: event.get(name) for name in Progress.model_fields}).model_dump_json()


def _phases(events: Sequence[Event]) -> str:
    """Return the phases that rank 0 reports, by name and Unix time, as JSON; empty if there are none."""
    told = [event for event in events if _is_phase(event) and event["rank"] == 0]
    begun = [(each["name"][:_LONGEST_PHASE], min(max(each["time"], 0.0), _LATEST)) for each in told]
    return json_of(begun) if begun else ""


def _is_phase(event: Event) -> TypeGuard[PhaseEvent]:
    return event["type"] == "phase"


def _error(ref: AttemptRef, outcome: PartOutcome) -> JobError:
    if outcome.error is not None:
        return outcome.error
    said = {
        "failed": "failed without a reason",
        "stopped": "was stopped from outside",
        "interrupted": "was interrupted",
        "lost": "was lost with its supervisor",
    }[outcome.status]
    return JobError(type=outcome.status.capitalize(), message=f"the part on host {ref.host} {said}")


_MOST = 500


@dataclass(frozen=True)
class KnownJob:
    """The fate of a job for which devices were requested: its state, empty if the job is gone, and the
    allocation of its newest attempt, empty if there is none.
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
        """Return the first pending jobs in order, without those that quotas keep back, and the fate of others."""
        limits = self.limits.script_argument
        pending, known = stubs.read_launching(self.client, limits, launcher, _MOST, *job_ids)
        return [_pending(row) for row in pending], {job_id: KnownJob(*rest) for job_id, *rest in known}

    def tell(self, launcher: str, reasons: Mapping[str, str]) -> None:
        """Note why jobs have no devices yet, by job."""
        if reasons:
            stubs.tell_allocating(self.client, launcher, json_of(dict(reasons)))

    def place(self, job_id: str, allocation: Allocation, hosts: Sequence[str]) -> int | Literal["waits", "over"]:
        """Begin an attempt on all devices of the hosts of an allocation, the first of which leads. Return its
        number, ``waits`` until all of them have reported, or ``over`` if the job has no use for them (any
        more).
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


_MOST_STOPPED = 100
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
        """Ask jobs to make room, for one pending job at most; return these jobs, and the pending one. Any
        process may call this at any time.
        """
        seen = stubs.read_preemptible(self.client, _MOST_STOPPED)
        if not seen:
            return None
        pending, running = seen
        hosts = [host for host in self.hosts.list() if host.takes_work]
        auto = "cuda" if any(host.cuda for host in hosts) else "cpu"
        found = plan(
            [pending_job(view, auto) for view in map(decode.fields_of, stubs.waiting(self.client, *pending))],
            [_preemptible(row) for row in running],
            free_devices(hosts),
            self.limits.preemption_min_run_s,
        )
        return found if found is not None and self._stop(found) else None

    def _stop(self, found: Preemption) -> bool:
        victims = [{"id": victim.id, "attempt": victim.attempt} for victim in found.victims]
        job = found.beneficiary
        words = json_of(victims)
        return stubs.preempt(self.client, self.limits.script_argument, job.id, job.pool, words) == 1


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
