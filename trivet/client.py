"""Provides the client: every call of the REST interface as a method with typed data in and out."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack
from urllib.parse import quote

import httpx2
from pydantic import TypeAdapter

from service.jobs.events import Level
from service.jobs.records import Artifact, Job, JobCounts, JobPage, ListedJob, ProjectShare, QueueLine, QueuePage
from service.jobs.spec.common import TERMINAL, CommonSpec, JobState
from trivet.connection import CONNECT_S, TIMEOUT_S, Connection, lines_of
from trivet.errors import Refused, TrivetError, Unreachable
from trivet.file_calls import FileCalls
from trivet.filters import Deletions, JobFilters, JobsWanted
from trivet.follow import follow
from trivet.live_modules import ModuleCalls
from trivet.operator_calls import OperatorCalls

if TYPE_CHECKING:
    from service.jobs.records.kinds import Kinds
    from service.jobs.records.webhooks import WebhookDelivery
    from service.jobs.submission.plan import Plan


_LONGEST_WAIT_S = 20.0
_NAMED_AT_ONCE = 100
_CHECKING = httpx2.Timeout(TIMEOUT_S, connect=CONNECT_S, read=900.0)
"""The service reads a job's files before it answers, within limits of its own."""


class Client(FileCalls, OperatorCalls, ModuleCalls):
    """A Trivet service. ``url`` and ``key`` default to ``TRIVET_URL`` and ``TRIVET_KEY``; without either, it is the
    service of the data folder, by the socket there (``unix:///folder/api.sock``).

    Methods raise :class:`trivet.Refused` with the service's problem, or :class:`trivet.Unreachable`. In an
    outage, calls that are safe to repeat are repeated for at most ``outage_s`` seconds (by default the
    setting): reads, submissions, uploads, cancellations, draining. A request that never reached the service is
    always repeated.
    """

    def __init__(
        self,
        url: str | None = None,
        key: str | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        outage_s: float | None = None,
    ) -> None:
        self._connection = Connection(url, key, timeout_s=timeout_s, outage_s=outage_s)

    @property
    def url(self) -> str:
        return self._connection.url

    @property
    def key_expires(self) -> str | None:
        """Return when the key expires, as an ISO 8601 time, once the service says that this is near."""
        return self._connection.key_expires

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def submit(
        self, spec: CommonSpec | Mapping[str, Any], *, idempotency_key: str | None = None, project: str | None = None
    ) -> Job:
        """Submit a job. If the answer is lost, the call repeats under one idempotency key, so one call is one job.
        Only an operator's key may name a project other than its own.
        """
        return Job.model_validate(self._submit("/v1/jobs", _body(spec), idempotency_key, project))

    def check(self, spec: CommonSpec | Mapping[str, Any], *, project: str | None = None) -> dict[str, Any]:
        """Check a spec like a submission, and submit nothing. Return the number of its ``jobs``, the ``ranks``
        of each, and the ``plan`` of a pipeline. Raises :class:`trivet.Refused` if it would be refused.
        """
        text = json.dumps(_body(spec), allow_nan=False)
        answer: dict[str, Any] = self._connection.json(
            "POST", "/v1/jobs:check", json={"text": text}, params={"project": project}, timeout=_CHECKING
        )
        if answer["errors"]:
            raise Refused(422, "Invalid spec", "it would be refused", answer["errors"])
        return {name: answer[name] for name in ("jobs", "ranks", "plan")}

    def submit_many(
        self,
        specs: Iterable[CommonSpec | Mapping[str, Any]],
        *,
        idempotency_key: str | None = None,
        project: str | None = None,
    ) -> list[ListedJob]:
        """Submit up to 1,000 jobs, all or none; return them with their specs, in the order of the specs. Lost answers
        and projects are handled as in :meth:`submit`.
        """
        body = {"jobs": [_body(spec) for spec in specs]}
        answer = self._submit("/v1/jobs:batch", body, idempotency_key, project)
        ids = [item["id"] for item in answer["items"]]
        found = {job.id: job for job in self._named(ids)}
        if gone := [job_id for job_id in ids if job_id not in found]:
            raise TrivetError(f"{len(ids)} jobs were submitted, and {gone[0]} is no longer there")
        return [found[job_id] for job_id in ids]

    def _named(self, job_ids: Sequence[str]) -> Iterator[ListedJob]:
        """Yield the jobs of these ids with their specs, some at a time, since an address is short."""
        for start in range(0, len(job_ids), _NAMED_AT_ONCE):
            wanted = {"ids": ",".join(job_ids[start : start + _NAMED_AT_ONCE]), "include": "spec"}
            yield from map(ListedJob.model_validate, self._connection.items("/v1/jobs", wanted))

    def _submit(self, path: str, body: dict[str, Any], idempotency_key: str | None, project: str | None) -> Any:
        request: dict[str, Any] = {
            "json": body,
            "headers": {"Idempotency-Key": idempotency_key or str(uuid.uuid4())},
            "params": {"project": project},
            "timeout": _CHECKING,
        }
        return self._connection.json("POST", path, bears_repetition=True, **request)

    def job(self, job_id: str, *, wait_s: float | None = None) -> Job:
        """Return one job; with ``wait_s`` (60 at most), once it has ended or the time has passed."""
        timeout = None if wait_s is None else wait_s + TIMEOUT_S
        options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
        return Job.model_validate(self._connection.json("GET", _job(job_id), params={"wait_s": wait_s}, **options))

    def wait(self, job_id: str, *, timeout_s: float | None = None) -> Job:
        """Wait until the job has ended, and return it. Raises ``TimeoutError`` after ``timeout_s`` seconds."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left = _LONGEST_WAIT_S if deadline is None else min(_LONGEST_WAIT_S, deadline - time.monotonic())
            job = self.job(job_id, wait_s=max(left, 0.0))
            if job.state in TERMINAL:
                return job
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"job {job_id} is still {job.state} after {timeout_s} s")

    def wait_many(self, job_ids: Iterable[str], *, timeout_s: float | None = None) -> list[Job]:
        """Wait until all of several jobs have ended; return them in their order. Raises :class:`TimeoutError`
        like :meth:`wait` if all together take more than ``timeout_s`` seconds.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        return [
            self.wait(job_id, timeout_s=None if deadline is None else max(deadline - time.monotonic(), 0.0))
            for job_id in job_ids
        ]

    def jobs(self, **wanted: Unpack[JobsWanted]) -> Iterator[ListedJob]:
        """Yield every job that is wanted, newest first; with ``order="active"`` running jobs, then the queue in its
        order, then ended jobs. ``include="spec"`` adds their specs.
        """
        return map(ListedJob.model_validate, self._connection.items("/v1/jobs", wanted))

    def job_page(self, *, limit: int | None = None, cursor: str | None = None, **wanted: Unpack[JobsWanted]) -> JobPage:
        """Return one page of what :meth:`jobs` yields, and the cursor of the next."""
        params = {**wanted, "limit": limit, "cursor": cursor}
        return JobPage.model_validate(self._connection.json("GET", "/v1/jobs", params=params))

    def job_counts(self, **filters: Unpack[JobFilters]) -> JobCounts:
        """Count jobs by state; if counting was cut off, the counts are not ``exact``."""
        return JobCounts.model_validate(self._connection.json("GET", "/v1/jobs:counts", params=filters))

    def cancel(self, job_id: str) -> Job:
        return Job.model_validate(self._connection.json("POST", f"{_job(job_id)}/cancel", bears_repetition=True))

    def retry(self, job_id: str) -> Job:
        return Job.model_validate(self._connection.json("POST", f"{_job(job_id)}/retry"))

    def delete(self, job_id: str) -> None:
        self._connection.json("DELETE", _job(job_id))

    def delete_matching(
        self,
        *,
        state: Sequence[JobState] | None = None,
        ended_before: datetime | None = None,
        dry_run: bool = False,
        **filters: Unpack[JobFilters],
    ) -> Deletions:
        """Delete every ended job that matches all filters, some at a time, or with ``dry_run`` only find out which; at
        least one filter is needed. What an unfinished job needs, and what the key may not change, stays.
        """
        if ended_before is not None and ended_before.tzinfo is None:
            raise ValueError(f"ended_before: {ended_before} has no time zone; give one, as with .astimezone()")
        if state is not None and not state:
            raise ValueError("state: got no state, which would choose every ended job; expected one or more, or None")
        moment = None if ended_before is None else ended_before.isoformat()
        wanted = {**filters, "state": state, "ended_before": moment, "dry_run": dry_run or None}
        jobs: list[str] = []
        kept: dict[str, str] = {}
        while True:
            page = self._connection.json("POST", "/v1/jobs:delete", params=wanted)
            jobs += page["jobs"]
            kept |= {each["job"]: each["why"] for each in page["kept"]}
            if page["next_cursor"] is None:
                return Deletions(tuple(jobs), kept)
            wanted["cursor"] = page["next_cursor"]

    def share(self, job_id: str, project: str) -> Job:
        """Let the members of another project read a job and what it produces."""
        return Job.model_validate(self._connection.json("POST", f"{_job(job_id)}/share", json={"project": project}))

    def stop_sharing(self, job_id: str, project: str) -> Job:
        """Undo :meth:`share`."""
        return Job.model_validate(self._connection.json("DELETE", f"{_job(job_id)}/share/{quote(project, safe='')}"))

    def queue(
        self, *, job: str | None = None, owner: str | None = None, project: str | None = None
    ) -> Iterator[QueueLine]:
        """Yield every waiting job in the order of placement, with its place, why it waits, and when it may start."""
        wanted = {"job": job, "owner": owner, "project": project}
        return map(QueueLine.model_validate, self._connection.items("/v1/queue", wanted))

    def queue_page(
        self,
        *,
        job: str | None = None,
        owner: str | None = None,
        project: str | None = None,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> QueuePage:
        """Return one page of what :meth:`queue` yields, and how many jobs wait in all."""
        params = {"job": job, "owner": owner, "project": project, "limit": limit, "cursor": cursor}
        return QueuePage.model_validate(self._connection.json("GET", "/v1/queue", params=params))

    def shares(self) -> list[ProjectShare]:
        """Return what projects have used and hold; first comes the project whose jobs are next at equal priority."""
        return self._connection.listed(ProjectShare, "/v1/shares")

    def weigh(self, project: str, weight: float) -> ProjectShare:
        """Give a project a weight (needs an admin key): one of weight 2 may use twice as much as one of weight 1."""
        path = f"/v1/shares/{quote(project, safe='')}"
        return ProjectShare.model_validate(self._connection.json("PUT", path, json={"weight": weight}))

    def follow(
        self, job_id: str, *, after: str | None = None, types: Sequence[str] | None = None
    ) -> Iterator[dict[str, Any]]:
        """Yield the job's events from ``after`` (or the beginning) until it ends, over broken connections."""
        return follow(self._connection, f"{_job(job_id)}/events", {"after": after, "types": _joined(types)})

    def follow_all(
        self, job_ids: Sequence[str] | None = None, *, types: Sequence[str] | None = None
    ) -> Iterator[dict[str, Any]]:
        """Yield events of several jobs from their beginning until all have ended, or of every job from now on, for
        ever.
        """
        return follow(self._connection, "/v1/events", {"jobs": _joined(job_ids), "types": _joined(types)})

    def events(
        self, job_id: str, *, after: str | None = None, types: Sequence[str] | None = None, limit: int | None = None
    ) -> dict[str, Any]:
        """Return a page of events: ``items``, ``next_after``, ``gap``."""
        params = {"after": after, "types": _joined(types), "limit": limit}
        page: dict[str, Any] = self._connection.json("GET", f"{_job(job_id)}/events", params=params)
        return page

    def metrics(
        self, job_id: str, *, names: Sequence[str] | None = None, max_points: int | None = None
    ) -> dict[str, dict[str, list[float]]]:
        """Return ``name -> {step, time, value}``, downsampled by the service."""
        params = {"names": _joined(names), "max_points": max_points}
        answer = self._connection.json("GET", f"{_job(job_id)}/metrics", params=params)
        series: dict[str, dict[str, list[float]]] = answer["series"]
        return series

    def logs(
        self,
        job_id: str,
        *,
        rank: int | None = None,
        stream: Literal["stdout", "stderr", "service"] | None = None,
        attempt: int | None = None,
        q: str | None = None,
        level: Level | None = None,
        tail: int | None = None,
        jsonl: bool = False,
    ) -> Iterator[str]:
        """Yield the output of ranks, oldest first, with time and rank, as text or as JSON: all of it, or the
        lines of one rank, stream or attempt, those that contain ``q`` in any case or speak of a warning or
        an error (``level``), or the last ``tail`` of them.
        """
        params = {
            "rank": rank,
            "stream": stream,
            "attempt": attempt,
            "q": q,
            "level": level,
            "tail": tail,
            "format": "jsonl" if jsonl else "text",
        }
        with self._connection.opened(f"{_job(job_id)}/logs", params=params) as response:
            yield from lines_of(response)

    def bounds(self, job_id: str) -> Iterator[dict[str, Any]]:
        """Yield every row of a verification job."""
        return self._connection.items(f"{_job(job_id)}/bounds", {})

    def report(self, job_id: str) -> dict[str, Any]:
        report: dict[str, Any] = self._connection.json("GET", f"{_job(job_id)}/report")
        return report

    def schedule(self, job_id: str) -> Plan:
        """Return the planned schedule of one step of a training job's pipeline."""
        from service.jobs.submission.plan import Plan  # noqa: PLC0415 - brings every spec, which most calls do not need

        return TypeAdapter(Plan).validate_python(self._connection.json("GET", f"{_job(job_id)}/schedule"))

    def timeline(self, job_id: str, *, step: int | None = None) -> dict[str, Any]:
        """Return what each rank did in a step (the newest when absent): ``steps`` that were measured, ``step``,
        ``spans``; and ``apart``, the spans that belong to no step, as the rungs of a compile job.
        """
        found: dict[str, Any] = self._connection.json("GET", f"{_job(job_id)}/timeline", params={"step": step})
        return found

    def artifacts(self, job_id: str) -> list[Artifact]:
        return self._connection.listed(Artifact, f"{_job(job_id)}/artifacts")

    def download(self, job_id: str, name: str, target: str | PathLike[str]) -> int:
        """Write an artifact to ``target``: a file, which appears only when it is complete, or a device or a pipe.
        Returns its size in bytes.
        """
        return self._save(f"{_job(job_id)}/artifacts/{quote(name)}", target)

    def notices(self, job_id: str) -> list[WebhookDelivery]:
        """Return the deliveries of the ``notify`` in a job's spec, newest first."""
        from service.jobs.records.webhooks import WebhookDelivery  # noqa: PLC0415 - most calls do not need them

        return self._connection.listed(WebhookDelivery, f"{_job(job_id)}/notices")

    def kinds(self) -> Kinds:
        """List the kinds of jobs, and what they can name: families, sources, objectives, optimizers and so on."""
        from service.jobs.records.kinds import Kinds  # noqa: PLC0415 - most calls do not need them

        return Kinds.model_validate(self._connection.json("GET", "/v1/kinds"))

    def schema(self, kind: str) -> dict[str, Any]:
        """Return the JSON Schema of a kind's spec."""
        schema: dict[str, Any] = self._connection.json("GET", f"/v1/kinds/{quote(kind, safe='')}/schema")
        return schema

    def is_ready(self) -> bool:
        """Return whether the service now answers and reaches its broker."""
        try:
            return self._connection.send("GET", "/readyz").status_code == 200
        except Exception as error:
            if isinstance(error, Unreachable) or getattr(error, "status", None) == 503:
                return False
            raise


def _body(spec: CommonSpec | Mapping[str, Any]) -> dict[str, Any]:
    return dict(spec) if isinstance(spec, Mapping) else spec.model_dump(mode="json", by_alias=True)


def _job(job_id: str) -> str:
    return f"/v1/jobs/{quote(job_id, safe='')}"


def _joined(names: Sequence[str] | None) -> str | None:
    return names if names is None or isinstance(names, str) else ",".join(names)
