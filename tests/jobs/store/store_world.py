"""What may be done to a store in any order, each time with what must become of it by the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import redis as redis_py
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
)
from store_builders import LIMITS, train
from store_model import DECLARED, OPEN, Model, ModelJob

from service.jobs.files import DataLayout
from service.jobs.records import AttemptRef, JobError, PartOutcome, Rejected, Superseded
from service.jobs.store import HostReport, Store
from service.jobs.store.keyspace import CLOCK, HOSTS, LEASES


class StoreWorld(RuleBasedStateMachine):
    """``processes`` are the groups that really run, current or not: what must never share a device."""

    def __init__(self, url: str, redis: redis_py.Redis, data: DataLayout) -> None:
        super().__init__()
        redis.flushall()
        self.redis = redis
        self.store = Store.connect(url, data, LIMITS)
        self.model = Model(LIMITS.max_lost_attempts)
        self.processes: dict[AttemptRef, tuple[str, tuple[int, ...]]] = {}
        self.known: list[AttemptRef] = []
        """Every part that was ever dispatched; messages may arrive late and twice."""
        self.ordered_dead: set[AttemptRef] = set()
        """To be killed; they take until their host's next beat to die."""
        self.draining: set[str] = set()
        self.waited = False
        self.supervisors = 0

    def _submit(
        self, ranks: int, max_hosts: int, device: str, retries: int, after: Sequence[str] = (), **rest: Any
    ) -> None:
        """Only jobs that the whole fleet can hold: at the end all of them must have ended."""
        fits_one = ranks <= 4
        spec = train(
            ranks,
            device=device if fits_one else "cpu",
            max_hosts=max_hosts if fits_one else 3,
            retries=retries,
            after=list(after),
            **rest,
        )
        try:
            job, created = self.store.jobs.submit(spec, "ada")
        except Rejected as refusal:
            refused = {problem.path for problem in refusal.problems}
        else:
            refused = set()
            assert created
            self.model.jobs[job.id] = ModelJob(
                job.id, retries, tuple(after), priority=job.priority, preemptible=job.spec["preemptible"]
            )
        assert refused <= {"device", "parallel"}

    def _claim(self, ref: AttemptRef) -> None:
        self.supervisors += 1
        name = f"supervisor {self.supervisors}"
        if not self.model.is_part(ref.job_id, ref.attempt, ref.host, "starting"):
            with pytest.raises(Superseded):
                self.store.attempts.claim(ref, name)
            return
        claim = self.store.attempts.claim(ref, name)
        assert self.store.attempts.claim(ref, name) == claim
        self.model.claim(self.model.jobs[ref.job_id], ref.host)
        self.processes[ref] = (claim.share.pool, claim.share.devices)

    def _renew(self, ref: AttemptRef) -> None:
        answer = self.store.attempts.renew(ref)
        if not self._may_write(ref):
            assert answer == "lost"
            self.processes.pop(ref, None)
            return
        job = self.model.jobs[ref.job_id]
        assert job.attempt is not None
        assert answer == ("stop" if job.state == "cancelling" or job.attempt.fault else "run")
        job.attempt.told_to_stop |= job.state == "cancelling"

    def _finish(self, ref: AttemptRef, status: Any) -> None:
        outcome = PartOutcome(status, error=JobError(type="E", message="m") if status == "failed" else None)
        if not self._may_write(ref):
            with pytest.raises(Superseded):
                self.store.attempts.finish(ref, outcome)
            return
        self.processes.pop(ref, None)
        self.store.attempts.finish(ref, outcome)
        self.model.end_part(self.model.jobs[ref.job_id], ref.host, status)

    def _may_write(self, ref: AttemptRef) -> bool:
        return self.model.may_write(ref.job_id, ref.attempt, ref.host)

    def _end_lease(self, name: bytes) -> None:
        self.redis.zadd(LEASES(), {name: 1}, xx=True)
        self._reap()

    def _reap(self) -> None:
        """Ended leases first, oldest first, then what silent hosts did not claim."""
        ended = self.redis.zrange(LEASES(), 0, self._now_ms(), byscore=True)
        silent = [name.decode() for name in self.redis.zrange(HOSTS(), 0, self._now_ms(), byscore=True)]
        touched = self.store.attempts.reap()
        parts = [tuple(name.decode().split(":")) for name in ended]
        expected = [job_id for job_id, number, host in parts if self._give_up(job_id, int(number), host, OPEN)]
        for host in silent:
            for job in list(self.model.jobs.values()):
                if self._give_up(job.id, job.number, host, frozenset({"starting"})):
                    expected.append(job.id)
        assert sorted(touched) == sorted(expected)

    def _give_up(self, job_id: str, number: int, host: str, open_statuses: frozenset[str]) -> bool:
        for status in open_statuses:
            if self.model.is_part(job_id, number, host, status):
                if status == "running":
                    self.model.orphans.add((job_id, number, host))
                self.model.end_part(self.model.jobs[job_id], host, "lost" if status == "running" else "unclaimed")
                return True
        return False

    def _beat(self, host: str, slots: int | None = None) -> None:
        for ref in [ref for ref in self.ordered_dead if ref.host == host]:
            self.processes.pop(ref, None)
            self.ordered_dead.discard(ref)
        cuda, cpu = DECLARED[host]
        live = {ref for ref in self.processes if ref.host == host}
        names = tuple(sorted(f"{ref.job_id}:{ref.attempt}" for ref in live))
        report = HostReport(host, host, ("GPU",) * cuda, slots if host == "b" and slots else cpu, live=names)
        reply = self.store.hosts.beat(report)
        current = {ref for ref in live if self.model.is_part(ref.job_id, ref.attempt, host, "running")}
        spared = {ref for ref in live if self.model.is_spared(ref.job_id, ref.attempt, host)}
        assert live - current - spared <= set(reply.kill) <= live - current
        assert self.waited or not spared & set(reply.kill)
        named = {(ref.job_id, ref.attempt) for ref in live}
        self.model.orphans = {part for part in self.model.orphans if part[2] != host or part[:2] in named}
        assert reply.drain == (host in self.draining)
        self.ordered_dead.update(reply.kill)

    def _silence(self, host: str) -> None:
        """A minute ago: long enough to be dead, not to be forgotten."""
        self.redis.zadd(HOSTS(), {host: self._now_ms() - 60_000}, xx=True)
        self._reap()

    def _now_ms(self) -> int:
        """By the store's own clock; nothing in these tests ends within the next second."""
        return int(self.redis.hget(CLOCK(), "now")) + 1000

    def _draw_job(self, pick: st.DataObject, fitting: list[ModelJob]) -> ModelJob:
        """Mostly one for which the call makes sense."""
        some = fitting if fitting and pick.draw(st.integers(0, 3)) else list(self.model.jobs.values())
        return some[pick.draw(st.integers(0, len(some) - 1))]

    def _draw_ref(self, pick: st.DataObject) -> AttemptRef:
        """Mostly one whose process lives."""
        living = sorted(self.processes, key=str)
        some = living if living and pick.draw(st.integers(0, 3)) else self.known
        return some[pick.draw(st.integers(0, len(some) - 1))]
