"""Handles jobs as users do: submits, shows, lists, cancels, retries and deletes them."""

from __future__ import annotations

import hashlib
import itertools
import re
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass

import orjson

from service.jobs.layout import DataLayout
from service.jobs.records import Conflict, Job, JobPage, NotFound, Problem, Rejected
from service.jobs.spec.base import CommonSpec
from service.jobs.states import TERMINAL
from service.jobs.store import decode, stubs
from service.jobs.store.client import BrokerClient
from service.jobs.store.hosts import HostStore
from service.jobs.store.keyspace import IDEMPOTENCY, JOB, JOBS_BY
from service.jobs.store_limits import StoreLimits
from service.jobs.submission.request import CheckRequest

_ID = re.compile(r"job_[0-9a-z]{20}")
_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz"
_RANDOM_CHARACTERS = 11
_CHUNK = 200


@dataclass(frozen=True)
class JobFilter:
    """Filters a listing; ``label`` is ``key`` or ``key=value``, ``q`` part of an id, a name or a label."""

    kind: str | None = None
    state: str | None = None
    label: str | None = None
    owner: str | None = None
    q: str | None = None

    @property
    def indexes(self) -> list[str]:
        named = (("kind", self.kind), ("state", self.state), ("label", self.label), ("owner", self.owner))
        return [f"{name}:{value}" for name, value in named if value is not None]


@dataclass(frozen=True)
class _Submission:
    """A spec that its owner submits; ``idem`` is the digest of the idempotency key, empty without one."""

    spec: CommonSpec
    owner: str
    text: str
    idem: str
    body_hash: str


@dataclass(frozen=True)
class Jobs:
    """Keeps the jobs of the service. Every change is one atomic script."""

    client: BrokerClient
    limits: StoreLimits
    data: DataLayout
    hosts: HostStore

    def submit(
        self, spec: CommonSpec, owner: str, idempotency_key: str | None = None, body_hash: str | None = None
    ) -> tuple[Job, bool]:
        """Accept a job that is checked in this process, see :meth:`submission` and :meth:`accept`.

        Raises :class:`Rejected` with every reason why the job could never run.
        """
        submission = self.submission(spec, owner, idempotency_key, body_hash)
        if (known := self.known(submission)) is not None:
            return known, False
        if problems := self.check_request(spec).problems():
            raise Rejected(problems)
        return self.accept(submission)

    def submission(
        self, spec: CommonSpec, owner: str, idempotency_key: str | None = None, body_hash: str | None = None
    ) -> _Submission:
        """Return what is to be accepted, with the spec's own hash where ``body_hash`` is absent.

        The same key of the same owner stands for one job as long as the key is remembered.
        """
        text = spec.model_dump_json(by_alias=True)
        idem = "" if idempotency_key is None else _digest(owner, idempotency_key)
        return _Submission(spec, owner, text, idem, body_hash or hashlib.sha256(text.encode()).hexdigest())

    def known(self, submission: _Submission) -> Job | None:
        """Return the job that the idempotency key led to before; answered ahead of all checks, whose outcome may have
        changed.

        Raises :class:`Conflict` where it was used with another spec.
        """
        text = self.client.call("GET", IDEMPOTENCY(submission.idem)) if submission.idem else None
        if text is None:
            return None
        entry = orjson.loads(text)
        known = self._lookup(entry["job"])
        if known is not None and entry["body_hash"] != submission.body_hash:
            raise _other_body(known.id)
        return known

    def check_request(self, spec: CommonSpec) -> CheckRequest:
        """Return the spec with the fleet and the jobs that its check asks for."""
        return CheckRequest.of(spec, self.hosts.capacity(), self._lookup, self.data)

    def accept(self, submission: _Submission) -> tuple[Job, bool]:
        """Accept a job that was checked; once this returns, the job survives any crash, and a loss of power where the
        broker syncs each write (:meth:`Store.survives_power_loss`). The flag says whether it is new: of two submissions
        under one idempotency key the second gives the first one's job.

        Raises :class:`Conflict` where the key was used with another spec, and :class:`Rejected` where a job that it
        needs has ended badly since it was checked.
        """
        spec, owner = submission.spec, submission.owner
        suffix = "".join(secrets.choice(_ALPHABET) for _ in range(_RANDOM_CHARACTERS))
        outcome, job_id, *state = stubs.submit(
            self.client,
            limits=self.limits.script_argument,
            idem=submission.idem,
            body_hash=submission.body_hash,
            suffix=suffix,
            record=_record(spec, owner, submission.text),
            indexes=_json(_indexes(spec, owner)),
            after=_json(_needed(spec)),
        )
        if outcome == "conflict":
            raise _other_body(job_id)
        if outcome == "dependency":
            raise Rejected([_dependency_problem(spec, job_id, state[0])])
        return self.get(job_id), outcome == "created"

    def get(self, job_id: str) -> Job:
        """Return a job. Raises :class:`NotFound`."""
        if _ID.fullmatch(job_id) is None:
            raise NotFound(f"there is no job {job_id}")
        return decode.job(stubs.get(self.client, job_id))

    def list(
        self, filters: JobFilter = JobFilter(), limit: int = 50, cursor: str | None = None, *, specs: bool = False
    ) -> JobPage:
        """List jobs, newest first, with ``specs`` only where they are asked for.

        A page may hold fewer than ``limit`` jobs and still have a next one, as where their records are long.
        """
        if cursor is not None and _ID.fullmatch(cursor) is None:
            raise Rejected([Problem("cursor", "not a cursor of this list", cursor, "the next_cursor of a page")])
        if limit < 1:
            raise Rejected([Problem("limit", "a page holds at least one job", limit, "1 or more")])
        text = (filters.q or "").lower()
        next_cursor, views, room = cursor or "", list[list[str]](), self.limits.list_page_bytes
        for _ in range(self.limits.list_most // self.limits.list_scan):
            next_cursor, *found = stubs.list_jobs(
                self.client,
                indexes=_json(filters.indexes),
                text=text,
                cursor=next_cursor,
                limit=limit - len(views),
                scan=self.limits.list_scan,
                without="" if specs else "spec",
                page_bytes=room,
            )
            views += found
            room -= sum(len(value) for view in found for value in view)
            if not next_cursor or len(views) == limit or room <= 0:
                break
        return JobPage(items=tuple(decode.listed_job(view) for view in views), next_cursor=next_cursor or None)

    def cancel(self, job_id: str) -> Job:
        """Cancel a job: a queued one is ``cancelled`` at once; an active one is ``cancelling`` until its parts have
        ended.

        It ends as ``succeeded`` only when all its parts had succeeded before any of them was told to stop; otherwise
        as ``cancelled``, whatever its parts report. Cancelling twice is no error.
        Raises :class:`NotFound`, and :class:`Conflict` for a job that has succeeded or failed.
        """
        return decode.job(stubs.cancel(self.client, self.limits.script_argument, job_id))

    def retry(self, job_id: str) -> Job:
        """Queue a failed or cancelled job again with all its retries; :class:`Conflict` in any other state,
        or when a job that it needs failed or is gone."""
        return decode.job(stubs.retry(self.client, self.limits.script_argument, job_id))

    def delete(self, job_id: str) -> None:
        """Forget a terminal job, with its files; :class:`Conflict` while it is not terminal, or still needed."""
        stubs.delete(self.client, job_id)
        shutil.rmtree(self.data.job(job_id).root, ignore_errors=True)

    def expire(self, age_s: float, most: int = 100) -> tuple[str, ...]:
        """Delete jobs that ended longer than ``age_s`` seconds ago, those submitted first, with their files.

        At most ``most`` of each terminal state are deleted. What an unfinished job still needs stays, and hides nothing
        that was submitted after it.
        """
        gone: list[str] = []
        for state in sorted(TERMINAL):
            expired = self._ended_before(f"state:{state}", age_s)
            gone += itertools.islice(filter(self._try_to_delete, expired), most)
        return tuple(gone)

    def _ended_before(self, index: str, age_s: float) -> Iterator[str]:
        seconds, _ = self.client.call("TIME")
        after = "-"
        while ids := self.client.call("ZRANGE", JOBS_BY(index), after, "+", "BYLEX", "LIMIT", 0, _CHUNK):
            for job_id in ids:
                ended = self.client.call("HGET", JOB(job_id), "ended_at")
                if ended is not None and int(seconds) - float(ended) / 1000 > age_s:
                    yield str(job_id)
            after = f"({ids[-1]}"

    def _try_to_delete(self, job_id: str) -> bool:
        try:
            self.delete(job_id)
        except (Conflict, NotFound):
            return False
        return True

    def _lookup(self, job_id: str) -> Job | None:
        try:
            return self.get(job_id)
        except NotFound:
            return None


def _json(value: object) -> str:
    return orjson.dumps(value).decode()


def _digest(owner: str, key: str) -> str:
    return hashlib.sha256(_json([owner, key]).encode()).hexdigest()


def _indexes(spec: CommonSpec, owner: str) -> list[str]:
    labels = [index for key, value in spec.labels.items() for index in (f"label:{key}", f"label:{key}={value}")]
    return [f"kind:{spec.kind}", f"owner:{owner}", *labels]


def _needed(spec: CommonSpec) -> list[str]:
    return list(dict.fromkeys(dependency.job_id for dependency in spec.dependencies()))


def _record(spec: CommonSpec, owner: str, text: str) -> str:
    """Return the fields of the job's hash that submission knows, all of them strings."""
    ranks = spec.parallel.world_size
    return _json(
        {
            "kind": spec.kind,
            "name": spec.name or spec.kind,
            "labels": _json(spec.labels),
            "owner": owner,
            "priority": str(spec.priority),
            "retries": str(spec.retries),
            "parallel": spec.parallel.model_dump_json(),
            "shape": f"{spec.device}:{ranks}:{min(spec.max_hosts, ranks)}",
            "after": _json(_needed(spec)),
            "indexes": _json(_indexes(spec, owner)),
            "spec": text,
        }
    )


def _other_body(job_id: str) -> Conflict:
    return Conflict(f"this idempotency key was used for job {job_id} with another body; use a new key for a new job")


def _dependency_problem(spec: CommonSpec, job_id: str, state: str) -> Problem:
    """Describe a dependency that was fine when checked and no longer is when the job was to be written."""
    path = next(needed.path for needed in spec.dependencies() if needed.job_id == job_id)
    said = f"there is no job {job_id}" if state == "missing" else f"job {job_id} is {state}"
    return Problem(path, said, job_id, "a job that has succeeded or still can")
