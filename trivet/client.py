"""Provides the client: every call of the REST interface as a method with typed data in and out."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self
from urllib.parse import quote

import httpx2
from pydantic import TypeAdapter

from service.jobs.records import ApiKey, Artifact, Host, Job, JobPage, Scope, StoredFile
from service.jobs.spec.base import CommonSpec
from service.jobs.states import TERMINAL, JobState
from trivet.connection import CONNECT_S, TIMEOUT_S, Connection
from trivet.errors import Unreachable
from trivet.follow import follow

if TYPE_CHECKING:
    from service.jobs.kinds.listing import Kinds
    from service.jobs.plan import Plan

_LONGEST_WAIT_S = 20.0
_CHECKING = httpx2.Timeout(TIMEOUT_S, connect=CONNECT_S, read=900.0)
"""The service reads a job's files before it answers, within limits of its own."""


class Client:
    """A Trivet service. ``url`` and ``key`` default to ``TRIVET_URL`` and ``TRIVET_KEY``; without either, it is the
    service of the data folder, by the socket there (``unix:///folder/api.sock``).

    Methods raise :class:`trivet.Refused` with the service's problem, or :class:`trivet.Unreachable`.
    """

    def __init__(self, url: str | None = None, key: str | None = None, *, timeout_s: float = TIMEOUT_S) -> None:
        self._connection = Connection(url, key, timeout_s=timeout_s)
        self.keys = _KeysResource(self._connection)

    @property
    def url(self) -> str:
        return self._connection.url

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def submit(self, spec: CommonSpec | Mapping[str, Any], *, idempotency_key: str | None = None) -> Job:
        """Submit a job. A lost answer is asked for again under one idempotency key, so one call is one job."""
        body = dict(spec) if isinstance(spec, Mapping) else spec.model_dump(mode="json", by_alias=True)
        headers = {"Idempotency-Key": idempotency_key or str(uuid.uuid4())}
        try:
            answer = self._connection.json("POST", "/v1/jobs", json=body, headers=headers, timeout=_CHECKING)
        except Unreachable:
            answer = self._connection.json("POST", "/v1/jobs", json=body, headers=headers, timeout=_CHECKING)
        return Job.model_validate(answer)

    def job(self, job_id: str, *, wait_s: float | None = None) -> Job:
        """Return one job; with ``wait_s`` (60 at most), once it is over or the time is."""
        timeout = None if wait_s is None else wait_s + TIMEOUT_S
        options = {} if timeout is None else {"timeout": timeout}
        return Job.model_validate(self._connection.json("GET", _job(job_id), params={"wait_s": wait_s}, **options))

    def wait(self, job_id: str, *, timeout_s: float | None = None) -> Job:
        """Return the job when it is over. Raises ``TimeoutError`` after ``timeout_s`` seconds."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left = _LONGEST_WAIT_S if deadline is None else min(_LONGEST_WAIT_S, deadline - time.monotonic())
            job = self.job(job_id, wait_s=max(left, 0.0))
            if job.state in TERMINAL:
                return job
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"job {job_id} is still {job.state} after {timeout_s} s")

    def jobs(
        self,
        *,
        kind: str | None = None,
        state: JobState | None = None,
        label: str | None = None,
        owner: str | None = None,
        q: str | None = None,
        include: Literal["spec"] | None = None,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> JobPage:
        """Return a page of jobs, newest first; with their specs where ``include`` says so."""
        params = {
            "kind": kind,
            "state": state,
            "label": label,
            "owner": owner,
            "q": q,
            "include": include,
            "limit": limit,
            "cursor": cursor,
        }
        return JobPage.model_validate(self._connection.json("GET", "/v1/jobs", params=params))

    def cancel(self, job_id: str) -> Job:
        return Job.model_validate(self._connection.json("POST", f"{_job(job_id)}/cancel"))

    def retry(self, job_id: str) -> Job:
        return Job.model_validate(self._connection.json("POST", f"{_job(job_id)}/retry"))

    def delete(self, job_id: str) -> None:
        self._connection.json("DELETE", _job(job_id))

    def follow(
        self, job_id: str, *, after: str | None = None, types: Sequence[str] | None = None
    ) -> Iterator[dict[str, Any]]:
        """Yield the job's events from ``after`` (or the beginning) until it is over, over broken connections."""
        return follow(self._connection, f"{_job(job_id)}/events", {"after": after, "types": _joined(types)})

    def follow_all(
        self, job_ids: Sequence[str] | None = None, *, types: Sequence[str] | None = None
    ) -> Iterator[dict[str, Any]]:
        """Yield events of several jobs from their beginning until all are over; of every job, from now on, for ever."""
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
        self, job_id: str, *, rank: int | None = None, tail: int | None = None, jsonl: bool = False
    ) -> Iterator[str]:
        """Log lines with time and rank, as text or as JSON."""
        params = {"rank": rank, "tail": tail, "format": "jsonl" if jsonl else "text"}
        with self._connection.stream(f"{_job(job_id)}/logs", params=params) as response:
            yield from _lines(response)

    def bounds(self, job_id: str) -> Iterator[dict[str, Any]]:
        """Yield every row of a verification job."""
        cursor: str | None = None
        while True:
            page = self._connection.json("GET", f"{_job(job_id)}/bounds", params={"limit": 1000, "cursor": cursor})
            yield from page["items"]
            cursor = page["next_cursor"]
            if cursor is None:
                return

    def report(self, job_id: str) -> dict[str, Any]:
        report: dict[str, Any] = self._connection.json("GET", f"{_job(job_id)}/report")
        return report

    def schedule(self, job_id: str) -> Plan:
        """Return what a training job's pipeline is going to do in a step."""
        from service.jobs.plan import Plan  # noqa: PLC0415 - brings every spec, which most calls do not need

        return TypeAdapter(Plan).validate_python(self._connection.json("GET", f"{_job(job_id)}/schedule"))

    def timeline(self, job_id: str, *, step: int | None = None) -> dict[str, Any]:
        """Return what each rank did in a step (the newest when absent): ``steps`` that were measured, ``step``,
        ``spans``; and ``apart``, the spans that belong to no step, as the rungs of a compile job.
        """
        found: dict[str, Any] = self._connection.json("GET", f"{_job(job_id)}/timeline", params={"step": step})
        return found

    def artifacts(self, job_id: str) -> list[Artifact]:
        answer = self._connection.json("GET", f"{_job(job_id)}/artifacts")
        return [Artifact.model_validate(item) for item in answer["items"]]

    def download(self, job_id: str, name: str, target: str | PathLike[str]) -> int:
        """Write an artifact to ``target``, which appears only when it is complete. Returns its size in bytes."""
        return self._save(f"{_job(job_id)}/artifacts/{quote(name)}", target)

    def upload(self, path: str | PathLike[str], media_type: str = "application/octet-stream") -> StoredFile:
        """Upload a file; the same bytes give the same id."""
        with Path(path).open("rb") as file:
            answer = self._connection.json("POST", "/v1/files", content=file, headers={"Content-Type": media_type})
        return StoredFile.model_validate(answer)

    def download_file(self, file_id: str, target: str | PathLike[str]) -> int:
        """Write an uploaded file to ``target``, which appears only when it is complete. Returns its size in bytes."""
        return self._save(f"/v1/files/{quote(file_id, safe='')}", target)

    def _save(self, url: str, where: str | PathLike[str]) -> int:
        target = Path(where)
        partial = target.with_name(f".{target.name}.{uuid.uuid4().hex}.part")
        try:
            with self._connection.stream(url) as response, partial.open("wb") as file:
                size = sum(file.write(chunk) for chunk in response.iter_bytes())
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
        return size

    def hosts(self) -> list[Host]:
        return [Host.model_validate(item) for item in self._connection.json("GET", "/v1/hosts")["items"]]

    def drain(self, host: str) -> Host:
        return Host.model_validate(self._connection.json("POST", f"/v1/hosts/{quote(host, safe='')}/drain"))

    def resume(self, host: str) -> Host:
        return Host.model_validate(self._connection.json("POST", f"/v1/hosts/{quote(host, safe='')}/resume"))

    def kinds(self) -> Kinds:
        """List the kinds of jobs, and the families, sources, objectives and programs that they can name."""
        from service.jobs.kinds.listing import Kinds  # noqa: PLC0415 - as above

        return Kinds.model_validate(self._connection.json("GET", "/v1/kinds"))

    def schema(self, kind: str) -> dict[str, Any]:
        """Return the JSON Schema of a kind's spec."""
        schema: dict[str, Any] = self._connection.json("GET", f"/v1/kinds/{quote(kind, safe='')}/schema")
        return schema

    def is_ready(self) -> bool:
        """Return whether the service answers and reaches its broker."""
        try:
            return self._connection.send("GET", "/readyz").status_code == 200
        except Exception as error:
            if isinstance(error, Unreachable) or getattr(error, "status", None) == 503:
                return False
            raise


class _KeysResource:
    """API keys; needs an admin key."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def create(self, name: str, scopes: Sequence[Scope] = ("read",)) -> tuple[ApiKey, str]:
        """Create a key; return it and its secret, which is shown this once."""
        answer = self._connection.json("POST", "/v1/keys", json={"name": name, "scopes": list(scopes)})
        return ApiKey.model_validate(answer), answer["secret"]

    def list(self) -> list[ApiKey]:
        return [ApiKey.model_validate(item) for item in self._connection.json("GET", "/v1/keys")["items"]]

    def revoke(self, key_id: str) -> None:
        self._connection.json("DELETE", f"/v1/keys/{quote(key_id, safe='')}")


def _lines(response: httpx2.Response) -> Iterator[str]:
    """Yield the lines of a text, each ended by a line feed and by nothing else that some call a line's end."""
    held = ""
    for chunk in response.iter_text():
        *complete, held = (held + chunk).split("\n")
        yield from complete
    if held:
        yield held


def _job(job_id: str) -> str:
    return f"/v1/jobs/{quote(job_id, safe='')}"


def _joined(names: Sequence[str] | None) -> str | None:
    return None if names is None else ",".join(names)
