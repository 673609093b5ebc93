"""Handles jobs as users do: submits, shows, lists, cancels, retries and deletes them."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import orjson

from service.jobs.accounts import DEFAULT_PROJECT, Project
from service.jobs.files import DataLayout, remove_tree
from service.jobs.files.objects import fetch_upload
from service.jobs.kinds.chain import ChainSpec
from service.jobs.records import Accepted, Conflict, Job, JobPage, NotFound, Rejected
from service.jobs.records.store_limits import StoreLimits
from service.jobs.spec.common import JOB_ID, LOCAL, TERMINAL, CommonSpec
from service.jobs.store import decode, stubs
from service.jobs.store.artifacts import ArtifactStore
from service.jobs.store.client import BrokerClient
from service.jobs.store.decode import json_of
from service.jobs.store.hosts import HostStore
from service.jobs.store.keyspace import IDEMPOTENCY, JOB, JOBS_BY, PROJECTS, UPLOADS
from service.jobs.store.late_refusals import LATE_REFUSALS, refuse_over_quota
from service.jobs.store.listing import ALL_JOBS, JobFilter, Listing
from service.jobs.store.submission import Submission, hashed, uploads_of
from service.jobs.submission.request import CheckRequest
from service.jobs.tracing import valid_traceparent

_CHUNK = 200
_ADOPTED_AT_ONCE = 500


def _text_of(spec: CommonSpec) -> str:
    return spec.model_dump_json(by_alias=True)


def _idempotency_digest(project: str, owner: str, key: str) -> str:
    """Return the name under which an idempotency key is kept; the default project keeps the old form without a
    project.
    """
    return hashed(json_of([owner, key] if project == DEFAULT_PROJECT else [project, owner, key]))


@dataclass(frozen=True)
class Jobs:
    """Keeps the jobs of the service. Every change is one atomic script."""

    client: BrokerClient
    limits: StoreLimits
    data: DataLayout
    hosts: HostStore
    artifacts: ArtifactStore

    def submit(
        self, spec: CommonSpec, owner: str, idempotency_key: str | None = None, *, project: str = DEFAULT_PROJECT
    ) -> tuple[Job, bool]:
        """Check a job in this process and accept it, see :meth:`submission` and :meth:`accept`.

        Raises :class:`Rejected` with every reason why the job could never run.
        """
        submission = self.submission(spec, owner, idempotency_key, project=project)
        if (known := self.known(submission)) is not None:
            return known, False
        if problems := self.check_request([submission]).problems():
            raise Rejected(problems)
        return self.accept(submission)

    def submission(
        self, spec: CommonSpec, owner: str, idempotency_key: str | None = None, *, project: str = DEFAULT_PROJECT
    ) -> Submission:
        """Return the submission to accept.

        The same key of the same owner in the same project stands for one job as long as the key is remembered.
        """
        idem = "" if idempotency_key is None else _idempotency_digest(project, owner, idempotency_key)
        limited = self._with_defaults(spec, self._default_time_s(project))
        launcher = spec.launcher or self.limits.launcher
        return Submission("", limited, owner, project, _text_of(limited), idem, hashed(_text_of(spec)), launcher)

    def batch(
        self, specs: Sequence[CommonSpec], owner: str, idempotency_key: str | None = None, *, project: str
    ) -> tuple[Submission, ...]:
        """Return the submissions to accept together; the key of each item follows from that of the batch."""
        body_hash = hashed(*map(_text_of, specs))
        default_time_s = self._default_time_s(project)
        limited = [self._with_defaults(spec, default_time_s) for spec in specs]
        return tuple(
            Submission(
                path=f"jobs.{index}",
                spec=spec,
                owner=owner,
                project=project,
                text=_text_of(spec),
                idem="" if idempotency_key is None else hashed(json_of([project, owner, [idempotency_key, index]])),
                body_hash=body_hash,
                launcher=spec.launcher or self.limits.launcher,
            )
            for index, spec in enumerate(limited)
        )

    def _default_time_s(self, project: str) -> float | None:
        return self._project(project).quotas.default_time_s

    def _project(self, name: str) -> Project:
        text = self.client.call("HGET", PROJECTS(), name)
        return Project(name=name) if text is None else Project.model_validate_json(text)

    def _without_scripts(self, specs: Mapping[str, CommonSpec], projects: Collection[str]) -> list[str]:
        """Return those of ``projects`` that may not run scripts, if one of the specs is one."""
        if not any(spec.brings_code for spec in specs.values()):
            return []
        return [name for name in sorted(projects) if not self._project(name).scripts]

    def _with_defaults(self, spec: CommonSpec, default_time_s: float | None) -> CommonSpec:
        """Return the spec with the project's and the operator's defaults for fields that it leaves open; the jobs of a
        chain get theirs.
        """
        if isinstance(spec, ChainSpec):
            return spec
        changes: dict[str, object] = {"export": spec.export.with_defaults(self.limits.exports)}
        if spec.timeout_s is None:
            changes["timeout_s"] = default_time_s
        return spec.model_copy(update=changes)

    def known(self, submission: Submission) -> Job | None:
        """Return the job to which the idempotency key led before; answered before all checks, whose outcome may have
        changed.

        Raises :class:`Conflict` if it was used with another spec.
        """
        text = self.client.call("GET", IDEMPOTENCY(submission.idem)) if submission.idem else None
        if text is None:
            return None
        entry = orjson.loads(text)
        known = self._lookup(entry["job"])
        if known is not None and entry["body_hash"] != submission.body_hash:
            raise other_body(known.id)
        return known

    def unknown(self, submissions: Sequence[Submission]) -> list[Submission]:
        """Return the submissions of a batch that have no job yet. Raises :class:`Conflict` like :meth:`known`."""
        if not any(submission.idem for submission in submissions):
            return list(submissions)
        texts = self.client.call("MGET", *(IDEMPOTENCY(submission.idem) for submission in submissions))
        return [
            submission
            for submission, text in zip(submissions, texts, strict=True)
            if text is None or self.known(submission) is None
        ]

    def check_request(self, submissions: Iterable[Submission]) -> CheckRequest:
        """Return the specs with the fleet and the jobs that their check needs: of the jobs that they name,
        those that the members of their projects may read.
        """
        submissions = list(submissions)
        specs = {submission.path: submission.spec for submission in submissions}
        return self.check_specs(specs, {submission.project for submission in submissions})

    def check_specs(
        self,
        specs: Mapping[str, CommonSpec],
        projects: Collection[str],
        planned: Mapping[str, Job] = MappingProxyType({}),
    ) -> CheckRequest:
        """Return specs by path with the facts that their check needs, as far as members of all of ``projects`` may
        read them. ``planned`` are jobs by id that are to be submitted with them.
        """

        def lookup(job_id: str) -> Job | None:
            return planned.get(job_id) or self._lookup(job_id)

        def visible(job_id: str) -> Job | None:
            job = lookup(job_id)
            if job_id in planned:
                return job
            return job if job is not None and all(map(job.is_visible_to, projects)) else None

        if self.limits.launcher != LOCAL:
            given = {"launcher": self.limits.launcher}
            specs = {path: spec if spec.launcher else spec.model_copy(update=given) for path, spec in specs.items()}
        return CheckRequest.of(
            specs,
            self.hosts.capacity(),
            visible,
            lookup,
            self.data,
            uploads=self._uploads(specs, projects),
            without_scripts=self._without_scripts(specs, projects),
            left=self.artifacts.left_steps if self.artifacts.objects is not None else None,
        )

    def _uploads(self, specs: Mapping[str, CommonSpec], projects: Collection[str]) -> set[str]:
        """Return those of the files named that all of ``projects`` have uploaded."""
        named = list(dict.fromkeys(file for spec in specs.values() for file in uploads_of(spec)))
        held = [self.client.call("HMGET", UPLOADS(project), *named) for project in projects if named]
        found = {file for index, file in enumerate(named) if all(entries[index] is not None for entries in held)}
        if (objects := self.artifacts.objects) is not None:
            for file in found:
                fetch_upload(objects, self.data, file)
        return found

    def accept(self, submission: Submission) -> tuple[Job, bool]:
        """Accept a job that was checked; once this returns, the job survives any crash, and a loss of power if the
        broker syncs each write (:meth:`Store.survives_power_loss`).

        The flag says whether it is new: of two submissions under one idempotency key the second gives the first one's
        job. Raises :class:`Conflict` if the key was used with another spec, and :class:`Rejected` if a job that it
        needs has ended badly since it was checked.
        """
        ((outcome, job_id, _, *records),) = self._accepted([submission])
        return _recorded(job_id, records[0]), outcome == "created"

    def accept_all(self, submissions: Sequence[Submission]) -> tuple[Accepted, ...]:
        """Accept jobs that were checked, all or none of them, like :meth:`accept`. None is a sweep."""
        outcomes = self._accepted(submissions)
        return tuple(Accepted(id=job_id, created=outcome == "created") for outcome, job_id, *_ in outcomes)

    def _accepted(self, submissions: Sequence[Submission]) -> list[stubs.Outcome]:
        """Return the script's answer for jobs that it accepted."""
        assert not any(submission.spec.stands_for_others for submission in submissions)
        entries = [submission.entry() for submission in submissions]
        outcomes = stubs.submit(self.client, limits=self.limits.script_argument, entries=json_of(entries))
        if known := next((job_id for outcome, job_id, *_ in outcomes if outcome == "conflict"), None):
            raise other_body(known)
        for outcome in outcomes:
            refuse_over_quota(self.client, *outcome[:3])
        problems = [
            LATE_REFUSALS[outcome](submission.spec, submission.path, named, state)
            for submission, (outcome, named, state, *_) in zip(submissions, outcomes, strict=True)
            if outcome in LATE_REFUSALS
        ]
        if problems:
            raise Rejected(problems)
        return outcomes

    def traceparent(self, job_id: str) -> str | None:
        """Return the span of the request that submitted a job, or the one that its client named."""
        return valid_traceparent(self.client.call("HGET", JOB(job_id), "traceparent") or "")

    def get(self, job_id: str) -> Job:
        """Return a job. Raises :class:`NotFound`."""
        if JOB_ID.fullmatch(job_id) is None:
            raise NotFound(f"there is no job {job_id}")
        return _recorded(job_id, stubs.get(self.client, job_id))

    def list(
        self, filters: JobFilter = ALL_JOBS, limit: int = 50, cursor: str | None = None, *, specs: bool = False
    ) -> JobPage:
        """List jobs, newest first, like :meth:`Listing.newest`."""
        return Listing(self.client, self.limits).newest(filters, limit, cursor, specs=specs)

    def visible_among(self, project: str, job_ids: Sequence[str]) -> set[str]:
        """Return the jobs that the members of a project may read, out of these."""
        scores = self.client.call("ZMSCORE", JOBS_BY(f"visible:{project}"), *job_ids) if job_ids else []
        return {job_id for job_id, score in zip(job_ids, scores, strict=True) if score is not None}

    def cancel(self, job_id: str) -> Job:
        """Cancel a job: a queued one is ``cancelled`` at once; an active one is ``cancelling`` until its parts have
        ended.

        It ends as ``succeeded`` only when all its parts had succeeded before any of them was told to stop; otherwise
        as ``cancelled``, whatever its parts report. Cancelling twice is no error.
        Raises :class:`NotFound`, and :class:`Conflict` for a job that has succeeded or failed.
        """
        return decode.job(stubs.cancel(self.client, self.limits.script_argument, job_id))

    def retry(self, job_id: str) -> Job:
        """Queue a failed or cancelled job again with all its retries. Raises :class:`Conflict` in any other
        state, if it would fail alike, and if a job that it needs is gone, or failed without leaving what it needs;
        :class:`OverQuota` if a quota of its project has no room for it. Of a sweep, the jobs that would fail alike
        stay as they are.
        """
        for needed in orjson.loads(self.client.call("HGET", JOB(job_id), "weights") or "[]"):
            state = self.client.call("HGET", JOB(needed), "state")
            if state in TERMINAL - {"succeeded"} and not self.artifacts.steps_of_weights(needed):
                raise Conflict(f"job {needed}, which job {job_id} needs, is {state}, and left no checkpoint")
        return decode.job(stubs.retry(self.client, self.limits.script_argument, job_id))

    def share(self, job_id: str, project: str) -> Job:
        """Let the members of another project read a job and what it produces. Raises :class:`NotFound` for no such job
        or project, and :class:`Conflict` for the job's own project.
        """
        return decode.job(stubs.share(self.client, job_id, project, "1"))

    def stop_sharing(self, job_id: str, project: str) -> Job:
        """Undo :meth:`share`; jobs of that project that were accepted meanwhile keep their access."""
        return decode.job(stubs.share(self.client, job_id, project, ""))

    def delete(self, job_id: str) -> None:
        """Forget a terminal job, and for a sweep also its jobs, with their files. Raises :class:`Conflict`
        while it is not over, or still needed.
        """
        for gone in stubs.delete(self.client, job_id, ""):
            if JOB_ID.fullmatch(gone):  # a host can add any text to the jobs of a sweep
                self.artifacts.remove(gone)
                remove_tree(self.data.tensorboard / gone)
                remove_tree(self.data.wandb / gone)

    def check_deletion(self, job_id: str) -> None:
        """Raise what :meth:`delete` would raise now; change nothing."""
        stubs.delete(self.client, job_id, "1")

    def adopt(self) -> None:
        """Give jobs that were accepted before there were projects to the default one. Repeating this changes
        nothing.
        """
        cursor = stubs.adopt(self.client, "", _ADOPTED_AT_ONCE)
        while cursor:
            cursor = stubs.adopt(self.client, cursor, _ADOPTED_AT_ONCE)

    def expire(self, age_s: float, most: int = 100) -> tuple[str, ...]:
        """Delete jobs that ended longer than ``age_s`` seconds ago, those submitted first, with their files.

        At most ``most`` of each terminal state are deleted. Jobs that an unfinished job still needs stay, and
        do not keep later ones from being deleted.
        """
        gone: list[str] = []
        for state in sorted(TERMINAL):
            expired = self._ended_before(f"state:{state}", age_s)
            gone += itertools.islice(filter(self._try_to_delete, expired), most)
        return tuple(gone)

    def _ended_before(self, index: str, age_s: float) -> Iterator[str]:
        seconds, microseconds = self.client.call("TIME")
        before_ms, now_ms = (int(seconds) - age_s) * 1000, int(seconds) * 1000 + int(microseconds) / 1000
        after = "-"
        while ids := self.client.call("ZRANGE", JOBS_BY(index), after, "+", "BYLEX", "LIMIT", 0, _CHUNK):
            for job_id in filter(JOB_ID.fullmatch, ids):
                created, ended = self.client.call("HMGET", JOB(job_id), "created_at", "ended_at")
                if ended is not None and float(ended) < before_ms:
                    yield str(job_id)
                elif created is not None and before_ms <= float(created) <= now_ms:
                    return  # those submitted later cannot have ended longer ago
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


def _recorded(job_id: str, record: stubs.Flat) -> Job:
    job = decode.job(record)
    if job.id != job_id:  # a host wrote this id, which leads to the folder of a job
        raise NotFound(f"there is no job {job_id}: its record is that of {job.id!r}")
    return job


def other_body(job_id: str) -> Conflict:
    return Conflict(f"this idempotency key was used for job {job_id} with another body; use a new key for a new job")
