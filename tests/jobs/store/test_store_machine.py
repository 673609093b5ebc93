"""The store's promises under any order of calls, against a real server.

The machine is the world outside: hosts with processes on their devices, supervisors that hang, die or come late, and
time (a lease or heartbeat is ended by rewriting its score). A model says what must become of each job; after every
step the server's keys must agree with it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
import redis as redis_py
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from store_invariants import Snapshot, check_devices, check_jobs, check_parts, check_queue, check_uses
from store_model import DECLARED, hosts, specs, statuses
from store_world import StoreWorld

from service.jobs.files import DataLayout
from service.jobs.records import Conflict, NotFound, Superseded
from service.jobs.spec.common import TERMINAL
from service.jobs.store import parse_ref, stubs
from service.jobs.store.keyspace import CLOCK, LEASES, MADE_ROOM, OUTBOX


class StoreMachine(StoreWorld):
    """The rules by which the world outside acts, and what holds after each step."""

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

    @rule(host=hosts, slots=st.sampled_from([None, 1, 3]))
    def beat(self, host: str, slots: int | None) -> None:
        """Also a restarted agent, one with other devices, and one whose host was given up on."""
        self._beat(host, slots)

    @rule(host=hosts, crash=st.booleans())
    def fall_silent(self, host: str, crash: bool) -> None:
        """A crash ends the processes too; a network cut, or a dead agent, does not."""
        if crash:
            self.processes = {ref: held for ref, held in self.processes.items() if ref.host != host}
        self._silence(host)

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


@pytest.mark.parametrize("examples", [5, pytest.param(40, marks=pytest.mark.slow)])
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
