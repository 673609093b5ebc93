"""Describes the refusals of the store when a checked job is written: quotas, jobs and uploads that are gone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from operator import itemgetter
from types import MappingProxyType

import orjson

from service.jobs.checks.dependencies import files_of
from service.jobs.records import OverQuota, Problem
from service.jobs.spec.common import CommonSpec
from service.jobs.store import decode, stubs
from service.jobs.store.client import BrokerClient
from service.jobs.store.keyspace import JOBS_BY, PROJECT_ARTIFACTS
from service.jobs.store.listing import JobFilter
from service.jobs.store.projects import artifact_bytes
from service.jobs.submission.request import joined

_MOST_NAMED = 3
_MOST_READ = 1000
"""The newest queued jobs, among which owners are counted: no more, since the broker does nothing else meanwhile."""
_PAGE_BYTES = 2**21


def refuse_over_quota(client: BrokerClient, outcome: str, quota: str, bound: str) -> None:
    """Raise :class:`OverQuota` if a script of submission refused a job because of its project's quota."""
    if outcome == "quota" and (describe := _DESCRIPTIONS.get(quota)) is not None:
        known = orjson.loads(bound)
        raise OverQuota(describe(client, known["project"], round(known["most"])))


def _queued_by_owner(client: BrokerClient, project: str, most: int) -> str:
    _, *views = stubs.list_jobs(
        client,
        filters=JobFilter(project=project, states=("queued",)).script_argument,
        text="",
        cursor="",
        limit=_MOST_READ,
        scan=_MOST_READ,
        without="spec",
        page_bytes=_PAGE_BYTES,
    )
    owners = Counter(decode.fields_of(view)["owner"] for view in views).most_common(_MOST_NAMED)
    who = ", ".join(f"{owner} has {jobs}" for owner, jobs in owners)
    count = client.call("ZCARD", JOBS_BY(f"state:queued:{project}"))
    return f"project '{project}' has {count} of {most} queued jobs{f': {who}' if who else ''}"


def _artifacts_by_job(client: BrokerClient, project: str, most: int) -> str:
    used = artifact_bytes(client, project)
    flat = client.call("ZRANGE", PROJECT_ARTIFACTS(project), 0, _MOST_NAMED - 1, "REV", "WITHSCORES")
    largest = ", ".join(f"{job} has {round(float(held))}" for job, held in zip(flat[::2], flat[1::2], strict=True))
    said = f"project '{project}' has {used} of {most} bytes of artifacts and events"
    return f"{said}; the largest: {largest}; deleting these jobs frees their bytes" if largest else said


_DESCRIPTIONS: Mapping[str, Callable[[BrokerClient, str, int], str]] = MappingProxyType(
    {"queued_jobs": _queued_by_owner, "artifact_bytes": _artifacts_by_job}
)


def _dependency_problem(spec: CommonSpec, place: str, job_id: str, state: str) -> Problem:
    path = next((needed.path for needed in spec.dependencies() if needed.job_id == job_id), "")
    said = f"there is no job {job_id}" if state == "missing" else f"job {job_id} is {state}"
    return Problem(joined(place, path), said, job_id, "a job that has succeeded or still can")


def _upload_problem(spec: CommonSpec, place: str, file_id: str, _: str) -> Problem:
    path = next((path for path, named in files_of(spec) if named == file_id), "")
    return Problem(joined(place, path), f"there is no {file_id}", file_id, "an id that an upload to /v1/files returned")


def _quota_problem(spec: CommonSpec, place: str, quota: str, bound: str) -> Problem:
    project, most = itemgetter("project", "most")(orjson.loads(bound))
    if quota == "highest_priority":
        message = f"project '{project}' may not ask for so high a priority"
        return Problem(joined(place, "priority"), message, spec.priority, f"at most {most:g}, its {quota}")
    if quota == "devices":
        message = f"project '{project}' may not use so many devices at once"
        return Problem(joined(place, "parallel"), message, spec.parallel.world_size, f"at most {most:g}, its {quota}")
    message = f"jobs of project '{project}' need a shorter time limit"
    return Problem(joined(place, "timeout_s"), message, spec.timeout_s, f"at most {most:g} s, its {quota}")


LATE_REFUSALS: Mapping[str, Callable[[CommonSpec, str, str, str], Problem]] = MappingProxyType(
    {"dependency": _dependency_problem, "quota": _quota_problem, "upload": _upload_problem}
)
"""Functions that describe a refusal, by the outcome that the script of submission names. Their arguments: a
spec, its place in the request's body, and the id and state of the job or upload that it needs, or the name of
the exceeded quota and JSON of the project and its limits.
"""
