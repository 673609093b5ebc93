"""The store's promises under any order of calls, against a real server.

The machine is the world outside: hosts with processes on their devices, supervisors that hang, die or come late, and
time (a lease or heartbeat is ended by rewriting its score). A model says what must become of each job; after every
step the server's keys must agree with it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest
import redis as redis_py
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from store_builders import LIMITS, train
from store_invariants import Snapshot, check_devices, check_jobs, check_parts, check_queue, check_uses
from store_model import DECLARED, OPEN, Model, ModelJob, hosts, specs, statuses

from service.jobs.layout import DataLayout
from service.jobs.records import AttemptRef, Conflict, JobError, NotFound, PartOutcome, Rejected, Superseded
from service.jobs.states import TERMINAL
from service.jobs.store import HostReport, Store, parse_ref, stubs
from service.jobs.store.keyspace import CLOCK, HOSTS, LEASES, MADE_ROOM, OUTBOX


class StoreMachine(RuleBasedStateMachine):
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

    @initialize(wanted=st.lists(specs, min_size=1, max_size=3))
    def begin(self, wanted: list[dict[str, Any]]) -> None:
        for host in DECLARED:
            self._beat(host)
        for each in wanted:
            self._submit(**each)

    # ---- users

    @rule(wanted=specs, pick=st.data())
    @precondition(lambda self: len(self.model.jobs) < 8)
    def submit(self, wanted: dict[str, Any], pick: st.DataObject) -> None:
        usable = [job.id for job in self.model.jobs.values() if job.state not in ("failed", "cancelled")]
        needs = pick.draw(st.lists(st.sampled_from(usable), unique=True, max_size=2)) if usable else []
        self._submit(**wanted, after=needs)

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

    @rule(pick=st.data())
    @precondition(lambda self: self.model.jobs)
    def cancel(self, pick: st.DataObject) -> None:
        job = self._draw_job(pick, self.model.in_state("queued", "starting", "running", "cancelling"))
        if job.state in ("succeeded", "failed"):
            with pytest.raises(Conflict):
                self.store.jobs.cancel(job.id)
        else:
            self.store.jobs.cancel(job.id)
            self.model.cancel(job)

    @rule(pick=st.data())
    @precondition(lambda self: self.model.in_state("failed", "cancelled"))
    def retry(self, pick: st.DataObject) -> None:
        job = pick.draw(st.sampled_from(self.model.in_state("failed", "cancelled")))
        needed = [self.model.jobs[name].state if name in self.model.jobs else "gone" for name in job.needs]
        if {"failed", "cancelled", "gone"} & set(needed):
            with pytest.raises(Conflict):
                self.store.jobs.retry(job.id)
        else:
            self.store.jobs.retry(job.id)
            self.model.retry(job)

    @rule(pick=st.data())
    @precondition(lambda self: self.model.jobs)
    def delete(self, pick: st.DataObject) -> None:
        job = self._draw_job(pick, self.model.in_state(*TERMINAL))
        if job.state not in TERMINAL or any(self.model.users(job)):
            with pytest.raises(Conflict):
                self.store.jobs.delete(job.id)
            return
        self.store.jobs.delete(job.id)
        del self.model.jobs[job.id]
        with pytest.raises(NotFound):
            self.store.jobs.get(job.id)

    # ---- placement and dispatch

    @rule()
    @precondition(lambda self: self.model.in_state("queued"))
    def place(self) -> None:
        pending = {job.id for job in self.model.jobs.values() if self.model.is_pending(job)}
        alive = {host.name: host for host in self.store.hosts.list() if host.alive and not host.draining}
        placed = self.store.attempts.place()
        assert len(set(placed)) == len(placed)
        assert set(placed) <= pending
        for job_id in placed:
            job = self.store.jobs.get(job_id)
            assert sum(len(share.devices) for share in job.placement) == job.spec["parallel"]["dp_shard"]
            assert len(job.placement) <= job.spec["max_hosts"]
            assert all(set(share.devices) <= set(alive[share.host].free[share.pool]) for share in job.placement)
            self.model.place(self.model.jobs[job_id], [share.host for share in job.placement])

    @rule(pick=st.data())
    @precondition(lambda self: self.model.in_state("running") and self.model.in_state("queued"))
    def preempt(self, pick: st.DataObject) -> None:
        victim = pick.draw(st.sampled_from(self.model.in_state("running")))
        job = pick.draw(st.sampled_from(self.model.in_state("queued")))
        assert victim.attempt is not None
        is_able = victim.preemptible and not victim.attempt.fault
        expected = is_able and self.model.is_pending(job) and job.priority > victim.priority
        self.redis.delete(MADE_ROOM("cpu"))
        words = orjson.dumps([{"id": victim.id, "attempt": victim.number}]).decode()
        limits = self.store.attempts.limits.script_argument
        assert stubs.preempt(self.store.client, limits, job.id, "cpu", words) == expected
        if expected:
            self.model.preempt(victim)

    @rule(again=st.booleans())
    @precondition(lambda self: self.model.in_state("starting"))
    def dispatch(self, again: bool) -> None:
        """``again``: five seconds later, when unclaimed parts are due once more."""
        if again:
            for name in self.redis.zrange(OUTBOX(), 0, -1):
                self.redis.zadd(OUTBOX(), {name: 1}, xx=True)
        self.known += self.store.attempts.due()
        assert self.store.attempts.due() == []

    @rule(pick=st.data())
    @precondition(lambda self: self.known)
    def claim(self, pick: st.DataObject) -> None:
        self._claim(pick.draw(st.sampled_from(self.known)))

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

    @rule()
    @precondition(lambda self: self.model.in_state("queued", "starting"))
    def start_all(self) -> None:
        """The good path in one step, so that a run of steps gets far."""
        self.place()
        self.dispatch(True)
        for ref in list(dict.fromkeys(self.known)):
            self._claim(ref)

    # ---- supervisors, current or not

    @rule(pick=st.data())
    @precondition(lambda self: self.known)
    def renew(self, pick: st.DataObject) -> None:
        self._renew(self._draw_ref(pick))

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

    @rule(pick=st.data())
    @precondition(lambda self: self.known)
    def emit(self, pick: st.DataObject) -> None:
        ref = self._draw_ref(pick)
        event: Any = {"type": "log", "time": 0.0, "rank": 0, "stream": "stdout", "line": str(ref)}
        before = self.store.events.latest_id(ref.job_id)
        if self._may_write(ref):
            self.store.attempts.emit(ref, [event])
            assert self.store.events.tail(ref.job_id, None, 1)[0].event == event
        else:
            with pytest.raises(Superseded):
                self.store.attempts.emit(ref, [event])
            assert self.store.events.latest_id(ref.job_id) == before

    @rule(pick=st.data(), status=statuses)
    @precondition(lambda self: self.known)
    def finish(self, pick: st.DataObject, status: Any) -> None:
        self._finish(self._draw_ref(pick), status)

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

    # ---- time and failure

    @rule()
    def wait(self) -> None:
        """Longer than a lost supervisor is waited for, shorter than a lease."""
        self.redis.hincrby(CLOCK(), "now", 1_300_000)
        self.waited = True

    @rule(pick=st.data())
    @precondition(lambda self: self.redis.exists(LEASES()))
    def lose_lease(self, pick: st.DataObject) -> None:
        names = sorted(self.redis.zrange(LEASES(), 0, -1))
        self._end_lease(names[pick.draw(st.integers(0, len(names) - 1))])

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

    @rule(host=hosts, slots=st.sampled_from([None, 1, 3]))
    def beat(self, host: str, slots: int | None) -> None:
        """Also a restarted agent, one with other devices, and one whose host was given up on."""
        self._beat(host, slots)

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

    @rule(host=hosts, crash=st.booleans())
    def fall_silent(self, host: str, crash: bool) -> None:
        """A crash ends the processes too; a network cut, or a dead agent, does not."""
        if crash:
            self.processes = {ref: held for ref, held in self.processes.items() if ref.host != host}
        self._silence(host)

    def _silence(self, host: str) -> None:
        """A minute ago: long enough to be dead, not to be forgotten."""
        self.redis.zadd(HOSTS(), {host: self._now_ms() - 60_000}, xx=True)
        self._reap()

    def _now_ms(self) -> int:
        """By the store's own clock; nothing in these tests ends within the next second."""
        return int(self.redis.hget(CLOCK(), "now")) + 1000

    @rule(host=hosts)
    def leave(self, host: str) -> None:
        known = {each.name: each for each in self.store.hosts.list()}
        if host not in known:
            with pytest.raises(NotFound):
                self.store.hosts.leave(host)
            return
        self.store.hosts.leave(host)
        if known[host].running or known[host].draining:
            self._silence(host)

    @rule(host=hosts, draining=st.booleans())
    def drain(self, host: str, draining: bool) -> None:
        change: Callable[[str], Any] = self.store.hosts.drain if draining else self.store.hosts.resume
        if host not in {each.name for each in self.store.hosts.list()}:
            with pytest.raises(NotFound):
                change(host)
            return
        assert change(host).draining == draining
        (self.draining.add if draining else self.draining.discard)(host)

    # ---- promises

    @invariant()
    def promises_hold(self) -> None:
        now = Snapshot(self.redis)
        check_devices(now, self.processes)
        check_uses(now)
        check_jobs(now, self.model)
        check_queue(now, self.model)
        check_parts(now, self.model)
        assert now.strays() == []

    def teardown(self) -> None:
        """Once the world behaves, every job ends and everything is free again."""
        try:
            for _ in range(60):
                if all(job.state in TERMINAL for job in self.model.jobs.values()):
                    break
                self._good_round()
            assert [job for job in self.model.jobs.values() if job.state not in TERMINAL] == []
            self._good_round()  # the first beats order what is left to be killed, the second confirm that it is gone
            self._good_round()
            assert all(not host.running for host in self.store.hosts.list())
        finally:
            self.store.close()

    def _good_round(self) -> None:
        for host in DECLARED:
            self._beat(host)
            self.drain(host, False)  # which also clears what is held against the host
        self.place()
        self.dispatch(True)
        for ref in list(dict.fromkeys(self.known)):
            self._claim(ref)
        for ref in list(self.processes):
            self._renew(ref)  # so that one whose lease was lost ends, and its devices are free at its host's next beat
        for ref in list(self.processes):
            self._finish(ref, "succeeded")
        for name in sorted(self.redis.zrange(LEASES(), 0, -1)):
            if parse_ref(name.decode()) not in self.processes:
                self._end_lease(name)
        self.promises_hold()

    def _draw_job(self, pick: st.DataObject, fitting: list[ModelJob]) -> ModelJob:
        """Mostly one for which the call makes sense."""
        some = fitting if fitting and pick.draw(st.integers(0, 3)) else list(self.model.jobs.values())
        return some[pick.draw(st.integers(0, len(some) - 1))]

    def _draw_ref(self, pick: st.DataObject) -> AttemptRef:
        """Mostly one whose process lives."""
        living = sorted(self.processes, key=str)
        some = living if living and pick.draw(st.integers(0, 3)) else self.known
        return some[pick.draw(st.integers(0, len(some) - 1))]


@pytest.mark.parametrize("examples", [5, pytest.param(60, marks=pytest.mark.slow)])
def test_promises_hold_under_any_order_of_calls(broker: str, redis: redis_py.Redis, examples: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_state_machine_as_test(  # type: ignore[no-untyped-call]
            lambda: StoreMachine(broker, redis, DataLayout(Path(folder))),
            settings=settings(
                max_examples=examples,
                stateful_step_count=50,
                deadline=None,
                suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
            ),
        )
