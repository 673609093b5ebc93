"""A model of the store's promises: what must become of a job, told independently of the scripts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from service.jobs.states import TERMINAL, JobState

OPEN = frozenset({"starting", "running"})


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
    state: JobState = "queued"
    number: int = 0
    attempt: Attempt | None = None
    retries_used: int = 0
    unclaimed: int = 0


@dataclass
class Model:
    max_unclaimed: int
    jobs: dict[str, ModelJob] = field(default_factory=dict)

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
        job.number += 1
        job.state = "starting"
        job.attempt = Attempt(job.number, dict.fromkeys(hosts, "starting"))

    def claim(self, job: ModelJob, host: str) -> None:
        assert job.attempt is not None
        job.attempt.parts[host] = "running"
        if job.state == "starting" and "starting" not in job.attempt.parts.values():
            job.state = "running"

    def cancel(self, job: ModelJob) -> None:
        if job.state == "queued":
            self._end(job, "cancelled")
        elif job.state in ("starting", "running"):
            job.state = "cancelling"
            self._settle(job)

    def retry(self, job: ModelJob) -> None:
        job.state, job.retries_used, job.unclaimed = "queued", 0, 0

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
        elif attempt.fault is None:
            self._end(job, "succeeded")
        elif attempt.fault == "interrupted":
            job.state = "queued"
        elif attempt.fault == "unclaimed" and job.unclaimed < self.max_unclaimed:
            job.unclaimed += 1
            job.state = "queued"
        elif job.retries_used < job.retries:
            job.retries_used += 1
            job.state = "queued"
        else:
            self._end(job, "failed")

    def _end(self, job: ModelJob, state: JobState) -> None:
        job.state = state
        if state != "succeeded":
            for user in list(self.users(job)):
                if user.state == "queued":
                    self._end(user, "failed")
