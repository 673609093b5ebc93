"""A model of the store's promises: what must become of a job, told independently of the scripts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from hypothesis import strategies as st

from service.jobs.spec.common import TERMINAL, JobState

OPEN = frozenset({"starting", "running"})
DECLARED = {"a": (0, 4), "b": (0, 2), "c": (4, 1)}
"""CUDA devices and CPU slots by host."""
hosts = st.sampled_from(sorted(DECLARED))
specs = st.fixed_dictionaries(
    {
        "ranks": st.integers(1, 6),
        "priority": st.integers(-1, 1),
        "retries": st.integers(0, 1),
        "max_hosts": st.integers(1, 3),
        "device": st.sampled_from(["auto", "cpu", "cuda"]),
        "preemptible": st.booleans(),
    }
)
statuses = st.sampled_from(["succeeded", "failed", "stopped", "interrupted", "lost"])


@dataclass
class Attempt:
    """One attempt: the status of each host's part, its first fault, and whether any part was told to stop."""

    number: int
    parts: dict[str, str]
    fault: str | None = None
    told_to_stop: bool = False


@dataclass
class ModelJob:
    id: str
    retries: int
    needs: tuple[str, ...]
    priority: int = 0
    preemptible: bool = False
    state: JobState = "queued"
    number: int = 0
    attempt: Attempt | None = None
    last_number: int = 0
    retries_used: int = 0
    lost_attempts: int = 0
    lost: Attempt | None = None
    """The last attempt, if it was given up for lost and may still go on."""


@dataclass
class Model:
    max_lost_attempts: int
    jobs: dict[str, ModelJob] = field(default_factory=dict)
    orphans: set[tuple[str, int, str]] = field(default_factory=set)
    """Lost parts (job, attempt, host) that their hosts have not confirmed to be gone."""

    def in_state(self, *states: str) -> list[ModelJob]:
        return [job for job in self.jobs.values() if job.state in states]

    def is_pending(self, job: ModelJob) -> bool:
        return job.state == "queued" and all(self.jobs[needed].state == "succeeded" for needed in job.needs)

    def users(self, job: ModelJob) -> Iterator[ModelJob]:
        """Unfinished jobs that need this one."""
        yield from (user for user in self.jobs.values() if job.id in user.needs and user.state not in TERMINAL)

    def is_part(self, job_id: str, number: int, host: str, status: str) -> bool:
        job = self.jobs.get(job_id)
        attempt = job.attempt if job else None
        return attempt is not None and attempt.number == number and attempt.parts.get(host) == status

    def place(self, job: ModelJob, hosts: list[str]) -> None:
        job.last_number += 1
        job.number = job.last_number
        job.state = "starting"
        job.attempt = Attempt(job.number, dict.fromkeys(hosts, "starting"))

    def claim(self, job: ModelJob, host: str) -> None:
        assert job.attempt is not None
        job.lost = None
        job.attempt.parts[host] = "running"
        if job.state == "starting" and "starting" not in job.attempt.parts.values():
            job.state = "running"

    def cancel(self, job: ModelJob) -> None:
        if job.state == "queued":
            self._end(job, "cancelled")
        elif job.state in ("starting", "running"):
            job.state = "cancelling"
            self._settle(job)

    def preempt(self, job: ModelJob) -> None:
        assert job.attempt is not None
        job.attempt.fault = "preempted"

    def retry(self, job: ModelJob) -> None:
        job.state, job.retries_used, job.lost_attempts = "queued", 0, 0

    def may_write(self, job_id: str, number: int, host: str) -> bool:
        """Whether a part is its supervisor's; one that was lost may come back, and then its attempt goes on."""
        if self.is_part(job_id, number, host, "running"):
            return True
        job = self.jobs.get(job_id)
        lost = job.lost if job else None
        if job is None or lost is None or lost.number != number or lost.parts.get(host) != "lost":
            return False
        gone = [name for name, at in lost.parts.items() if at == "lost"]
        if not all((job_id, number, name) in self.orphans for name in gone):
            return False
        self.orphans -= {(job_id, number, name) for name in gone}
        parts = {name: "running" if at == "lost" else at for name, at in lost.parts.items()}
        job.number, job.state, job.attempt, job.lost = number, "running", Attempt(number, parts), None
        job.lost_attempts -= 1
        return True

    def is_spared(self, job_id: str, number: int, host: str) -> bool:
        """Whether a lost part's processes are left alone for the moment, since it may come back."""
        job = self.jobs.get(job_id)
        waited_for = job is not None and job.lost is not None and job.lost.number == number
        return waited_for and (job_id, number, host) in self.orphans

    def end_part(self, job: ModelJob, host: str, status: str) -> None:
        """A part ended as ``succeeded``, ``failed``, ``stopped``, ``interrupted``, ``lost`` or ``unclaimed``."""
        assert job.attempt is not None
        job.attempt.parts[host] = status
        if status != "succeeded" and job.attempt.fault is None:
            job.attempt.fault = status
        self._settle(job)

    def _settle(self, job: ModelJob) -> None:
        attempt = job.attempt
        assert attempt is not None
        if job.state == "cancelling" or attempt.fault:
            attempt.parts = {host: "withdrawn" if at == "starting" else at for host, at in attempt.parts.items()}
        if OPEN & set(attempt.parts.values()):
            return
        all_succeeded = set(attempt.parts.values()) == {"succeeded"}
        job.attempt = None
        if job.state == "cancelling":
            self._end(job, "succeeded" if all_succeeded and not attempt.told_to_stop else "cancelled")
        elif attempt.fault is None or (attempt.fault == "preempted" and all_succeeded):
            self._end(job, "succeeded")
        elif attempt.fault in ("interrupted", "preempted"):
            job.state = "queued"
        elif attempt.fault in ("lost", "unclaimed"):
            job.lost_attempts += 1
            if job.lost_attempts > self.max_lost_attempts:
                self._end(job, "failed")
                return
            job.state = "queued"
            if set(attempt.parts.values()) <= {"lost", "succeeded"}:
                job.lost = attempt
        elif job.retries_used < job.retries:
            job.retries_used += 1
            job.state = "queued"
        else:
            self._end(job, "failed")

    def _end(self, job: ModelJob, state: JobState) -> None:
        job.state, job.lost = state, None
        if state != "succeeded":
            for user in list(self.users(job)):
                if user.state == "queued":
                    self._end(user, "failed")
